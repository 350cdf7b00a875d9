#!/usr/bin/env bash
# Kills runs that save, fails calls to the file system, and takes the folder of one rank away:
#
#   scripts/fault_runs.sh [--kills N] [--calls N|all] [--mounts N] [--seed N] [MOE [MPIEXEC]]
#
# 500, 500 and 200 faults by default, with build/release; mounts need MPI. After each fault the same
# command runs without one. Calls are those of runs that save, resume and import a model, of eval,
# ckpt export and ckpt prune: one fails (EIO, ENOSPC, EACCES, EINTR), writes half, or kills its
# process. Lost: no checkpoint as new as the newest one before the fault verifies, or the command
# without a fault does not end as if there had been none, or leaves temporary files. Silent: a
# command ends with 0 and other results, or fails without a line that names a path or with a code
# that is not the fault's. Prints a line for each kind; faults that lost something or were silent
# are shown. Exit code 1 if there are any.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kills=500 calls=500 mounts=200 seed=$RANDOM
while [[ ${1-} == --* ]]; do
  case $1 in
    --calls) calls=${2-} && [[ $calls == all || $calls =~ ^[0-9]+$ ]] || exit 2 ;;
    --kills | --mounts | --seed) printf -v "${1#--}" %d "${2-}" || exit 2 ;;
    *)
      sed -n '4s/^# *//p' "$0" >&2
      exit 2
      ;;
  esac
  shift 2
done
build=$here/../build/release
mpiexec=${2-$(sed -n 's/^MOE_MPIEXEC:FILEPATH=//p' "$build/CMakeCache.txt")}
source "$here/../tests/moe/cli/lib.sh" "$(realpath "${1-$build/moe/cli/moe}")"
cc -shared -fPIC -O1 -o "$work/fault_files.so" "$here/fault_files.c" -ldl || exit 2
cd "$work" || exit 2
RANDOM=$seed
echo "seed $seed"

steps=12
train=("$moe" train "${model[@]}" --steps $steps --lr 0.01 --quiet -o json --save save --resume auto --comm-timeout 5)
fault=(env "LD_PRELOAD=$work/fault_files.so" FAULT_UNDER=save FAULT_MET=met)

# draw <n>: sets drawn, from 0. (A subshell has a seed of its own.)
draw() { drawn=$(((RANDOM << 15 | RANDOM) % $1)); }

# ended_with: the hash of the weights that the last run printed.
ended_with() { grep -oE '"weights_xxh3": *"[0-9a-f]{16}"' stdout; }

