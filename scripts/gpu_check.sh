#!/usr/bin/env bash
# Checks that need a GPU: Hopper's instructions one by one, the tests labelled gpu,
# compute-sanitizer over some of them, `kernel_bench` and `moe bench layer` on the device, the same
# work by PyTorch and Triton, and one table of all results. Each half takes under nine minutes.
#
#   scripts/gpu_check.sh [--only tests|bench] [--out DIR] [--seconds N]   builds build/gpu first
#   scripts/gpu_check.sh --bundle DIR [--build DIR]    needs no GPU: makes DIR, and DIR.tar.gz to be
#                                                      carried to a machine that has one; there
#   DIR/gpu_check.sh [--only ...] [--out DIR] [...]    which needs the driver, ctest and python3
#
# --only: half of the steps, tests or measurements. --out (build/gpu_check; for a bundle
# ./gpu_check.out) holds logs and JSON; DIR.tar.gz has them in one file. Steps that have not run
# after --seconds (1050, with --only 525) are left out.
# --build: a build folder with CUDA and tests, instead of build/gpu. No setting of the GPU is
# changed.
# Exit codes: 0 all steps ran; 1 a step failed; 2 usage; 10 no GPU. Missed goals are not failures.
set -uo pipefail
exec </dev/null
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out='' bundle='' build='' only='' seconds=''

usage() {
  echo "usage: gpu_check.sh [--only tests|bench] [--out DIR] [--seconds N] | --bundle DIR [--build DIR]" >&2
  exit 2
}
while (($#)); do
  (($# >= 2)) || usage
  case "$1" in
    --out) out=$(realpath -m "$2") ;;
    --seconds) seconds=$2 ;;
    --only) only=$2 ;;
    --bundle) bundle=$(realpath -m "$2") ;;
    --build) build=$(realpath -m "$2") ;;
    *) usage ;;
  esac
  shift 2
