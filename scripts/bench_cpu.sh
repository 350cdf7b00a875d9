#!/usr/bin/env bash
# Figures of the CPU path beside peers and limits, interleaved, as Markdown tables. Needs Open MPI.
#
#   scripts/bench_cpu.sh [BUILD] [flags of the parts...]     BUILD: a build folder with `moe`
#
# Parts, one program each in benchmarks/: exchange (exchange_table.py).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

dir=build/release
if (($# > 0)) && [[ $1 != -* ]]; then
  dir=$1
  shift
fi
if [[ ! -x $dir/moe/cli/moe ]]; then
  echo "bench_cpu: $dir/moe/cli/moe is missing: cmake --preset release && cmake --build --preset release" >&2
  exit 2
fi
if ! mpirun --version 2>/dev/null | grep -q "Open MPI"; then
  echo "bench_cpu: no Open MPI: scripts/install_deps.sh" >&2
  exit 10
fi
peers=$dir/peers

exchange() {
  mkdir -p "$peers"
  # The C++ bindings of MPI are not used and do not pass -Wall.
  mpicxx -std=c++20 -O2 -DOMPI_SKIP_MPICXX -o "$peers/exchange" benchmarks/peers/mpi/exchange.cc
  echo "## Exchange between threads, commit $(git rev-parse --short HEAD)"
  python3 benchmarks/exchange_table.py --moe "$dir/moe/cli/moe" --peer "$peers/exchange" "$@"
}

exchange "$@"
