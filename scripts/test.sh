#!/usr/bin/env bash
# Builds and runs every test in five presets, and reports what passed:
#
#   scripts/test.sh [stage...]      stages: release hosts fuzz mpich cusim asan tsan (default: all)
#
# hosts runs the tests of release on several hosts, which are namespaces of this one: as root, where
# the kernel allows them; elsewhere it is skipped by name. fuzz runs the fuzzers of release.
# Installs missing packages first (scripts/install_deps.sh). Logs and JUnit files stay in
# build/<stage>/. At the end: seconds of each stage beside its budget, the ten slowest sources and
# tests, and "N passed, N failed": test programs and checks that ctest ran in all stages; a stage
# that does not build counts as one failure. Exceeding a budget is a warning. Exit code 1 if
# anything failed.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec </dev/null

stages=("$@")
((${#stages[@]})) || stages=(release hosts fuzz mpich cusim asan tsan)
for stage in "${stages[@]}"; do
  case "$stage" in
    release | hosts | fuzz | mpich | cusim | asan | tsan) ;;
    *)
      echo "test: unknown stage '$stage', expected release, hosts, fuzz, mpich, cusim, asan or tsan" >&2
      exit 2
      ;;
  esac
done

scripts/install_deps.sh || exit $?

# ThreadSanitizer of GCC 12 cannot map its shadow when the kernel randomises addresses over more
# than 28 bits; without randomisation it can.
unrandomised() {
  local bits
  bits=$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28)
  if ((bits > 28)) && setarch -R true 2>/dev/null; then
    setarch -R "$@"
  else
    "$@"
  fi
}

passed=0 failed=0 rows=() warnings=()
slow_sources=$(mktemp) slow_tests=$(mktemp)
trap 'rm -f "$slow_sources" "$slow_tests"' EXIT

# Seconds on two cores without other load and with an empty compiler cache: build, tests. A change
# that exceeds one must make something cheaper, or justify the new figure in its commit.
declare -A build_budget=([release]=750 [hosts]=10 [fuzz]=10 [mpich]=150 [cusim]=400 [asan]=700 [tsan]=500)
declare -A test_budget=([release]=400 [hosts]=60 [fuzz]=150 [mpich]=120 [cusim]=240 [asan]=360 [tsan]=180)

within() { # stage, "build" or "tests", seconds, budget
  (($3 <= $4)) || warnings+=("test: $1: $2 took $3 s, the budget is $4 s")
}

