#!/usr/bin/env bash
# CPU performance beside peers and limits, interleaved, as Markdown tables.
#
#   scripts/bench_cpu.sh [BUILD] [--part NAME]... [flags of the part...]
#
# BUILD: a build folder with `moe`, `kernel_bench` (Google Benchmark) and `fma_peak`. Parts, one program each in
# benchmarks/; without --part all of them, without flags:
#   exchange  exchange_table.py  beside Open MPI
#   gemm      gemm_table.py      beside oneDNN and OpenBLAS
#   gate      gate_table.py      beside PyTorch
#   layer     layer_table.py     beside PyTorch and kt-kernel
#   cores     cores_table.py     a layer on two cores, and on more ranks than cores
#   numerics  numerics_table.py  training steps, layout-invariant beside fast
#   rounding  rounding_table.py  a layer's rounding errors beside PyTorch's
# gemm, gate and layer take --avx2: restricts us and the peers to AVX2 on any CPU. A peer that is
# not installed (scripts/install_deps.sh --bench) is reported, and has no column. PyTorch is looked
# for in /usr/bin/python3 and in $MOE_BENCH_PYTHON, interpreters separated by colons (for rounding
# the first that has safetensors, too), kt-kernel in the same ones.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

dir=build/release parts=()
if (($# > 0)) && [[ $1 != -* ]]; then
  dir=$1
  shift
fi
while (($# > 1)) && [[ $1 == --part ]]; do
  parts+=("$2")
  shift 2
done
if ((${#parts[@]} == 0)); then
  if (($# > 0)); then
    echo "bench_cpu: flags are expected after the part that reads them: --part NAME $*" >&2
    exit 2
  fi
  parts=(exchange gemm gate layer cores numerics rounding)
fi
need() {
  [[ -x $dir/$1 ]] && return
  echo "bench_cpu: $dir/$1 is missing: cmake --preset release && cmake --build --preset release" >&2
  exit 2
}
need moe/cli/moe
moe=$dir/moe/cli/moe peers=$dir/peers
mkdir -p "$peers"

# Flags for every Python that may have torch.
pythons() {
  local python
  tr ':' '\n' <<<"/usr/bin/python3:${MOE_BENCH_PYTHON-}" | while read -r python; do
    [[ -z $python ]] || printf -- '--python\n%s\n' "$python"
  done
}

exchange() {
  if ! mpirun --version 2>/dev/null | grep -q "Open MPI"; then
    echo "No Open MPI (scripts/install_deps.sh): not measured."
    return
  fi
  # MPI's C++ bindings are not used and do not pass -Wall.
  mpicxx -std=c++20 -O2 -DOMPI_SKIP_MPICXX -o "$peers/exchange" benchmarks/peers/mpi/exchange.cc
  python3 benchmarks/exchange_table.py --moe "$moe" --peer "$peers/exchange" "$@"
}

gemm() {
  need benchmarks/kernel_bench
  need benchmarks/fma_peak
  local found=() peer name library
  for peer in oneDNN:onednn:dnnl OpenBLAS:openblas:openblas; do
    IFS=: read -r name peer library <<<"$peer"
    if g++ -std=c++20 -O2 -I. -o "$peers/gemm_$peer" "benchmarks/peers/cpu/gemm_$peer.cc" \
      "-l$library" 2>"$peers/gemm_$peer.log"; then
      found+=(--peer "$name=$peers/gemm_$peer")
    else
      printf 'No %s (%s says why): its column is missing.\n\n' "$name" "$peers/gemm_$peer.log"
    fi
  done
  python3 benchmarks/gemm_table.py --kernel-bench "$dir/benchmarks/kernel_bench" \
    --fma-peak "$dir/benchmarks/fma_peak" "${found[@]}" "$@"
}

beside_torch() {  # gate, layer
  need benchmarks/fma_peak
  need benchmarks/kernel_bench
  local part=$1 flags
  shift
  mapfile -t flags < <(pythons)
  python3 "benchmarks/${part}_table.py" --moe "$moe" --fma-peak "$dir/benchmarks/fma_peak" \
    --kernel-bench "$dir/benchmarks/kernel_bench" "${flags[@]}" "$@"
}

rounding() {
  local python
  while read -r python; do
    if "$python" -c "import safetensors, torch" 2>/dev/null; then
      "$python" benchmarks/rounding_table.py --moe "$moe" "$@"
      return
    fi
  done < <(pythons | grep -vx -- --python)
  echo "No Python with PyTorch and safetensors: not measured."
}

alone() {  # cores, numerics
  local part=$1
  shift
  python3 "benchmarks/${part}_table.py" --moe "$moe" "$@"
}

for part in "${parts[@]}"; do
  case $part in
    exchange) title="Exchange between threads" run=(exchange) ;;
    gemm) title="Grouped GEMM against libraries" run=(gemm) ;;
    gate) title="Gate" run=(beside_torch gate) ;;
    layer) title="Layer" run=(beside_torch layer) ;;
    cores) title="Cores" run=(alone cores) ;;
    numerics) title="Layout-invariant against fast" run=(alone numerics) ;;
    rounding) title="Rounding" run=(rounding) ;;
    *)
      echo "bench_cpu: --part '$part', expected exchange, gemm, gate, layer, cores, numerics or rounding" >&2
      exit 2
      ;;
  esac
  echo "## $title, commit $(git rev-parse --short HEAD)"
  "${run[@]}" "$@"
done
