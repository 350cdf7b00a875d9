#!/usr/bin/env bash
# Unreadable files, pipes in place of files, and disks that hang: bash faults.sh <moe> [<mpiexec>]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
mpiexec=${2-}
cd "$work" || exit 1
"${CC:-cc}" -shared -fPIC -O1 -o fault_files.so "$here/../../../scripts/fault_files.c" -ldl || exit 77
short=("$moe" train "${model[@]}" --steps 4 --ranks 2 -q)
train=("${short[@]}" --save-interval 2)
expect 0 "a run" "${train[@]}" --save run/checkpoints

preload=(env LD_PRELOAD="$work/fault_files.so")
# faulty <folder> <call> <at> <kind> <command...>: runs the command with that fault.
faulty() { run "${preload[@]}" FAULT_UNDER="$1" FAULT_CALLS=",$2," FAULT_AT="$3" FAULT_KIND="$4" "${@:5}"; }

# A call that fails in a read has the same message and exit code in every command. EIO is 5, EMFILE
# 24, ENOMEM 12.
step=run/checkpoints/step-00000004
reads=("ckpt ls run" "ckpt verify $step --threads 1" "ckpt diff $step $step" "ckpt prune run --keep 1 --dry-run"
  "ckpt export $step --format mixtral --out exported" "eval --checkpoint run --data $text --eval-sequences 2"
  "generate --checkpoint run --prompt a --max-new-tokens 1")
resume="train ${model[*]} --steps 4 --save run/checkpoints --resume"
for command in "${reads[@]}" "$resume auto" "$resume $step"; do
  while read -r calls at kind code words; do
    what="$command: $calls $at"
    # shellcheck disable=SC2086
    faulty run "$calls" "$at" "$kind" "$moe" $command
    [[ $calls == opendir && $command == *$step* && $rc != "$code" ]] && continue # it lists no folder first
    expect "$code" "$command, $words in $calls $at"
    says "$words" stderr
    (($(grep "^moe" stderr | grep -vc "^moe: warning: ") == 1)) || fail "$what: $(cat stderr)"
  done <<END
open 1 5 4 Input/output error
open 2 24 4 Too many open files
mmap 2 12 5 Cannot allocate memory
opendir 1 5 4 Input/output error
END
done
rm -rf exported
faulty run stat 1 116 "$moe" ckpt ls run # ESTALE, as from a server that was restarted
expect 4 "a folder that cannot be looked at"
faulty "$text" open 1 5 "${short[@]}"
expect 4 "a text that cannot be opened"
faulty "$text" read 1 5 "${short[@]}"
expect 4 "a text that cannot be read"
faulty flight mkdir 1 28 "${short[@]}" --flight-dir flight # ENOSPC
expect 4 "a folder for which there is no room"
says "--flight-dir: cannot make the folder 'flight': No space left on device" stderr

# Token ids are read from their file as they are needed: it becomes shorter.
awk 'BEGIN { for (i = 0; i < 200000; ++i) printf "%c%c", 97 + i * i % 23, 0 }' >ids
"$moe" train "${model[@]:2}" --tokens ids --vocab-size 256 --steps 100000 --ranks 2 -q --save shrunk \
  --save-interval 2 >stdout 2>stderr &
await 20 test -d shrunk/step-00000002
truncate -s 0 ids
wait $!
rc=$?
expect 4 "token ids that become shorter"
says "became shorter while it was read" stderr
for saved in shrunk/step-*; do
  expect 0 "its checkpoint" "$moe" ckpt verify "$saved" --threads 1
done

# Memory runs out while boxes are read: a line and exit code 5, or the complete result. Allocations
# of libraries before main, CUDA's among them, are not the program's.
run "${preload[@]}" FAULT_MALLOC=1000000000 FAULT_COUNT=count "$moe" --version
before=$(<count)
memory() {
  rm -f count
  run "${preload[@]}" FAULT_MALLOC="$1" FAULT_COUNT=count "$moe" ckpt verify $step --threads 1
}
memory 1000000000
whole=$(<stdout) allocations=$(<count)
for ((n = 1; n < 80; ++n)); do
  at=$((before + (allocations - before) * n / 80))
  memory $at
  ((rc == 5)) && grep -q "^moe.*: " stderr && continue
  [[ $rc == 0 && $(<stdout) == "$whole" ]] || fail "allocation $at of $allocations: exit code $rc, $(cat stderr)"
done

# Pipes without a reader, and paths that are no files.
mkdir out
mkfifo out/metrics.jsonl
refused 2 "'out/metrics.jsonl' is a folder, device or pipe" train "${model[@]}" --steps 1 --out out
mkdir piped
mkfifo piped/latest
refused 2 "'piped/latest' is a folder, device or pipe" train "${model[@]}" --steps 1 --save piped -q
mkfifo unread
refused 4 "cannot write 'unread'" train "${model[@]}" --steps 1 --record-routing unread -q

# A call that does not return: the run ends within the deadline, and the line names the call and its
# path. Another line precedes it, at half of the deadline.
hangs() { # <what> <call> <at> <where> <command...>
  rm -rf save
  faulty save "$2" "$3" hang env FAULT_NAMES=/.tmp-step- "${@:5}" --save save --comm-timeout 2 --checkpoint-timeout 1
  expect 8 "$1"
  matches "^moe train: (rank [01]: )?rank [01] on host [^ ]+ in Save \(checkpoint, step [24]\): $4' has not returned for [12][.0-9]*s, deadline 1s" stderr
  matches "^moe: warning: rank [01] on host [^ ]+ in Save .* has not returned for [0-9.]+(s|ms)$" stderr
  ((seconds < 8)) || fail "$1: $seconds s"
}
hangs "a write behind the steps" write 2 "write of 'save/.tmp-step-00000002.*/shard.*" "${train[@]}"
hangs "an fsync that steps wait for" fsync 3 "fsync of 'save/.tmp-step-00000002.*" "${train[@]}" --checkpoint-async off
hangs "a rename of one rank" rename 3 "rename of 'save/.*" "${train[@]}" --ranks 1
if [[ $mpiexec ]]; then
  hangs "an open, of a process" open 2 "(open|fsync) of 'save/.*" env FAULT_RANK=1 "$mpiexec" -n 2 "${train[@]:0:${#train[@]}-3}" -q
fi

# The terminal is closed: the step is saved, unless the signal is ignored.
long=("$moe" train "${model[@]}" --steps 100000 --ranks 2 -q --save hung-up)
"${long[@]}" >stdout 2>stderr &
await 20 test -d hung-up
sleep 0.2
kill -HUP $!
wait $!
rc=$?
expect 11 "SIGHUP"
compgen -G "hung-up/step-*" >/dev/null || fail "SIGHUP: nothing was saved"
(trap '' HUP && exec "${long[@]}" --resume auto >stdout 2>stderr) &
sleep 0.5
kill -HUP $!
sleep 0.3
kill -0 $! || fail "a SIGHUP that was to be ignored ended the run"
kill -TERM $!
wait $!
rc=$?
expect 11 "SIGTERM after a SIGHUP that was ignored"
finish