# Seconds and names of what ninja built since line $3 of its log, and of what ctest ran, for the
# end.
note_slow() { # stage, preset, first line
  awk -v stage="$1" -v first="$3" 'NR > first && $4 ~ /\.o$|\.gch$/ {
      sub(/CMakeFiles\/[^\/]*\.dir\//, "", $4); print ($2 - $1) / 1000, stage, $4 }' \
    "build/$2/.ninja_log" >>"$slow_sources"
  sed -n 's/.*<testcase name="\([^"]*\)".* time="\([0-9.]*\)".*/\2 '"$1"' \1/p' "build/$1/junit.xml" >>"$slow_tests"
}

# An attribute of the <testsuite> element of a JUnit file.
count_of() { sed -n "/<testsuite/,/>/s/.*[[:space:]]$1=\"\([0-9]*\)\".*/\1/p" "$2" | head -n 1; }

fail_stage() { # stage, what, log file, build seconds
  echo "test: $1: $2 failed; the end of $3:"
  tail -n 60 "$3"
  failed=$((failed + 1))
  rows+=("$(printf '%-8s %7ss %6s %8s %6s %7s %7s %7s' "$1" "$4" - - - - 1 -)")
}

# run_stage <stage> <preset> [<build target>...] [-- <cmake arguments>...]
run_stage() {
  local stage=$1 preset=$2 targets=() labels=() dir=build/$1 start build_seconds built_before
  case "$stage" in
    hosts | fuzz) labels=(-L "$stage") ;;
    release) labels=(-LE "hosts|fuzz") ;;
  esac
  shift 2
  while (($#)) && [[ $1 != -- ]]; do
    targets+=(--target "$1")
    shift
  done
  (($#)) && shift
  mkdir -p "$dir"
  rm -f "$dir/junit.xml"
  start=$SECONDS
  echo "=== $stage: configure and build"
  if ! cmake --preset "$preset" -DMOE_BUILD_TESTS=ON -DMOE_WARNINGS_AS_ERRORS=ON -DMOE_MERGE_SOURCES=ON -DMOE_MERGE_TESTS=ON "$@" >"$dir/configure.log" 2>&1; then
    fail_stage "$stage" configure "$dir/configure.log" $((SECONDS - start))
    return
  fi
  built_before=$(cat "build/$preset/.ninja_log" 2>/dev/null | wc -l)
  if ! cmake --build --preset "$preset" -j "$jobs" "${targets[@]}" >"$dir/build.log" 2>&1; then
    fail_stage "$stage" build "$dir/build.log" $((SECONDS - start))
    return
  fi
  build_seconds=$((SECONDS - start))

  start=$SECONDS
  echo "=== $stage: test"
  unrandomised ctest --preset "$preset" "${labels[@]}" -j "$jobs" --output-junit "$PWD/$dir/junit.xml" \
    >"$dir/test.log" 2>&1
  local rc=$? tests bad skipped good
  tests=$(count_of tests "$dir/junit.xml") bad=$(count_of failures "$dir/junit.xml")
  skipped=$(count_of skipped "$dir/junit.xml")
  if [[ -z $tests || -z $bad || -z $skipped || $tests == 0 ]]; then
    fail_stage "$stage" "ctest, without a result," "$dir/test.log" "$build_seconds"
    return
  fi
  good=$((tests - bad - skipped))
  if ((rc != 0 && bad == 0)); then
    bad=1 # ctest reports failure though no test does
  fi
  if ((bad)); then
    echo "test: $stage: $bad failed; from $dir/test.log:"
    grep -vE '^ +Start +[0-9]+: | +Passed +[0-9.]+ sec$' "$dir/test.log" | tail -n 300
  fi
  passed=$((passed + good)) failed=$((failed + bad))
  local test_seconds=$((SECONDS - start))
  rows+=("$(printf '%-8s %7ss %6s %7ss %6s %7s %7s %7s' "$stage" "$build_seconds" \
    "${build_budget[$stage]}" "$test_seconds" "${test_budget[$stage]}" "$good" "$bad" "$skipped")")
  within "$stage" build "$build_seconds" "${build_budget[$stage]}"
  within "$stage" tests "$test_seconds" "${test_budget[$stage]}"
  note_slow "$stage" "$preset" "$built_before"
}

has_cuda_headers() {
  local folder
  for folder in "${CUDA_HOME:-/usr/local/cuda}" /usr/local/cuda /usr; do
    [[ -e $folder/include/cuda_runtime_api.h ]] && return
  done
  return 1
}

# Without a GPU no test runs a kernel: each is compiled once, for the newest architecture, which has
# the most of its own code. A build without this setting compiles them for all.
cubins=()
[[ -e /dev/nvidiactl ]] || cubins=("-DCMAKE_CUDA_ARCHITECTURES=90a-real")

skip_stage() { # stage, why
  echo "=== $1: SKIPPED: $2"
  rows+=("$(printf '%-8s %8s %6s %8s %6s %7s %7s %7s' "$1" - - - - - - all)")
}

simulated=() # devices in asan and tsan
has_cuda_headers || simulated=(-DMOE_ENABLE_CUDA=OFF)

for stage in "${stages[@]}"; do
  case "$stage" in
    release) run_stage release release -- -DMOE_ENABLE_MPI=ON -DMOE_ENABLE_CUDA=AUTO "${cubins[@]}" ;;
    hosts)
      if unshare --pid --uts --mount --mount-proc --fork true 2>/dev/null; then
        run_stage hosts release moe -- -DMOE_ENABLE_MPI=ON -DMOE_ENABLE_CUDA=AUTO "${cubins[@]}"
      else
        skip_stage hosts "namespaces are not allowed here"
      fi
      ;;
    fuzz) run_stage fuzz release moe -- -DMOE_ENABLE_MPI=ON -DMOE_ENABLE_CUDA=AUTO "${cubins[@]}" ;;
    mpich) run_stage mpich mpich mpi_tests ;;
    cusim)
      if has_cuda_headers; then
        run_stage cusim cusim device_tests cusim_tests
      else
        skip_stage cusim "no CUDA headers in ${CUDA_HOME:-/usr/local/cuda} or /usr"
      fi
      ;;
    asan) run_stage asan asan -- -DMOE_ENABLE_MPI=OFF "${simulated[@]}" ;;
    tsan) run_stage tsan tsan threads_tests -- -DMOE_ENABLE_MPI=OFF "${simulated[@]}" ;;
  esac
done

echo
echo "slowest sources (s, stage)"
sort -rn "$slow_sources" | head -n 10
echo
echo "slowest tests (s, stage)"
sort -rn "$slow_tests" | head -n 10
echo
printf '%-8s %8s %6s %8s %6s %7s %7s %7s\n' stage build budget tests budget passed failed skipped
printf '%s\n' "${rows[@]}"
((${#warnings[@]} == 0)) || printf '%s\n' "${warnings[@]}"
echo "total time ${SECONDS}s on $jobs cores"
echo "$passed passed, $failed failed"
((failed == 0))
