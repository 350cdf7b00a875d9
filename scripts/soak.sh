#!/usr/bin/env bash
# Trains under random faults, again and again, and compares with a run that nothing happens to:
#
#   scripts/soak.sh HOURS [SEED [MOE]]      MOE: build/release/moe/cli/moe, with Open MPI
#
# In every round `moe launch` runs three jobs one after the other: 8 threads, 4 processes, 3 hosts
# of 2 processes (namespaces of this machine; left out by name where they are not allowed). Soon after
# each new checkpoint, and at most six times, a fault is drawn: a process is killed, killed by a
# segmentation fault, or stopped for good, or a host is killed and comes back. Each job must end with
# exit code 0 and the weights of the undisturbed run, and leave no process. At the end: rounds,
# faults, restarts, what a process held at most in each half of the time, and files in /dev/shm,
# processes and memory before and after. Exit code 1 if a job failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
hours=${1:?usage: scripts/soak.sh HOURS [SEED [MOE]]}
seed=${2:-1}
RANDOM=$seed
set -- "$(realpath "${3:-build/release/moe/cli/moe}")"
source tests/moe/cli/lib.sh
source tests/moe/cli/namespaces.sh
kinds=(threads processes)
if namespaces_allowed; then kinds+=(hosts); else echo "soak: no hosts: $(cat "$work/stderr")"; fi

train=(moe train "${model[@]}" --quiet --ep auto --comm-timeout 3 --save-interval 10)
steps=400
run "$moe" train "${model[@]}" --quiet --steps "$steps" --out "$work/whole" --ranks 1
expect 0 "undisturbed"
begin=$SECONDS
seconds_in_all=$(awk -v h="$hours" 'BEGIN { printf "%d", h * 3600 }')
printf 'host-%s slots=2\n' a b c >"$work/list"
declare -A faults=() restarts=() most=()

# note_use <process> <kind>: its memory, handles and threads, if no process of the kind had more in
# this half of the time.
note_use() {
  local half=$((2 * (SECONDS - begin) >= seconds_in_all)) use=()
  use[0]=$(awk '/VmRSS/ { print int($2 / 1024) }' "/proc/$1/status" 2>/dev/null)
  use[1]=$(find "/proc/$1/fd" -type l 2>/dev/null | wc -l)
  use[2]=$(find "/proc/$1/task" -mindepth 1 -maxdepth 1 2>/dev/null | wc -l)
  local i
  for i in 0 1 2; do
    ((${use[i]:-0} <= ${most[$2,$half,$i]:-0})) || most[$2,$half,$i]=${use[i]}
  done
}

# disturb <save> <kind>: one fault in what runs with this --save.
disturb() {
  local ranks victim signal=(KILL SEGV STOP)
  mapfile -t ranks < <(ranks_of "train .*--save $1 .*--resume auto")
  ((${#ranks[@]})) || return
  victim=${ranks[RANDOM % ${#ranks[@]}]}
  if [[ $1 == *hosts ]] && ((RANDOM % 2)); then
    local name=host-b
    kill -9 "$(cat "$work/hosts/$name")" && start_host "$name"
    return
  fi
  signal=${signal[RANDOM % ${#signal[@]}]}
  note_use "$victim" "$2"
  # Where ranks are threads of one process, nobody is left to notice that it is stopped.
  [[ $1 != *threads || $signal != STOP ]] || signal=KILL
  kill -"$signal" "$victim"
}

# job <kind>: one job under faults.
job() {
  local save=$work/save-$1 launch=() ended
  rm -rf "$save" "$work/out"
  case $1 in
    threads) launch=(--engine local -- "${train[@]}" --ranks 8) ;;
    processes) launch=(--engine mpirun --ranks-per-node 4 -- "${train[@]}") ;;
    hosts) launch=(--engine mpirun --hosts "$work/list" --nodes 1:3 --rsh "$work/rsh" -- "${train[@]}") ;;
  esac
  "$moe" launch --restart-delay 0.1 --launcher-timeout 5 "${launch[@]}" --steps "$steps" \
    --save "$save" --out "$work/out" >"$work/stdout" 2>"$work/stderr" </dev/null &
  ended=$!
  local fault latest= now
  for fault in 1 2 3 4 5 6; do
    while kill -0 $ended 2>/dev/null; do
      now=$(cat "$save/latest" 2>/dev/null)
      [[ $now == "$latest" ]] || break
      sleep 0.1
    done
    latest=$now
    sleep "0.$((RANDOM % 10))"
    disturb "$save" "$1" && faults[$1]=$((${faults[$1]:-0} + 1))
  done
  wait $ended
  rc=$?
  expect 0 "$1, round $round"
  restarts[$1]=$((${restarts[$1]:-0} + $(grep -c 'moe launch: .*; restart' "$work/stderr")))
  same_weights "$work/whole" "$work/out"
  await 10 gone "--save $save" || fail "$what: left $(pgrep -af -- "--save $save")"
}

in_use() {
  echo "$(find /dev/shm -type f | wc -l) files in /dev/shm, $(pgrep -c 'moe|orted|mpi') processes," \
    "$(awk '/MemAvailable/ { print int($2 / 1024) }' /proc/meminfo) MiB available"
}

for name in host-a host-b host-c; do [[ ${#kinds[@]} == 2 ]] || start_host $name; done
before=$(in_use)
for ((round = 1; round == 1 || SECONDS - begin < seconds_in_all; ++round)); do
  for kind in "${kinds[@]}"; do job "$kind"; done
  # Open MPI leaves the segments of ranks that are killed.
  rm -f /dev/shm/vader_segment.*
done
printf '%-10s %7s %9s  %s\n' job faults restarts "most MiB, handles, threads of a process: first half, second half"
for kind in "${kinds[@]}"; do
  printf '%-10s %7s %9s ' "$kind" "${faults[$kind]:-0}" "${restarts[$kind]:-0}"
  for half in 0 1; do
    printf ' %5s %4s %4s' "${most[$kind,$half,0]:--}" "${most[$kind,$half,1]:--}" "${most[$kind,$half,2]:--}"
  done
  echo
done
echo "rounds $((round - 1)) of $steps steps in $((SECONDS - begin)) s; seed $seed"
echo "before: $before"
echo "after:  $(in_use)"
finish