# newest: the step of the newest checkpoint of the folder save that verifies; 0: none does.
newest() {
  local step
  for step in $(find save -maxdepth 1 -name 'step-*' 2>/dev/null | sort -r); do
    "$moe" ckpt verify "$step" --threads 1 >/dev/null 2>&1 || continue
    echo $((10#${step##*-}))
    return
  done
  echo 0
}

declare -A lost silent
show() { # <kind> <lost|silent> <what>
  local -n counts=$2
  counts[$1]=$((counts[$1] + 1))
  echo "$2: $1, $3: exit code $rc, $(tail -n 2 "$work/stderr" | tr '\n' ' ')"
}

# goes_on <kind> <what>: a run without a fault, resumed at step `before` or later, to the same
# weights.
goes_on() {
  local after code=$rc
  after=$(newest)
  ((after >= before)) || { show "$1" lost "$2: step $before was there, $after is"; return; }
  cp stderr stderr.fault
  run "${train[@]}" --save-interval 2 --ranks 2 --out "$work/out"
  ((rc == 0)) && [[ $(ended_with) == "$weights" ]] && return
  show "$1" lost "$2 (exit code $code, $(tail -n 1 stderr.fault)), then the run that goes on"
}

# lacks: whether a checkpoint is missing that a run without a fault leaves. One more may exist if
# retention could not read one of those that it counts, and so may the lock of a process that has
# ended.
lacks() {
  local step
  for step in $whole; do
    [[ $step != step-* || -d save/$step ]] || return 0
  done
  return 1
}

# ended <kind> <what> <codes>: how the last run, which met a fault, may end.
ended() {
  if ((rc == 0)); then
    lacks && ! grep -q warning stderr && show "$1" silent "$2: lacks a checkpoint"
  elif [[ " $3 " != *" $rc "* ]] || ! grep -q "^moe train: " stderr; then
    show "$1" silent "$2"
  fi
}

# The result of every run that continues, and the initial folders of the faults: a writer that is
# late on a busy machine must not skip one.
run "${train[@]}" --save-interval 4 --checkpoint-async off --ranks 2 --out "$work/out"
weights=$(ended_with)
((rc == 0)) && [[ $weights ]] || { tail stderr >&2; exit 2; }
rm -r save/step-000000$steps out
before=8
cp -r save begun
afresh() {
  rm -rf save out met elsewhere
  cp -r begun save
  mkdir elsewhere
}
# counted <command...>: the number of calls of a run without a fault, and the files that it leaves.
counted() {
  afresh
  rm -f count
  run "${fault[@]}" FAULT_COUNT="$work/count" "$@"
  ((rc == 0)) || { tail stderr >&2; exit 2; }
  whole=$(cd save && ls)
  sort -n count | tail -n 1
}

say() { # <kind> <trials> <what else>
  echo "$1 $2: $3, ${lost[$1]} lost, ${silent[$1]} silent, $((SECONDS - begin)) s"
}

# A chain of runs in one folder, each killed after some moments, until one ends by itself.
kill_runs() {
  local i ended=0 pid
  lost[kills]=0 silent[kills]=0 begin=$SECONDS
  rm -rf save out
  before=0
  for ((i = 0; i < kills; ++i)); do
    "${train[@]}" --save-interval 1 --checkpoint-keep 2 --ranks 2 --out "$work/out" >stdout 2>stderr &
    pid=$!
    draw 400
    sleep "0.$(printf %03d "$drawn")"
    kill -KILL $pid 2>/dev/null
    wait $pid 2>/dev/null
    rc=$?
    after=$(newest)
    ((after >= before)) || show kills lost "trial $i: step $before was there, $after is"
    before=$after
    ((rc == 137)) && continue
    ended=$((ended + 1))
    ((rc == 0)) && [[ $(ended_with) == "$weights" ]] || show kills lost "trial $i"
    rm -rf save out
    before=0
  done
  say kills "$kills" "$ended runs came to their end"
}

# A command, what it reads and what it leaves: `calls_of <command>` sets `line`, `codes`, and result(),
# which prints what a command without a fault leaves.
calls_of() {
  local small=(--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-experts 4 --moe-ffn-hidden-size 16
    --seq-length 32 --micro-batch-size 1 --micro-batches 2 --eval-sequences 2 --threads 1 --ranks 2 -q
    --comm-timeout 5 -o json)
  local files=(--save run/save --resume auto --out run/out --flight-dir run/flight)
  result() { ended_with; }
  case $1 in
    save) line=(train --data run/text "${small[@]}" --steps 4 --save-interval 2 "${files[@]}") ;;
    resume) line=(train --data run/text "${small[@]}" --steps 6 --save-interval 2 "${files[@]}") ;;
    import) line=(train --tokens run/ids --vocab-size 256 "${small[@]}" --steps 1 --init-from run/model) ;;
    eval)
      line=(eval --checkpoint run/save --data run/text --eval-sequences 2 -o json)
      result() { grep -o '"bits_per_byte[^,]*' stdout; }
      ;;
    export)
      line=(ckpt export run/save/step-00000004 --format mixtral --out run/exported)
      result() { (cd run && sha256sum exported/*); }
      ;;
    prune)
      line=(ckpt prune run/save --keep 1)
      result() { (cd run/save && echo step-*); }
      ;;
  esac
}

# leftovers <command>: files that the next run removes; what prune has not removed, the next one that saves.
leftovers() {
  find run \( -name '*.tmp*' -o -name '.probe-*' -o -name '*.json.*' \) | head -n 3
  [[ $1 == prune ]] || find run -name '.trash-*'
}

stays='warning: (not counted among the checkpoints that stay|not removed, since not of this run): '

# call_fault <command> <kind> <call> <names of calls>: one fault, then the command again. Sets `met`.
call_fault() {
  local trial="$1, call $3 of $4 $2" ended left
  rm -rf run met
  cp -r "begun.$1" run
  run env "LD_PRELOAD=$work/fault_files.so" FAULT_UNDER=run FAULT_MET=met FAULT_CALLS="$4" FAULT_KIND="$2" \
    FAULT_AT="$3" "$moe" "${line[@]}"
  met=0 ended=$rc
  [[ ! -e met ]] || met=1
  left=$(leftovers "$1")
  if [[ $2 == kill && $met == 1 ]]; then
    ((rc == 137)) || show calls silent "$trial"
  elif ((rc == 0)); then
    # What prune cannot read it does not remove, and says so.
    [[ $(result) == "${wanted[$1]}" ]] || { [[ $1 == prune ]] && grep -qE "$stays" stderr; } ||
      show calls silent "$trial"
  elif [[ " 2 3 4 " != *" $rc "* ]] || (($(grep '^moe' stderr | grep -vc 'warning: ') != 1)) ||
    ! grep -v 'warning: ' stderr | grep -q "'run/"; then
    show calls silent "$trial"
  elif [[ $left ]]; then
    stayed=$((stayed + 1))
  fi
  [[ $1 != export || $ended == 0 || $2 != kill ]] || rm -rf run/exported # which it refuses to write to
  cp stderr stderr.fault
  [[ $1 == export && $ended == 0 ]] || run "$moe" "${line[@]}"
  left=$(leftovers "$1")
  ((rc == 0)) && [[ $(result) == "${wanted[$1]}" && -z $left ]] && return
  show calls lost "$trial (exit code $ended, $(tail -n 1 stderr.fault)), then the next one $left"
}

# count_calls <command> <names of calls>: a run without a fault. Sets `most`, the number of its calls.
count_calls() {
  rm -rf run count
  cp -r "begun.$1" run
  run env "LD_PRELOAD=$work/fault_files.so" FAULT_UNDER=run FAULT_CALLS="$2" FAULT_COUNT="$work/count" \
    "$moe" "${line[@]}"
  ((rc == 0)) || { echo "$1: $(tail stderr)" >&2; exit 2; }
  most=$(sort -n count | tail -n 1)
}

# Every command, a call at a time: --calls all fails each call in each way, until a command completes
# without meeting it.
call_faults() {
  local command kind at met most tried=0 met_all=0 unmet stayed=0 i all=
  local -A wanted number_of of_kind=(
    [5]=,open,read,write,ftruncate,fsync,close,mmap,rename,unlink,rmdir,mkdir,opendir, # EIO
    [28]=,open,write,ftruncate,fsync,close,rename,mkdir,                               # ENOSPC
    [13]=,open,mmap,rename,unlink,rmdir,mkdir,opendir,                                 # EACCES
    [4]=,open,read,write,fsync,close,                                                  # EINTR
    [short]=,write, [kill]=,open,write,fsync,rename,unlink,rmdir,mkdir,)
  local commands=(save resume import eval export prune) kinds=(5 28 13 4 short kill)
  lost[calls]=0 silent[calls]=0 begin=$SECONDS
  prepare
  for command in "${commands[@]}"; do
    calls_of "$command"
    count_calls "$command" "${of_kind[5]}"
    wanted[$command]=$(result)
    [[ ${wanted[$command]} ]] || { echo "$command has no result" >&2; exit 2; }
    all+=", $most of $command"
  done
  if [[ $calls == all ]]; then
    for command in "${commands[@]}"; do
      calls_of "$command"
      for kind in "${kinds[@]}"; do
        # The calls of ranks and of the thread that writes the status come in any order.
        for ((at = 1, unmet = 0; unmet < 3; ++at)); do
          call_fault "$command" "$kind" $at "${of_kind[$kind]}"
          tried=$((tried + 1)) met_all=$((met_all + met)) unmet=$((met ? 0 : unmet + 1))
        done
      done
    done
  else
    for ((i = 0; i < calls; ++i)); do
      command=${commands[i % ${#commands[@]}]}
      calls_of "$command"
      kind=${kinds[(i + i / ${#commands[@]}) % ${#kinds[@]}]}
      if [[ ! ${number_of[$command,$kind]-} ]]; then
        count_calls "$command" "${of_kind[$kind]}"
        number_of[$command,$kind]=$most
      fi
      ((number_of[$command,$kind] > 0)) || continue # eval and prune write no file
      draw "${number_of[$command,$kind]}"
      call_fault "$command" "$kind" $((drawn + 1)) "${of_kind[$kind]}"
      tried=$((tried + 1)) met_all=$((met_all + met))
    done
  fi
  say calls "$tried" "$met_all met their call (${all:2}), $stayed left a temporary file that the next run removed"
}

# prepare: the folders begun.COMMAND.
prepare() {
  local command
  rm -rf run begun.*
  mkdir run
  make_text run/text 40000
  awk 'BEGIN { for (i = 0; i < 40000; ++i) printf "%c%c", 97 + i * i % 23, 0 }' >run/ids
  cp -r run begun.save
  calls_of save
  run "$moe" "${line[@]}"
  ((rc == 0)) || { tail stderr >&2; exit 2; }
  rm -r run/out run/flight
  "$moe" ckpt export run/save/step-00000004 --format mixtral --out run/model >/dev/null || exit 2
  for command in resume import eval export prune; do cp -r run begun.$command; done
}

# The folder of one rank becomes another, as if a mount was lost or never existed: refused (2), no
# checkpoint can be read (3), or one cannot be written (4).
mount_faults() {
  local i at rank met=0 most
  local resume=("$mpiexec" -n 2 "${train[@]}" --save-interval 2 --out "$work/out")
  lost[mounts]=0 silent[mounts]=0 begin=$SECONDS before=8
  counted "${resume[@]}" >most
  most=$(<most)
  for ((i = 0; i < mounts; ++i)); do
    afresh
    draw "$most"
    rank=$((i % 2)) at=$((drawn + 1))
    ((i % 5 == 0)) && at=1
    run "${fault[@]}" FAULT_KIND=elsewhere FAULT_ELSEWHERE=elsewhere FAULT_RANK=$rank FAULT_AT=$at "${resume[@]}"
    [[ -e met ]] && met=$((met + 1)) && ended mounts "rank $rank from call $at of $most" "2 3 4"
    goes_on mounts "rank $rank from call $at of $most"
  done
  say mounts "$mounts" "$met lost their mount"
}

kill_runs
call_faults
if [[ -x $(command -v "${mpiexec:-none}") ]]; then
  mount_faults
else
  echo "mounts: left out, there is no MPI"
fi
bad=0
for kind in "${!lost[@]}"; do bad=$((bad + lost[$kind] + silent[$kind])); done
exit $((bad > 0))
