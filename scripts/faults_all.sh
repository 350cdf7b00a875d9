#!/usr/bin/env bash
# Injects every kind of fault at every phase of moe train, on threads and on processes:
#
#   scripts/faults_all.sh [--jobs N] [BUILD...]
#
# BUILD: folders of builds, by default build/release and build/mpich if there. Threads are tried
# with the first one, processes with each that has MPI. Prints failed cases and a table for each
# build (docs/reliability.md), whose rows are cases, those that passed, and the seconds from the
# fault to the end of the run. Exit code 1 if a case fails.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

jobs=2
if [[ ${1-} == --jobs ]]; then
  jobs=${2:?}
  shift 2
fi
builds=("$@")
((${#builds[@]})) || builds=(build/release $([[ -d build/mpich ]] && echo build/mpich))
matrix=(python3 tests/moe/cli/fault_matrix.py)
bad=0
threads=threads,
for build in "${builds[@]}"; do
  cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
  mpiexec=$(cached MOE_MPIEXEC)
  launchers=${threads}mpi
  if [[ $(cached MOE_ENABLE_MPI) == OFF || -z $mpiexec || $mpiexec == *NOTFOUND ]]; then
    launchers=${threads%,} mpiexec=
  fi
  threads=
  [[ $launchers ]] || continue
  echo "$build: $launchers ${mpiexec:-}"
  "${matrix[@]}" "$build/moe/cli/moe" --all --table --jobs "$jobs" --launchers "$launchers" \
    ${mpiexec:+--mpiexec "$mpiexec"} || bad=1
done
exit $bad
