#!/usr/bin/env bash
# Fuzzes every reader of untrusted bytes, one after another, and prints what was found and reached:
#
#   scripts/fuzz_long.sh [HOURS [TARGET...]]         (default: 1 hour for all targets)
#
# Needs clang with libFuzzer, and llvm-symbolizer for the table of edges. Inputs that reach
# something new stay in build/fuzz/TARGET, from which the next call goes on. Exit code 1: an input
# was found that a reader does not stand (its path is printed), or a target executed nothing (the end
# of its log is printed).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/fuzz
hours=${1:-1}
shift || true
targets=("$@")
((${#targets[@]})) || mapfile -t targets < <(ls "$root/tests/fuzz/corpus")
each=$(awk -v hours="$hours" -v n="${#targets[@]}" 'BEGIN { print int(hours * 3600 / n) + 1 }')
mkdir -p "$build"
"$root/tests/fuzz/run.sh" build "$build"

found=0 idle=0
touch "$build/begin"
# findings <target>: files of this call.
findings() {
  find "$build/$1" \( -name 'crash-*' -o -name 'oom-*' -o -name 'timeout-*' \) -newer "$build/begin" -printf '  %p\n'
}
printf '%-14s %12s %9s %9s %8s %8s\n' target executions per_second features edges crashes
for target in "${targets[@]}"; do
  log=$build/$target.log
  # Several findings of one target: it goes on after each.
  "$root/tests/fuzz/run.sh" "$target" "$build" "$each" -fork=1 -ignore_crashes=1 -ignore_ooms=1 \
    -ignore_timeouts=1 >"$log" 2>&1 || true
  crashes=$(findings "$target" | wc -l)
  found=$((found + crashes))
  # "#123: cov: 45 ft: 67 corp: 8 exec/s 90 ..."
  awk -v target="$target" -v crashes="$crashes" '
    /^#[0-9]+: cov: / { executions = $1 + 0 ? $1 : substr($1, 2) + 0; cov = $3; ft = $5
      for (i = 1; i < NF; ++i) if ($i == "exec/s") rate = $(i + 1) }
    END { printf "%-14s %12d %9d %9d %8d %8d\n", target, executions, rate, ft, cov, crashes
      exit executions == 0 }' "$log" || { idle=1; tail -n 5 "$log"; }
  findings "$target"
done

# Edges of the sources that the targets reach, over the inputs of all of them.
for target in "${targets[@]}"; do
  "$root/tests/fuzz/run.sh" "$target" "$build" 1 -runs=0 -print_coverage=1 2>&1 |
    grep -E '^ *(UN)?COVERED_FUNC' || true
done | awk -v root="$root/" '
  { file = $NF; sub(/:[0-9]+$/, "", file); sub(root, "", file); sub(/^\.\//, "", file)
    if (file !~ /\.cc$/ || file ~ /^(\/|tests)/) next
    name = $0; sub(/^.*edges: /, "", name); split(name, edges, /[\/ ]/); sub(/^[0-9\/]+ /, "", name)
    key = file SUBSEP name
    total[key] = edges[2]
    if (edges[1] + 0 > reached[key]) reached[key] = edges[1] + 0 }
  END { for (key in total) { split(key, part, SUBSEP); all[part[1]] += total[key]; got[part[1]] += reached[key] }
    for (file in all) if (got[file] > 0) printf "%5.1f %% of %4d edges  %s\n", 100 * got[file] / all[file], all[file], file
  }' | sort -k6
exit $((found > 0 || idle))
