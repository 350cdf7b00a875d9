#!/usr/bin/env bash
# The demo, killed half-way and resumed on other ranks, has the bits of an uninterrupted one:
#   bash demo.sh <moe>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
export DEMO_MOE
DEMO_MOE=$(realpath "$moe")
demo=("$tree/scripts/demo.sh" --steps 12 --log-interval 1 --eval-interval 100 --eval-sequences 8)

DEMO_DIR=$work/whole expect 0 "the demo on one rank" "${demo[@]}" --ranks 1 --ep 1

export DEMO_DIR=$work/halves
"${demo[@]}" --save-interval 3 >"$work/stdout" 2>"$work/stderr" &
pid=$!
await 60 compgen -G "$work/halves/run/checkpoints/step-*/manifest.json" || fail "killed: no checkpoint"
kill -KILL $pid
wait $pid 2>/dev/null
[[ -d $work/halves/run/checkpoints/step-00000012 ]] && fail "killed after its last step"

expect 0 "resumed on three ranks" "${demo[@]}" --save-interval 3 --ranks 3 --ep 1 --resume auto
matches "^trained [0-9]+ steps after step [0-9]+ in "
same_weights "$work/whole/run" "$work/halves/run"
finish
