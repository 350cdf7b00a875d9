#!/usr/bin/env bash
# `moe layer` end to end on the golden files: bash layer.sh <moe> <golden data> [<mpiexec>]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
data=$2
mpiexec=${3:-}
cd "$work" || exit 1

# layer <case> <flags...>: forward and backward; files y and g.
layer() {
  local case=$data/$1
  shift
  run "$moe" layer --hf-config "$case/config.json" --weights "$case" --input "$case/io.safetensors" \
    --output y --grad-output "$case/io.safetensors" --grads g "$@"
}

# golden_test has every model at every layout, with its values. Here: layers of each kind run, one
# from an index, and any number of ranks gives the same files.
for case in mixtral-1 deepseek_v3-1 gpt_oss-1 llama4-1 longcat_flash-1 qwen3_moe-1; do
  layer "$case" --ranks 1
  expect 0 "$case"
  (($(wc -l <stdout) == 1)) || fail "$case: $(wc -l <stdout) lines of result"
  mv y y1
  mv g g1
  layer "$case" --ranks 8 --ep 4 --quiet
  expect 0 "$case, eight ranks"
  cmp -s y y1 && cmp -s g g1 || fail "$case, eight ranks: other bytes"
  [[ ! -s stderr ]] || fail "$case: --quiet is not: $(cat stderr)"
done
layer mixtral-1
matches "^mixtral layer 0 \| 11 tokens \| H 13 F 7 E 5 K 2 \| 4 ranks, ep 4 \| f32 \| forward .* ms \| backward .* ms \| wrote y, g$"
grep -qF "layer 0, the only one with experts" stderr || fail "no layer named: $(cat stderr)"
layer mixtral-1 --dtype bf16
expect 0 "bf16"
layer mixtral-1 --dtype bf16 --bf16-order tile
expect 0 "bf16 in tiles"
layer mixtral-1 --dtype f16
expect 0 "f16"
layer mixtral-1 --numerics fast --layer 0
expect 0 "fast"
[[ ! -s stderr ]] || fail "a layer that was asked for is named: $(cat stderr)"

# A file that is truncated while it is read: 16,000 rounds read it, so that the run cannot end
# before.
python3 - big <<'PY' || fail "no file to shrink"
import json, struct, sys
rows = 1 << 20
header = json.dumps({"x": {"dtype": "F32", "shape": [rows, 13], "data_offsets": [0, 52 * rows]}}).encode()
with open(sys.argv[1], "wb") as f:
    f.write(struct.pack("<Q", len(header)) + header)
    f.truncate(8 + len(header) + 52 * rows)
PY
"$moe" layer --hf-config "$data/mixtral-1/config.json" --weights "$data/mixtral-1" --input big \
  --output z --ranks 2 --quiet 2>stderr &
await 10 grep -qs '/big$' /proc/$!/maps
truncate -s 4096 big
wait $!
code=$?
((code == 4)) || fail "a file that shrinks: exit $code, expected 4"
(($(grep -c 'became shorter while it was read' stderr) == 1 && $(wc -l <stderr) == 1)) ||
  fail "a file that shrinks: $(cat stderr)"
[[ ! -e z ]] || fail "a file that shrinks: wrote"
rm big

# Forward alone.
case=$data/qwen3_moe-1
forward=("$moe" layer --hf-config "$case/config.json" --input "$case/io.safetensors" --output y)
expect 0 "an index, forward" "${forward[@]}" --weights "$case/model.safetensors.index.json"
grep -aq '"dx"' y && fail "forward: wrote dx"
if [[ -n $mpiexec ]]; then
  layer mixtral-2 --ranks 1
  mv y y1
  mv g g1
  case=$data/mixtral-2
  expect 0 "three processes" "$mpiexec" -n 3 "$moe" layer --hf-config "$case/config.json" --weights "$case" \
    --input "$case/io.safetensors" --output y --grad-output "$case/io.safetensors" --grads g
  cmp -s y y1 && cmp -s g g1 || fail "three processes: other bytes"
  (($(grep -c '^mixtral layer' stdout) == 1)) || fail "three processes: not one result"
fi
finish