done
[[ $only =~ ^(tests|bench)?$ ]] || usage
seconds=${seconds:-$((${#only} > 0 ? 525 : 1050))}
[[ $seconds =~ ^[0-9]{1,6}$ ]] || usage

is_bundle=
if [[ -x $here/bin/moe ]]; then
  [[ -z $bundle$build ]] || usage
  is_bundle=1
  out=${out:-$PWD/gpu_check.out}
  moe=$here/bin/moe kernel_bench=$here/bin/kernel_bench tests=$here bin=$here/bin peers=$here/peers
else
  source "$here/common.sh"
  out=${out:-$root/build/gpu_check}
  dir=${build:-$root/build/gpu}
  moe=$dir/moe/cli/moe kernel_bench=$dir/benchmarks/kernel_bench tests=$dir bin=$dir/tests
  peers=$root/benchmarks/peers/gpu
fi

nccl_contract=comm_contract_nccl_processes_test # if NCCL is available

build_all() {
  cmake --preset cuda -B "$dir" -DMOE_BUILD_TESTS=ON -DMOE_ENABLE_MPI=OFF -DMOE_ENABLE_BENCHMARK=ON &&
    cmake --build "$dir" -j "$jobs" --target moe kernel_bench device_tests
}

# Libraries that every machine with the driver has, or whose versions match it.
system_library='^(linux-vdso|ld-linux.*|lib(c|m|pthread|dl|rt|stdc\+\+|gcc_s|cuda))\.'
# Libraries that come with PyTorch: too large for a bundle.
python_library='^lib(cublas|cublasLt|nccl|nvrtc|nvJitLink)\.'
limit_mib=54 # packed; with the source tree beside it below 64, a common limit of uploads

# Prints name and path of every library that the programs need, "-" if it is not found.
libraries_of() {
  ldd "$@" | sed -n 's/^\t\([^ /]*\) => \(.*\) (0x.*/\1 \2/p; s/^\t\([^ ]*\) => not found/\1 -/p' |
    sort -u | while read -r name path; do
    [[ $name =~ $system_library || $name =~ $python_library ]] || echo "$name $path"
  done
}

carry_libraries() {
  local name path
  while read -r name path; do
    [[ $path != - ]] || { echo "gpu_check: $name was not found" >&2; return 1; }
    strip --strip-unneeded -o "$bundle/lib/$name" "$path" || return 1
  done < <(libraries_of "$bundle"/bin/*)
  # With the folder first in the path nothing else may come from this machine.
  LD_LIBRARY_PATH=$bundle/lib libraries_of "$bundle"/bin/* | while read -r name path; do
    [[ $path == "$bundle"/lib/* ]] || { echo "gpu_check: $name is not carried" >&2; return 1; }
  done
}

# Writes the bundle's CTestTestfile.cmake, and the programs of the tests labelled gpu to stdout.
bundle_tests() {
  ctest --test-dir "$dir" -L '^gpu$' --show-only=json-v1 | python3 -c '
import json, os, sys

with open(sys.argv[1], "w") as file:
    for test in json.load(sys.stdin)["tests"]:
        name = test["name"]
        if "command" not in test:
            sys.exit(f"gpu_check: {name} is not built: build the targets moe, kernel_bench and device_tests")
        program, = test["command"]
        timeout = next(p["value"] for p in test["properties"] if p["name"] == "TIMEOUT")
        file.write(f"""add_test({name} "${{CMAKE_CURRENT_LIST_DIR}}/bin/{os.path.basename(program)}")
set_tests_properties({name} PROPERTIES LABELS gpu TIMEOUT {timeout:.0f}
  SKIP_REGULAR_EXPRESSION "no GPU: "
  ENVIRONMENT "MOE_TEST_GPU=1;LD_LIBRARY_PATH=$ENV{{GPU_CHECK_LIBRARIES}}")
""")
        print(program)
' "$bundle/CTestTestfile.cmake"
}

# Fills the folder $bundle with the files that this script needs elsewhere.
make_bundle() {
  local program programs list mib
  if [[ -e $bundle && ! -e $bundle/CTestTestfile.cmake && -n $(ls -A "$bundle") ]]; then
    echo "gpu_check: $bundle is not empty and not a bundle" >&2
    return 1
  fi
  rm -rf "$bundle"
  mkdir -p "$bundle"/{bin,lib,peers} || return 1
  list=$(bundle_tests) || return 1
  [[ $list ]] || { echo "gpu_check: no tests labelled gpu in $dir" >&2; return 1; }
  mapfile -t programs <<<"$list"
  [[ -x $dir/tests/$nccl_contract ]] && programs+=("$dir/tests/$nccl_contract")
  for program in "$moe" "$kernel_bench" "${programs[@]}"; do
    strip -o "$bundle/bin/$(basename "$program")" "$program" || return 1
  done
  carry_libraries || return 1
  cp "$peers"/*.py "$bundle/peers/" && cp "$root"/scripts/{gpu_check.sh,gpu_table.py,nccl_one_gpu.sh} "$bundle/" || return 1
  git describe --always --dirty >"$bundle/version"
  tar -czf "$bundle.tar.gz" -C "$(dirname "$bundle")" "$(basename "$bundle")" || return 1
  mib=$(($(stat -c %s "$bundle.tar.gz") / 1024 / 1024 + 1))
  echo "gpu_check: $bundle.tar.gz: $((${#programs[@]} + 2)) programs with their libraries, $mib MiB"
  ((mib < limit_mib)) || { echo "gpu_check: that is $limit_mib MiB or more" >&2; return 1; }
}

if [[ $bundle ]]; then
  [[ $build ]] || build_all || exit 1
  make_bundle
  exit
fi

mkdir -p "$out" || exit 2
if [[ ! -e $out/steps.tsv && -n $(ls -A "$out") ]]; then
  echo "gpu_check: $out is not empty and not of an earlier run" >&2
  exit 2
fi
rm -f "$out"/*.{json,jsonl,log,tsv} "$out"/{text,table.txt}
# Where our programs alone look for libraries: those of a bundle, and those of PyTorch.
GPU_CHECK_LIBRARIES=${is_bundle:+$here/lib:}$(python3 -c '
import glob, importlib.util
spec = importlib.util.find_spec("nvidia")
for folder in spec.submodule_search_locations if spec else []:
    for path in sorted(glob.glob(folder + "/*/lib")):
        print(path, end=":")' 2>/dev/null)${LD_LIBRARY_PATH-}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)

ours() { LD_LIBRARY_PATH=$GPU_CHECK_LIBRARIES "$@"; }

# A bundle sets the library path for its tests only: ctest may need other libraries of the same
# names.
run_tests() {
  local with=('ours')
  [[ -z $is_bundle ]] || with=()
  "${with[@]}" ctest --test-dir "$tests" -L '^gpu$' --no-tests=error --output-on-failure -j 4
}

# Every Hopper instruction of our kernels, alone: failures that follow may result from failures
# here. Then products beside a kernel that occupies 16 multiprocessors: bits, and times in the log.
probe() { MOE_TEST_GPU=1 ours "$bin/hopper_probe_test"; }

# Runs cases of operations_test that use a device. Some machines refuse the tool: no failure of ours.
sanitize() { # tool, filter of cases, options
  local log rc
  log=$(mktemp)
  MOE_TEST_GPU=1 ours "$sanitizer" --tool "$1" --error-exitcode 1 "${@:3}" "$bin/operations_test" \
    --gtest_brief=1 --gtest_filter="$2" 2>&1 | tee "$log"
  rc=${PIPESTATUS[0]}
  if grep -q 'Device not supported' "$log"; then
    echo "$1 refuses this device: left out"
    rc=0
  fi
  rm -f "$log"
  return "$rc"
}

# Trains in several layouts, on these scripts as text: the weights end with the same bits.
train_layouts() { # leaves, layouts
  local layout hash first=''
  cat "$here"/gpu_* "$here/nccl_one_gpu.sh" >"$out/text" || return 1
  for layout in "${@:2}"; do
    hash=$(ours "$moe" train --device cuda --share-device --data "$out/text" --dtype bf16 --steps 20 \
      --tensor-leaves "$1" --eval-sequences 1 $layout | sed -n 's/^weights_xxh3 *//p') || return 1
    echo "$layout: weights_xxh3 $hash"
    [[ $hash && $hash == "${first:=$hash}" ]] || return 1
  done
}

kernels() { # name of the result, operation, flags
  ours "$kernel_bench" "$2" --device cuda --threads "$(nproc)" --benchmark_repetitions=30 --benchmark_min_time=0 \
    --benchmark_out="$out/$1.json" "${@:3}"
}

peer() { python3 "$peers/$1.py" >"$out/$1.jsonl"; }

sm_clock() { timeout 5 nvidia-smi --format=csv,noheader,nounits --query-gpu=clocks.sm 2>/dev/null | head -n 1; }

# step <name> <seconds> <command...>: output in $out/<name>.log and a line in steps.tsv: name, exit
# code, seconds, the SM clock in MHz just after it, the last line of the output.
export -f build_all ours probe run_tests sanitize train_layouts kernels peer
export here moe is_bundle dir jobs GPU_CHECK_LIBRARIES sanitizer tests bin kernel_bench out peers
step() {
  local name=$1 budget=$2 left=$((seconds - SECONDS)) start=$SECONDS rc=124 last="no time was left"
  ((left < budget)) && budget=$left
  if ((budget >= 3)); then
    echo "gpu_check: $name"
    timeout -k 5 "$budget" bash -uo pipefail -c '"$@"' - "${@:3}" >"$out/$name.log" 2>&1
    rc=$?
    last=$(grep -vE '^ *$|^Errors while running CTest' "$out/$name.log" | tail -n 1 | tr '\t' ' ' | cut -c 1-160)
    ((rc != 124 && rc != 137)) || last="stopped after $budget s: $last"
  fi
  printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$rc" $((SECONDS - start)) "$(sm_clock)" "$last" >>"$out/steps.tsv"
  return "$rc"
}

# Stops here without a GPU. A GPU that the driver shows but our programs do not see is a failure.
need_gpu() {
  local all skipped why
  all=$(grep -cE '^ *[0-9]+/[0-9]+ Test' "$out/tests.log")
  skipped=$(grep -c '\*\*\*Skipped' "$out/tests.log")
  ((all > 0 && all == skipped)) || return 0
  why=$(sed -n 's/^.*no GPU: //p' "$tests/Testing/Temporary/LastTest.log" 2>/dev/null | head -n 1)
  if grep -q '^device.0' "$out/steps.tsv"; then
    printf 'our programs see a GPU\t1\t0\t\t%s\n' "$why" >>"$out/steps.tsv"
    return 0
  fi
  echo "gpu_check: no GPU was found, $skipped tests were skipped: $why"
  exit 10
}

# Cases of a few seconds under memcheck, and those that the tool can judge: racecheck reports hazards
# in tiles that bulk copies write and wgmma reads, where a barrier of bytes orders them.
device_cases='*Device*:*ByHand*:*Layout*:*Alignment*'
no_tiles='-*Gemm*:*WeightGradient*:*Product*:*Attention*'
# The exchanges that a layer uses, on ranks that share the GPU and take turns; deadlines of tests of
# failures are shorter than a connection takes there.
exchanges='*AllToAllDelivers*R3Inline:*AllToAllVDelivers*R3Inline:*LargeAllToAllV*R3Inline'
exchanges+=':*AllReduceSumsEveryType*R3Inline:*SameBitsOnEveryRank*R3Inline:*ReduceScatterVSums*R3Inline'
exchanges+=':*AllGatherV*R3Inline:*BroadcastReaches*R3Inline:*GroupedSendRecv*R3Inline:*SplitOrders*R3Inline'

gate=(--tokens 65536 --num-experts 256 --topk 8)
rows=(--num-experts 128 --topk 8 --tokens 32768 --hidden-size 4096 -d bf16)
layer=("$moe" bench layer --device cuda --threads "$(nproc)" -q -n 5 -w 3 "${rows[@]}"
  --moe-ffn-hidden-size 1024 --ranks 1)

run_all_tests() {
  step hopper_probe 20 probe
  step tests 100 run_tests
  need_gpu
  if [[ $sanitizer ]]; then
    step memcheck 120 sanitize memcheck "$device_cases"
    step racecheck 60 sanitize racecheck "$device_cases$no_tiles" --racecheck-detect-level error
  else
    echo "gpu_check: no compute-sanitizer here: left out"
  fi
  step verify 40 ours "$moe" verify --device cuda -q --layouts 'ranks=1,2,3'
  step verify_bf16 40 ours "$moe" verify --device cuda -q --dtype bf16 --router mixtral --num-experts 8 \
    --hidden-size 128 --moe-ffn-hidden-size 64 --micro-batch-tokens 32 --layouts 'ranks=1,2,4'
  step train_layouts 60 train_layouts 1 '--ranks 1' '--ranks 2 --ep 2' '--ranks 4 --ep 2 --zero 2' \
    '--ranks 4 --ep 4 --dispatch staged'
  step train_tensor_layouts 60 train_layouts 4 '--ranks 1' '--ranks 2 --ep 2 --tp 2' '--ranks 4 --ep 2 --etp 2 --tp 2'
  if [[ -x $bin/$nccl_contract ]]; then # several ranks of NCCL on the one GPU: for correctness
    step nccl_contract 60 ours "$here/nccl_one_gpu.sh" -n 3 "$bin/$nccl_contract" --gtest_brief=1 \
      --gtest_filter="$exchanges"
    step nccl_verify 60 ours "$here/nccl_one_gpu.sh" -n 3 "$moe" verify --device cuda --backend nccl -q \
      --router mixtral --numerics layout-invariant --micro-batches 3 --layouts 'ranks=3 capacity=none'
  fi
}

measure_all() {
  step gate 30 kernels gate gate "${gate[@]}" -d bf16
  step gate_f32 30 kernels gate_f32 gate "${gate[@]}"
  step permute 40 kernels permute permute "${rows[@]}"
  step combine 40 kernels combine combine "${rows[@]}"
  step gemm 60 kernels gemm gemm "${rows[@]}" --moe-ffn-hidden-size 1024
  step layer 50 ours "${layer[@]}" -J "$out/layer.json"
  step layer_float32_sums 50 ours "${layer[@]}" --numerics fast -J "$out/layer_float32_sums.json"
  step device_copy 20 peer device_copy
  step torch_gate 20 peer torch_gate
  step torch_grouped_mm 40 peer torch_grouped_mm
  step triton_moe 60 peer triton_moe
  step torch_moe_layer 60 peer torch_moe_layer
}

[[ $is_bundle || $build ]] || step build 300 build_all
step device 20 nvidia-smi --format=csv,noheader \
  --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu
if [[ $only != bench ]]; then
  run_all_tests
elif ! grep -q '^device.0' "$out/steps.tsv"; then
  echo "gpu_check: no GPU was found: $(tail -n 1 "$out/device.log")"
  exit 10
fi
[[ $only == tests ]] || measure_all

echo
python3 "$here/gpu_table.py" "$out" | tee "$out/table.txt"
code=${PIPESTATUS[0]}
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
exit "$code"
