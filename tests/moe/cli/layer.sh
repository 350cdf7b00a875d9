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

# Every model at every layout, and its values, are golden_test's. Here: layers of each kind run, one
# from an index, and any ranks give the same files.
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
layer mixtral-1 --dtype f16
expect 0 "f16"
layer mixtral-1 --numerics fast --layer 0
expect 0 "fast"
[[ ! -s stderr ]] || fail "a layer that was asked for is named: $(cat stderr)"

# A file that shrinks while it is read: 16,000 rounds read it, so that it cannot be over before.
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

# wrong <exit code> <part of the line> <flags...>: they come after a call that is right.
case=$data/mixtral-1
rm -f y g
outputs=(y g)
right=(layer --hf-config "$case/config.json" --weights "$case" --input "$case/io.safetensors" --output y
  --grad-output "$case/io.safetensors" --grads g --quiet)
wrong() {
  refused "$1" "$2" "${right[@]}" "${@:3}"
  ls ./*.tmp-* >/dev/null 2>&1 && fail "$what: left a temporary file"
}

# Flags and paths.
wrong 2 "unknown flag '--layers'; did you mean '--layer'?" --layers 1
wrong 2 "--ep is 3, expected a divisor of the 4 ranks: 1, 2, 4" --ranks 4 --ep 3
wrong 2 "--layer is 'x', expected a whole number" --layer x
wrong 2 "--layer: layer 4 does not exist, expected 0 to 3" --layer 4
wrong 2 "--threads is 0" --threads 0
wrong 2 "--hf-config: cannot open 'none'" --hf-config none
wrong 2 "--weights: cannot open 'none'" --weights none
wrong 2 "--input: cannot open 'none'" --input none
wrong 2 "--grad-output: cannot open 'none'" --grad-output none
wrong 2 "expected another file than --output" --grads y
wrong 2 "expected another file than --input" --output "$case/../mixtral-1/io.safetensors"
cp -r "$case" model
wrong 2 "expected another file than --weights" --weights model --output model/model.safetensors
wrong 2 "expected another file than --weights" --weights model --trace model/../model/model.safetensors
cmp -s "$case/model.safetensors" model/model.safetensors || fail "the weights were written to"
echo '{}' >settings.json
wrong 2 "expected another file than --config" --config settings.json --trace settings.json
cp -r "$data/qwen3_moe-1" sharded
for file in model-00002-of-00002.safetensors model.safetensors.index.json; do
  wrong 2 "expected another file than --weights" --weights sharded --output sharded/$file
  cmp -s "$data/qwen3_moe-1/$file" sharded/$file || fail "$file was written to"
done
wrong 2 "its folder is not there" --output none/y
expect 2 "no flags" "$moe" layer
expect 2 "--grads alone" "${forward[@]}" --weights "$case" --grads g

# Outputs that cannot be written.
wrong 4 "--output: cannot write '/proc/y'" --output /proc/y
wrong 4 "--grads: cannot write '/proc/g'" --grads /proc/g
wrong 4 "--output: cannot write '/dev/full'" --output /dev/full

# Content, of which tests/moe/hf and tests/moe/io have the rest. A model of the same sizes under other
# names lacks every tensor.
sed 's/mixtral/dbrx/' "$case/config.json" >config.json
wrong 3 "config.json: model_type is 'dbrx', which is not supported" --hf-config config.json
sed 's/"hidden_size": 13/"hidden_size": 14/' "$case/config.json" >config.json
wrong 3 "gate.weight': has shape [5, 13], expected [5, 14]" --hf-config config.json
head -c -1 "$case/model.safetensors" >model.safetensors
wrong 3 "model.safetensors: " --weights model.safetensors
wrong 3 "mlp.gate.weight': has shape [9, 13], expected [5, 13]" --weights "$data/olmoe-1"
wrong 3 "io.safetensors: tensor 'x': has shape [17, 20], expected [tokens, 13]" \
  --input "$data/mixtral-2/io.safetensors"
wrong 3 "tensor 'dy': has shape [11, 15], expected [11, 13]" \
  --grad-output "$data/qwen3_moe-1/io.safetensors"
wrong 3 "tensor 'x': is missing" --input "$case/grads.safetensors"

# Empty files, files of one byte, and folders.
mkdir folder
mkdir index
: >empty
printf x >byte
for file in empty byte; do
  for flag in --hf-config --weights --input --grad-output; do
    wrong 3 "$flag: $file: " "$flag" $file
  done
  cp $file index/model.safetensors.index.json
  wrong 3 "--weights: index/model.safetensors.index.json: " --weights index
done
for flag in --hf-config --input --grad-output; do
  wrong 2 "$flag: 'folder' is a folder, expected a file" "$flag" folder
done
wrong 2 "--weights: " --weights folder
finish
