#!/usr/bin/env bash
# `moe train` that is killed, stopped and resumed: bash resume.sh <moe> [<mpiexec> ...]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launcher=("${@:2}") # of four processes; empty: threads
steps=700
train=("$moe" train "${model[@]}" --steps $steps --lr 0.01 --quiet)

# started <what> <lines>: waits until the run in the background has written that many metrics.
has_lines() { (($(wc -l <"$work/b/metrics.jsonl") >= $1)); }
started() { await 30 has_lines "$2" || fail "$1: no step within 30 s"; }

expect 0 "a run that never stops" "${train[@]}" --ranks 1 --out "$work/a"
resumable=("${train[@]}" --save "$work/ckpt" --save-interval 20 --resume auto --out "$work/b")
if ((${#launcher[@]})); then
  ranks=("${launcher[@]}" "${resumable[@]}" --ep 4)
else
  ranks=("${resumable[@]}" --ranks 4 --ep 2)
fi

# Killed: it resumes from the last save. A checkpoint that was being written is ignored.
"${ranks[@]}" >"$work/stdout" 2>"$work/stderr" &
pid=$!
started "a run that is killed" 60
expect 2 "a second run in its folder" "${train[@]}" --ranks 2 --save "$work/ckpt" --resume auto
matches "^moe train: --save: '$work/ckpt/lock' is held by process [0-9]+ on host .* still runs" "$work/stderr"
expect 0 "status of a run that goes on" "$moe" status "$work/ckpt" "$work/b" -o csv
kill -KILL $pid
wait $pid 2>/dev/null
await 10 gone "--save $work/ckpt" # processes that outlive their launcher
expect 7 "status of a killed run" "$moe" status "$work/b"
matches "^$work/b: lost, step [0-9]+/$steps$"
compgen -G "$work/ckpt/step-*/manifest.json" >/dev/null || fail "killed: no checkpoint in $(ls "$work/ckpt")"

# Asked to stop: exit code 11, and a checkpoint of the step.
"${ranks[@]}" >"$work/stdout" 2>"$work/stderr" &
pid=$!
started "a run that is stopped" $(($(wc -l <"$work/b/metrics.jsonl") + 10))
# A rank itself: after passing on a SIGUSR1, Hydra's exit code is 0 at times.
kill -USR1 "$(ranks_of "--save $work/ckpt" | head -n 1)"
wait $pid
rc=$?
expect 11 "stopped by SIGUSR1"
matches "'$work/ckpt/lock' is taken over from process [0-9]+ on host .*, which has ended" "$work/stderr"
[[ ! -e $work/ckpt/lock ]] || fail "stopped: left its lock"
says "stopped on request; the same command with --resume auto goes on" "$work/stderr"
step=$(sed -n 's/.*\/step-0*\([0-9]*\)$/\1/p' <<<"$(grep '^files' "$work/stdout")")
matches "^trained [0-9]+ steps after step [0-9]+, stopped on request, in "
[[ $(cat "$work/ckpt/latest") == "step-$(printf %08d "$step")" ]] || fail "stopped: step $step, latest $(cat "$work/ckpt/latest")"
expect 11 "status of a stopped run" "$moe" status "$work/b" -o jsonl
says '"state":"stopped","exit_code":11,'

# At another layout to the end: all lines are those of the uninterrupted run.
expect 0 "resumed on three ranks" "${resumable[@]}" --ranks 3
[[ $(bits "$work/a/metrics.jsonl" | grep -v val_loss_before) == \
  $(bits "$work/b/metrics.jsonl" | grep -v val_loss_before) ]] || fail "resumed: other bits"
(($(value "$work/b/metrics.jsonl" first_step) == step)) || fail "resumed after another step than $step"
expect 0 "status of a complete run" "$moe" status "$work/ckpt"
says "$work/ckpt: complete, step $steps/$steps"
matches "checkpoint  of step $steps, [0-9:]+ ago, in $work/ckpt$"
(($(find "$work/ckpt" -name 'step-*' | wc -l) == 3)) || fail "kept: $(ls "$work/ckpt")"

# Obstacles to every save are reported before the first step.
expect 4 "a folder that cannot be written" "${train[@]}" --ranks 2 --save /proc/none
says "--save: cannot make folder '/proc/none'" "$work/stderr"
if ((${#launcher[@]})); then
  each=("${train[@]}" --comm-timeout 4 --save)
  expect 2 "a folder for each rank" "${launcher[0]}" -n 1 "${each[@]}" "$work/c" : -n 1 "${each[@]}" "$work/d"
  says "--save: rank 1 on host $(hostname) cannot see what rank 0 on host $(hostname) writes to '$work/c'" "$work/stderr"
  expect 2 "--save on one rank" "${launcher[0]}" -n 1 "${each[@]}" "$work/c" : -n 1 "${train[@]}" --comm-timeout 4
  says "were given a different --save: given and none," "$work/stderr"
fi

# Again: nothing is left to train.
expect 0 "resumed after the last step" "${resumable[@]}" --ranks 2
says "trained 0 steps after step $steps in"
finish
