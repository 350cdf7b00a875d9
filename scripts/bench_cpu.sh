#!/usr/bin/env bash
# Figures of the CPU path beside peers and limits, interleaved, as Markdown tables. Needs Open MPI.
#
#   scripts/bench_cpu.sh [BUILD] [flags of the parts...]     BUILD: a build folder with `moe`
#
# Parts, one program each in benchmarks/: exchange (exchange_table.py).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

dir=${1:-build/release}
shift $(($# > 0 ? 1 : 0))
peers=$dir/peers

exchange() {
  mkdir -p "$peers"
  # The C++ bindings of MPI are not used and do not pass -Wall.
  mpicxx -std=c++20 -O2 -DOMPI_SKIP_MPICXX -o "$peers/exchange" benchmarks/peers/mpi/exchange.cc
  echo "## Exchange between threads, commit $(git rev-parse --short HEAD)"
  python3 benchmarks/exchange_table.py --moe "$dir/moe/cli/moe" --peer "$peers/exchange" "$@"
}

exchange "$@"
