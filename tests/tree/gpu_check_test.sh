#!/usr/bin/env bash
# scripts/gpu_check.sh on a machine without a GPU: it makes a bundle, which runs from another folder
# and reports that no GPU was found.
#
#   gpu_check_test.sh <source> <build> <scratch>
set -euo pipefail
source_dir=$1 build=$2 scratch=$3
if nvidia-smi -L >/dev/null 2>&1; then
  echo "there is a GPU"
  exit 77
fi
fail() {
  echo "FAIL: $*" >&2
  exit 1
}

rm -rf "$scratch"
mkdir -p "$scratch/full"
touch "$scratch/full/file"
check=$source_dir/scripts/gpu_check.sh
rc=0
"$check" --bundle "$scratch/full" --build "$build" 2>/dev/null || rc=$?
[[ $rc == 1 && -e $scratch/full/file ]] || fail "a folder that is no bundle was taken, exit code $rc"
rc=0
"$check" --bundle "$scratch/bundle" --build "$build" || fail "no bundle"
mv "$scratch/bundle" "$scratch/moved"
"$scratch/moved/gpu_check.sh" --out "$scratch/out" >"$scratch/log" || rc=$?
cat "$scratch/log"
[[ $rc == 10 ]] || fail "exit code $rc, expected 10"
[[ $(tail -n 1 "$scratch/log") == *"no GPU was found"* ]] || fail "the last line says nothing of the GPU"
rc=0
"$scratch/moved/gpu_check.sh" --only bench --out "$scratch/out" >"$scratch/log" || rc=$?
[[ $rc == 10 && $(tail -n 1 "$scratch/log") == *"no GPU was found"* ]] || fail "--only bench: exit code $rc"
rc=0
"$scratch/moved/gpu_check.sh" --only half 2>/dev/null || rc=$?
[[ $rc == 2 ]] || fail "--only half: exit code $rc, expected 2"
"$scratch/moved/gpu_check.sh" --out "$scratch/full" 2>/dev/null && fail "another's folder was taken"
"$scratch/moved/gpu_check.sh" --bundle x 2>/dev/null && fail "a bundle made a bundle"
rm -rf "$scratch"
