#!/usr/bin/env bash
# `moe train` on MPI processes: bash mpi.sh <moe> <mpiexec> <openmpi|mpich>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
mpiexec=$2
mpi=$3
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1

# The same bits as threads.
invariant=("${model[@]}" --numerics layout-invariant --steps 3 --lr 0.01 --quiet)
run "$moe" train "${invariant[@]}" --ranks 1 --out "$work/local"
expect 0 "one thread"
run "$mpiexec" -n 4 "$moe" train "${invariant[@]}" --ep 2 --all-reduce library --out "$work/mpi"
expect 0 "four processes"
[[ -n $(bits "$work/mpi/metrics.jsonl") &&
  $(bits "$work/mpi/metrics.jsonl") == "$(bits "$work/local/metrics.jsonl")" ]] ||
  fail "four processes: other bits than one thread"
(($(grep -c '^trained' "$work/stdout") == 1)) || fail "not one report"
grep -qE "^reproduce +mpirun -n 4 " "$work/stdout" || fail "reproduce: no mpirun"

# Refusals come from the first process alone. Launchers add lines of their own.
run "$mpiexec" -n 2 "$moe" train "${model[@]}" --ep 3 --out "$work/refused"
expect 2 "EP 3 on two processes"
(($(grep -c "^moe train: " "$work/stderr") == 1)) ||
  fail "EP 3: $(grep -c "^moe train: " "$work/stderr") lines"
[[ ! -e $work/refused ]] || fail "EP 3: left files"
run "$mpiexec" -n 2 "$moe" train "${model[@]}" --ranks 3
expect 2 "--ranks 3 on two processes"
run "$mpiexec" -n 2 "$moe" train "${model[@]}" --quiet --steps 50 --lr 1e30 --clip-grad 0
expect 6 "divergence on two processes"
(($(grep -c "^moe train: " "$work/stderr") == 1)) ||
  fail "divergence: $(grep -c "^moe train: " "$work/stderr") lines"

# A launcher of the other MPI starts processes that each see a world of one.
if [[ $mpi == openmpi ]]; then
  PMI_RANK=0 PMI_SIZE=2 run "$moe" train "${model[@]}" --steps 1
else
  OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 run "$moe" train "${model[@]}" --steps 1
fi
expect 9 "a launcher of the other MPI"

# lose_rank <signal> <exit codes>: a process of three is stopped or killed in mid-training; all end
# within the deadline of 2 seconds + 2. Their start-up comes before, so time runs from the signal.
lose_rank() {
  local signal=$1 codes=$2 launcher victim begin took
  : >"$work/stderr" # the loop below must not see an earlier run
  "$mpiexec" -n 3 "$moe" train "${model[@]}" --steps 1000000 --comm-timeout 2 -v \
    >"$work/stdout" 2>"$work/stderr" </dev/null &
  launcher=$!
  for ((i = 0; i < 300; ++i)); do
    grep -qE "^step +[0-9]+/" "$work/stderr" && break
    sleep 0.1
  done
  # The process whose rank is 2.
  victim=$(grep -lzE '^(OMPI_COMM_WORLD_RANK|PMI_RANK)=2$' /proc/[0-9]*/environ 2>/dev/null |
    while IFS=/ read -r _ _ pid _; do
      [[ $(readlink "/proc/$pid/exe") == "$(readlink -f "$moe")" ]] &&
        tr '\0' '\n' <"/proc/$pid/cmdline" | grep -qxF -- "$text" && echo "$pid"
    done)
  if [[ ! $victim =~ ^[0-9]+$ ]]; then
    fail "SIG$signal: no process of rank 2: '$victim'"
    kill "$launcher"
    wait "$launcher"
    return
  fi
  begin=$(date +%s%N)
  kill -s "$signal" "$victim"
  wait "$launcher"
  rc=$?
  took=$((($(date +%s%N) - begin) / 1000000))
  [[ " $codes " == *" $rc "* ]] || fail "SIG$signal: exit code $rc, expected one of $codes"
  ((took < 4000)) || fail "SIG$signal: ended after $took ms, expected under 4000"
  kill -0 "$victim" 2>/dev/null && [[ $(ps -o stat= -p "$victim") != Z* ]] &&
    fail "SIG$signal: rank 2 is still there"
  echo "SIG$signal: exit code $rc after $took ms"
}
# Nobody tells the others of a stopped process: their own deadline ends them, and names it.
lose_rank STOP "8"
grep -qE "^moe train: .*waited .* for rank" "$work/stderr" ||
  fail "SIGSTOP: nobody says who was waited for: $(grep '^moe train' "$work/stderr")"
# The launcher itself ends the others of a killed one, with a code of its own (Open MPI 128 + 9,
# MPICH the SIGTERM that it sends), unless they notice first.
lose_rank KILL "7 8 9 15 137"
finish
