#!/usr/bin/env bash
# Jobs that are started again after a loss: bash launch.sh <moe> [<mpiexec>]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
train=(moe train "${model[@]}" --quiet)

expect 0 "undisturbed" "$moe" train "${model[@]}" --quiet --ranks 2 --steps 200 --out "$work/whole"

# kill_one <signal> <save>: the last rank, or its threads, with this --save once there is a
# checkpoint.
kill_one() {
  await 60 test -e "$2/latest" && kill -"$1" "$(ranks_of "train .*--save $2 .*--resume auto" | tail -n 1)"
}

expect 0 "a program" "$moe" launch --engine local -- sh -c 'echo "$0"' word
says word
expect 7 "a program that fails" "$moe" launch --engine local -- sh -c 'exit 7'
says "nothing to go on from" "$work/stderr"
orphans='(: &); sleep 1; for s in /proc/[0-9]*/stat; do
  read -r _ _ state parent _ 2>/dev/null <"$s" && [ "$state$parent" = "Z$PPID" ] && exit 3
done; exit 0'
expect 0 "orphans are reaped" "$moe" launch --engine local -- sh -c "$orphans"
expect 127 "no such program" "$moe" launch --engine local -- "$work/none"

# A second signal ends the wait for what a program has left.
shell_ended() { [[ -e $work/left ]] && ! pgrep -P "$1" -x sh; }
begin=$SECONDS what="two signals"
"$moe" launch --engine local -- sh -c "setsid sleep 600 & : >'$work/left'; exit 3" 2>"$work/stderr" &
await 60 shell_ended $!
kill -TERM $! && sleep 0.2 && kill -HUP $!
wait $!
rc=$?
((rc == 3)) || fail "$what: exit code $rc, expected 3: $(cat "$work/stderr")"
((SECONDS - begin < 5)) || fail "$what: took $((SECONDS - begin)) s"

# A killed process of threads.
kill_one KILL "$work/a" &
expect 0 "killed threads" "$moe" launch --engine local --restart-delay 0.1 -- "${train[@]}" --ranks 2 --steps 200 \
  --out "$work/threads" --save "$work/a" --save-interval 5
wait $!
says "exit code 137: a rank, a host or the launcher was lost; restart 1 of 20" "$work/stderr"
same_weights "$work/whole" "$work/threads"

# Storage that always fails: no checkpoint.
expect 4 "no progress" bash -c 'ulimit -f 8 && exec "$@"' - "$moe" launch --engine local --restart-delay 0 -- \
  "${train[@]}" --ranks 1 --steps 60 --save "$work/full" --save-interval 5 --checkpoint-failures 1
says "restart 2 of 20" "$work/stderr"
says "exit code 4: two restarts in a row left no newer checkpoint" "$work/stderr"

if [[ -z ${2:-} ]]; then finish; fi

# A rank of two processes with a segmentation fault, whose number is moe's own code for a stop under
# Hydra, and a request to stop.
kill_one SEGV "$work/b" &
expect 0 "a killed rank" "$moe" launch --ranks-per-node 2 --restart-delay 0.1 -- "${train[@]}" --steps 200 \
  --out "$work/ranks" --save "$work/b" --save-interval 5
wait $!
says "restart 1 of 20" "$work/stderr"
same_weights "$work/whole" "$work/ranks"
"$moe" launch --ranks-per-node 2 -- "${train[@]}" --steps 100000 --save "$work/c" --save-interval 5 \
  >/dev/null 2>"$work/stderr" &
await 60 test -e "$work/c/latest"
kill -TERM $!
wait $!
rc=$?
what="a stop"
((rc == 11)) || fail "$what: exit code $rc, expected 11: $(cat "$work/stderr")"
await 10 gone "--save $work/c" || fail "$what: processes are left"

# A launcher that outlives its ranks, as mpirun does when a host is cut off: here, and elsewhere,
# where the run's status.json shows it.
mkdir "$work/bin"
ln -s "$(command -v sleep)" "$work/bin/left"
for name in mpirun.openmpi mpirun.mpich; do
  cat >"$work/bin/$name" <<'SCRIPT'
#!/bin/sh
setsid "${0%/*}/left" 600 &
trap '' TERM
if [ -e "$ENDED" ]; then
  sed 's/"run":"./"run":"f/; s/"state":"complete","exit_code":0/"state":"failed","exit_code":8/' "$ENDED" >"$ENDED.new"
  mv "$ENDED.new" "$ENDED"
else
  OMPI_COMM_WORLD_RANK=0 PMI_RANK=0 sleep 1
fi
exec sleep 600
SCRIPT
  chmod +x "$work/bin/$name"
done
PATH=$work/bin:$PATH expect 8 "a launcher that waits" "$moe" launch --ranks-per-node 1 --launcher-timeout 5 -- sh
says "went on for 5s after its ranks, and was ended" "$work/stderr"
((seconds <= 20)) || fail "$what: took $seconds s"
ENDED=$work/b/status.json PATH=$work/bin:$PATH expect 8 "with no rank here" "$moe" launch --ranks-per-node 1 \
  --launcher-timeout 1 --max-restarts 0 -- "${train[@]}" --save "$work/b"
says "went on for 1s after its ranks, and was ended" "$work/stderr"
gone "$work/bin/left" || fail "$what: left $(pgrep -af "$work/bin/left")"

# Hosts are asked without the connections that the user's ssh keeps.
printf '#!/bin/sh\necho "$@" >>"%s"\nexit 1\n' "$work/asked" >"$work/bin/ssh"
# A job that Slurm ends while moe launch waits for what srun has left is not requeued.
printf '#!/bin/sh\n"%s" 600 &\n: >"%s"\nexit 137\n' "$work/bin/left" "$work/lost" >"$work/bin/srun"
printf '#!/bin/sh\n: >"%s"\n' "$work/requeued" >"$work/bin/scontrol"
chmod +x "$work"/bin/{ssh,srun,scontrol}
echo "node1 slots=1" >"$work/list"
PATH=$work/bin:$PATH expect 9 "no host" "$moe" launch --hosts "$work/list" --node-timeout 0 -- true
says "-o ControlPath=none node1 true" "$work/asked"
what="a stop before a requeue"
PATH=$work/bin:$PATH SLURM_JOB_ID=1 "$moe" launch --requeue -- "${train[@]}" --save "$work/d" 2>"$work/stderr" &
await 60 test -e "$work/lost"
sleep 0.5
kill -TERM $!
wait $!
rc=$?
((rc == 137)) || fail "$what: exit code $rc, expected 137: $(cat "$work/stderr")"
[[ ! -e $work/requeued ]] || fail "$what: requeued"
finish
