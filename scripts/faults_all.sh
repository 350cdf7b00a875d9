#!/usr/bin/env bash
# Injects every kind of fault at every phase of moe train, on threads, on processes, on two hosts
# (namespaces of this machine, where they are allowed) and on simulated devices over NCCL:
#
#   scripts/faults_all.sh [--jobs N] [BUILD...]
#
# BUILD: folders of builds, by default build/release, build/mpich and build/cusim if there. Threads
# are tried with the first one, processes with each that has MPI, hosts with each that has Open MPI,
# devices with each that simulates them. Prints failed cases and a table for each build
# (docs/reliability.md), whose rows are cases, those that passed, and the seconds from the fault to
# the end of the run. Exit code 1 if a case fails.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

jobs=2
if [[ ${1-} == --jobs ]]; then
  jobs=${2:?}
  shift 2
fi
builds=("$@")
if ((!${#builds[@]})); then
  for build in release mpich cusim; do [[ -d build/$build ]] && builds+=("build/$build"); done
fi
bad=0
first=true
for build in "${builds[@]}"; do
  cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
  launchers=()
  $first && launchers+=(threads)
  first=false
  mpiexec=$(cached MOE_MPIEXEC)
  if [[ $(cached MOE_ENABLE_MPI) != OFF && -n $mpiexec && $mpiexec != *NOTFOUND ]]; then
    launchers+=(mpi)
    [[ $(cached MOE_MPI) != openmpi ]] || launchers+=(hosts)
  fi
  [[ $(cached MOE_ENABLE_CUDA) != SIMULATED ]] || launchers+=(nccl)
  ((${#launchers[@]})) || continue
  echo "$build: ${launchers[*]}"
  python3 tests/moe/cli/fault_matrix.py "$build/moe/cli/moe" --all --table --jobs "$jobs" \
    --launchers "$(IFS=,; echo "${launchers[*]}")" --mpiexec "$mpiexec" || bad=1
done
exit $bad
