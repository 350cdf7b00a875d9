#!/usr/bin/env bash
# Variables of launchers, as pods, shells of other programs and schedulers set them.
#   bash launchers.sh <moe> <openmpi|mpich> [<mpiexec>]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
mpiexec=${3-}
mpi=$2
cd "$work" || exit 1

threads=(bench alltoall --ranks 2 -b 4K -e 4K -T 0 -n 1)
tiny=("${model[@]}" --steps 1 --ranks 2)
pod=(WORLD_SIZE=4 RANK=0 MASTER_ADDR=job-0)
size=(WORLD_SIZE=2)
shell=(RANK=0 WORLD_SIZE=1 LOCAL_RANK=0)
whole=(RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=1)

# warned <variables that are set> : <command...>: it runs, with one warning that names these.
warned() {
  local set=$1
  shift 2
  expect 0 "$*" env "$@"
  what=$*
  (($(grep -c '^moe .*warning: ' stderr) == 1)) || fail "$what: warnings: $(cat stderr)"
  matches "^moe [a-z]+: warning: $set (is|are) set without .*: left out\$" stderr
}
warned "RANK, WORLD_SIZE, MASTER_ADDR" : "${pod[@]}" "$moe" "${threads[@]}"
warned "WORLD_SIZE" : "${size[@]}" "$moe" "${threads[@]}"
warned "RANK, WORLD_SIZE, LOCAL_RANK" : "${shell[@]}" "$moe" train "${tiny[@]}"
warned "RANK, WORLD_SIZE, MASTER_ADDR" : "${pod[@]}" "$moe" verify --layouts 'ranks=2 transport=local'

# Half a set, a whole one, a contradiction, an invalid value: backend local ignores all.
for environment in pod size shell whole; do
  declare -n variables=$environment
  expect 0 "$environment, backend local" env "${variables[@]}" "$moe" "${threads[@]}" --backend local
  [[ ! -s stderr ]] || fail "$what: $(cat stderr)"
done
expect 0 "no number, backend local" env PMI_RANK=x PMI_SIZE=2 "$moe" "${threads[@]}" --backend local

# A whole set that nothing uses, for a rank other than the first: never without a warning.
expect 10 "a rank by hand" env "${whole[@]}" "$moe" train "${tiny[@]}"
says "a launch by RANK needs" stderr
says "; or unset RANK WORLD_SIZE, or --backend local" stderr
expect 2 "a rank by hand, --ranks" env "${whole[@]}" "$moe" train "${tiny[@]}" --ranks 3
says "--ranks is 3, the launcher (RANK) started 2, expected the same; or unset RANK WORLD_SIZE, or --backend local" stderr
expect 2 "a rank by hand, a flag" env "${whole[@]}" "$moe" train --what
says "unknown flag '--what'" stderr
expect 0 "a rank by hand, --version" env "${whole[@]}" "$moe" --version
says "moe "
expect 2 "a rank of Open MPI by hand" env OMPI_COMM_WORLD_{RANK=1,SIZE=2,LOCAL_RANK=1} "$moe" train --what
says "unknown flag '--what'" stderr
((seconds < 4)) || fail "$what: after $seconds s"
# torchrun would report it for the first rank: the other one waits to see whether that rank
# continues.
expect 2 "a rank of torchrun" env "${whole[@]}" TORCHELASTIC_RUN_ID=none "$moe" train --what
[[ ! -s stderr ]] || fail "$what: $(cat stderr)"

expect 2 "two launchers" env "${whole[@]}" PMI_RANK=0 PMI_SIZE=2 "$moe" "${threads[@]}"
says "RANK is 1 and PMI_RANK is 0, expected one launcher: unset RANK WORLD_SIZE, or PMI_RANK PMI_SIZE, or --backend local" stderr

# The CPUs are those of the affinity. oneTBB does not warn about more threads than that.
one_cpu=(taskset -c "$(taskset -cp $$ | grep -oE '[0-9]+' | tail -n 1)")
if "${one_cpu[@]}" true; then
  expect 0 "one CPU" "${one_cpu[@]}" "$moe" train "${tiny[@]}" --ranks 1 --threads auto
  says "threads per rank 1;" stderr
  expect 0 "three threads on one CPU" "${one_cpu[@]}" "$moe" train "${tiny[@]}" --ranks 1 --threads 3 --hidden-size 64
  says "threads per rank 3;" stderr
  ! grep -q TBB stderr || fail "$what: $(grep TBB stderr)"
fi

step=(SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_TASK_PID=1)
if [[ -z $mpiexec ]]; then
  expect 10 "srun, a build without MPI" env "${step[@]}" "$moe" "${threads[@]}"
  says "started by srun, but this build has no MPI" stderr
  finish
fi
# MPI ends the process, or reports a world of one: either follows a line that names Slurm.
run env "${step[@]}" "$moe" "${threads[@]}"
((rc != 0)) || fail "$what: exit code 0"
matches "^moe bench: warning: SLURM_PROCID is set without PMIX_RANK or PMI_RANK: srun started 2 tasks" stderr

# MPI's own variables win.
mpi_ranks=(bench alltoall -b 4K -e 4K -T 0 -n 1)
for environment in pod size; do
  declare -n variables=$environment
  expect 0 "$environment, mpiexec" env "${variables[@]}" "$mpiexec" -n 3 "$moe" "${mpi_ranks[@]}"
  matches "^# moe bench alltoall: 3 ranks"
  (($(grep -c '^moe bench: warning: .*: left out$' stderr) == 1)) || fail "$what: $(cat stderr)"
done
# Each process is a job of its own, and each reports its failure.
expect 0 "mpiexec, backend local" "$mpiexec" -n 2 "$moe" "${threads[@]}" --backend local
(($(grep -c "^# moe bench alltoall: 2 ranks" stdout) == 2)) || fail "$what: $(cat stdout)"
if [[ $mpi == openmpi ]]; then
  if (($(nproc) > 1)); then
    bound=("$mpiexec" -n 1 --bind-to core "$moe" train "${tiny[@]}" --ranks 1 --threads auto)
    expect 0 "a rank that is bound" env -u OMPI_MCA_rmaps_base_oversubscribe "${bound[@]}"
    says "moe train: warning: the launcher keeps this rank on 1 CPU, its share is $(nproc) of $(nproc)" stderr
    says "threads per rank 1;" stderr
  fi
  # With PMIx alone the size comes from MPI.
  expect 0 "PMIX_RANK alone" "$mpiexec" -n 3 env -u OMPI_COMM_WORLD_RANK -u OMPI_COMM_WORLD_SIZE \
    "$moe" "${mpi_ranks[@]}"
  matches "^# moe bench alltoall: 3 ranks"
fi
finish
