#!/usr/bin/env bash
# clang-format and clang-tidy over the sources.
#
#   scripts/lint.sh [--fix] [--all | FILE...]
#
# Without files: those that differ from the branch's upstream (or the last commit), committed or
# not. --all: every source file. --fix: rewrites formatting; names and bugs need manual changes.
# Needs a configured build/cpu or build/release for the compile commands.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

folders=(kernels comm gating dispatch moe benchmarks examples tests)
fix= all= files=()
for arg in "$@"; do
  case "$arg" in
    --fix) fix=1 ;;
    --all) all=1 ;;
    -*)
      echo "usage: scripts/lint.sh [--fix] [--all | FILE...]" >&2
      exit 2
      ;;
    *) files+=("$arg") ;;
  esac
done
if [[ $all ]]; then
  mapfile -t files < <(git ls-files -- "${folders[@]}")
elif ((${#files[@]} == 0)); then
  base=$(git merge-base HEAD '@{upstream}' 2>/dev/null || git rev-parse HEAD~1)
  mapfile -t files < <(git diff --name-only --diff-filter=d "$base" -- "${folders[@]}"
    git ls-files --others --exclude-standard -- "${folders[@]}")
fi

sources=() units=()
for file in "${files[@]}"; do
  [[ $file =~ \.(h|cc|cu|cuh)$ ]] && sources+=("$file")
  [[ $file == *.cc ]] && units+=("$file")
done
if ((${#sources[@]} == 0)); then
  echo "lint: no source files changed"
  exit 0
fi

rc=0
if [[ $fix ]]; then
  clang-format -i "${sources[@]}"
else
  clang-format --dry-run -Werror "${sources[@]}" || rc=1
fi

database=
for dir in build/cpu build/release; do
  [[ -f $dir/compile_commands.json ]] && database=$dir && break
done
if [[ -z $database ]]; then
  echo "lint: no build/cpu or build/release: run cmake --preset cpu first" >&2
  exit 2
fi
# Without the precompiled headers: clang cannot read GCC's.
commands=$(mktemp -d)
trap 'rm -rf "$commands"' EXIT
sed 's/ -Winvalid-pch -include [^ ]*//' "$database/compile_commands.json" >"$commands/compile_commands.json"
# Files that this configuration does not build (another MPI, another device) have no compile
# command.
built=()
for unit in "${units[@]}"; do
  grep -qF "\"$root/$unit\"" "$database/compile_commands.json" && built+=("$unit")
done
if ((${#built[@]})); then
  printf '%s\0' "${built[@]}" | xargs -0 -n 1 -P "$jobs" clang-tidy -p "$commands" --quiet \
    2> >(grep -v 'warnings generated' >&2) || rc=1
fi
echo "lint: ${#sources[@]} files formatted, ${#built[@]} units through clang-tidy: $([[ $rc == 0 ]] && echo ok || echo FAILED)"
exit $rc
