#!/usr/bin/env bash
# Builds `moe` and trains a small mixture-of-experts language model on the jokes and quotations of
# the `fortunes` package, on four in-process ranks.
#
#   scripts/demo.sh [flags of moe train...]      e.g. scripts/demo.sh --steps 20
#
# Flags given here come last, so they win; with --resume auto training resumes where the last demo
# was stopped. Results: build/demo/run/metrics.jsonl, and the trained model:
#
#   build/demo/moe/cli/moe generate --checkpoint build/demo/run --prompt 'Life is '
#
# DEMO_MOE: an existing `moe`, so that nothing is installed or built; DEMO_DIR: replaces build/demo.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

text=/usr/share/games/fortunes
dir=${DEMO_DIR:-build/demo}
moe=${DEMO_MOE:-$dir/moe/cli/moe}
mkdir -p "$dir"
build() {
  cmake --preset demo && cmake --build --preset demo -j "$jobs" --target moe
}
if [[ -z ${DEMO_MOE-} ]]; then
  scripts/install_deps.sh --demo
  echo "demo: building (the log is $dir/build.log)"
  if ! build >"$dir/build.log" 2>&1; then
    tail -n 60 "$dir/build.log" >&2
    echo "demo: the build failed" >&2
    exit 1
  fi
fi
[[ " $* " == *" --resume "* ]] || rm -rf "$dir/run" # remains of an earlier demo
set -x
exec "$moe" train --data "$text" --out "$dir/run" --ranks 4 --ep 2 --num-experts 8 \
  --topk 2 --steps 800 --lr 0.002 --lr-warmup-steps 50 --eval-interval 100 --log-interval 20 \
  --save "$dir/run/checkpoints" "$@"
