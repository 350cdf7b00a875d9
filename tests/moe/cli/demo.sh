#!/usr/bin/env bash
# The demo, killed half-way and resumed on other ranks, has the bits of one that never stopped; its
# export has the loss of its checkpoint, for transformers, too: bash demo.sh <moe>
# DEMO_PYTHON: one that has transformers; without it that part is left out.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
python=${DEMO_PYTHON-}
export DEMO_MOE
DEMO_MOE=$(realpath "$moe")
demo=("$tree/scripts/demo.sh" --steps 12 --log-interval 1 --eval-interval 100 --eval-sequences 8)

DEMO_DIR=$work/whole expect 0 "the demo on one rank" "${demo[@]}" --ranks 1 --ep 1
hash=$(value "$work/whole/run/metrics.jsonl" weights_xxh3)
[[ -n $hash ]] || fail "no hash in $(tail -n 1 "$work/whole/run/metrics.jsonl")"

export DEMO_DIR=$work/halves
"${demo[@]}" --save-interval 3 >"$work/stdout" 2>"$work/stderr" &
pid=$!
for ((i = 0; i < 3000; ++i)); do
  compgen -G "$work/halves/run/checkpoints/step-*/manifest.json" >/dev/null && break
  sleep 0.02
done
kill -KILL $pid
wait $pid 2>/dev/null
compgen -G "$work/halves/run/checkpoints/step-*/manifest.json" >/dev/null || fail "killed: no checkpoint"
[[ -d $work/halves/run/checkpoints/step-00000012 ]] && fail "killed after its last step"

expect 0 "resumed on three ranks" "${demo[@]}" --save-interval 3 --ranks 3 --ep 1 --resume auto
grep -qE "^trained [0-9]+ steps after step [0-9]+ in " "$work/stdout" || fail "resumed: $(head -n 1 "$work/stdout")"
[[ $(value "$work/halves/run/metrics.jsonl" weights_xxh3) == "$hash" ]] || fail "resumed: another hash than $hash"

make_text "$work/text" 2049
eval_on=(--data "$work/text" --seq-length 128 -o json)
expect 0 "eval" "$moe" eval --checkpoint "$work/halves/run" "${eval_on[@]}"
loss=$(value "$work/stdout" loss)
expect 0 "export" "$moe" ckpt export "$work/halves/run" --format mixtral --out "$work/hf"
run "$moe" eval --checkpoint "$work/hf" "${eval_on[@]}"
[[ $(value "$work/stdout" loss) == "$loss" ]] || fail "exported: $(cat "$work/stdout"), the checkpoint's is $loss"
[[ -z $python ]] && echo "left out: no Python with transformers"
if [[ -n $python ]]; then
  expect 0 "transformers" "$python" "$tree/tests/moe/cli/demo_loss.py" "$work/hf" "$work/text" 128
  awk -v a="$loss" -v b="$(cat "$work/stdout")" 'BEGIN { exit !(b > 0 && (a - b)^2 <= (1e-5 * a)^2) }' ||
    fail "transformers says $(cat "$work/stdout"), moe $loss"
fi
finish
