#!/usr/bin/env bash
# `moe train` on MPI processes: bash mpi.sh <moe> <mpiexec> <openmpi|mpich>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
mpiexec=$2
mpi=$3

# The same bits as threads.
invariant=("${model[@]}" --numerics layout-invariant --steps 3 --lr 0.01 --quiet)
expect 0 "one thread" "$moe" train "${invariant[@]}" --ranks 1 --out "$work/local"
expect 0 "four processes" "$mpiexec" -n 4 "$moe" train "${invariant[@]}" --ep 2 --all-reduce library --out "$work/mpi"
same_bits "$work/local" "$work/mpi"
(($(grep -c '^trained' "$work/stdout") == 1)) || fail "not one report"
matches "^reproduce +mpirun -n 4 "

expect 0 "a layout that four processes find" "$mpiexec" -n 4 "$moe" train "${invariant[@]}" --mesh auto --out "$work/auto"
same_bits "$work/local" "$work/auto"

# said_once [<pattern>]: exactly one line of the program. Launchers add lines of their own.
said_once() {
  (($(grep -c "^moe train: ${1-}" "$work/stderr") == 1)) || fail "$what: $(cat "$work/stderr")"
}

# Refusals come from the first process alone.
expect 2 "EP 3 on two processes" "$mpiexec" -n 2 "$moe" train "${model[@]}" --ep 3 --out "$work/refused"
said_once
[[ ! -e $work/refused ]] || fail "EP 3: left files"
expect 2 "--ranks 3 on two processes" "$mpiexec" -n 2 "$moe" train "${model[@]}" --ranks 3
expect 6 "divergence on two processes" "$mpiexec" -n 2 "$moe" train "${model[@]}" --quiet --steps 50 --lr 1e30 --clip-grad 0
said_once

# A launcher of the other MPI starts processes each of which has a world of one.
if [[ $mpi == openmpi ]]; then
  PMI_RANK=0 PMI_SIZE=2 run "$moe" train "${model[@]}" --steps 1
else
  OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 run "$moe" train "${model[@]}" --steps 1
fi
expect 9 "a launcher of the other MPI"

# An error of one rank alone, before ranks meet.
run "$mpiexec" -n 3 sh -c 'test "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 && set -- "$@" --data /nowhere; exec "$@"' sh \
  "$moe" train "${model[@]}" --steps 1 --quiet
expect 2 "an error of rank 1 alone"
said_once "rank 1 on host $(uname -n): .*'/nowhere' does not exist"
((seconds < 20)) || fail "an error of rank 1 alone: ended after $seconds s"

# lose_rank <signal> <rank> <exit codes> <message>: one of three processes is stopped or killed
# during training; one line names it, and all end within the deadline of 2 seconds + 2. Start-up is
# not included: time runs from the signal.
lose_rank() {
  local signal=$1 rank=$2 codes=$3 said=$4 launcher victim begin took lines
  : >"$work/stderr" # the loop below must not read an earlier run's output
  "$mpiexec" -n 3 "$moe" train "${model[@]}" --steps 1000000 --comm-timeout 2 -v \
    >"$work/stdout" 2>"$work/stderr" </dev/null &
  launcher=$!
  await 30 grep -qE "^step +[0-9]+/" "$work/stderr"
  # A process of the job is identified by its command line; processes that watch it are not called
  # moe.
  victim=$(pgrep -f -- "$text" | while read -r pid; do
    [[ $(<"/proc/$pid/comm") == moe ]] &&
      grep -qzE "^(OMPI_COMM_WORLD_RANK|PMI_RANK)=$rank\$" "/proc/$pid/environ" && echo "$pid"
  done 2>/dev/null)
  if [[ ! $victim =~ ^[0-9]+$ ]]; then
    fail "SIG$signal: no process of rank $rank: '$victim'"
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
  lines=$(grep "^moe train: " "$work/stderr")
  grep -qE "\brank $rank \(process $victim\) $said" <<<"$lines" && (($(wc -l <<<"$lines") == 1)) ||
    fail "SIG$signal: not one line with rank $rank: $lines"
  await 2 gone "$text" || fail "SIG$signal: left processes: $(pgrep -af -- "$text")"
  echo "SIG$signal of rank $rank: exit code $rc after $took ms"
}
# The others are not notified of a stopped process: their own deadline ends them.
lose_rank STOP 2 "8" "is stopped"
# The launcher itself ends the others after one is killed, with a code of its own (Open MPI 128 + 9,
# MPICH the SIGTERM that it sends or the code of a rank that notices), unless they notice first.
for rank in 0 2; do
  lose_rank KILL "$rank" "6 7 8 9 15 137" "(was killed by signal 9|is gone)"
done
finish
