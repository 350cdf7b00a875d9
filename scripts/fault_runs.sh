#!/usr/bin/env bash
# Kills runs that save, fails their calls to the file system, and takes the folder of one rank away:
#
#   scripts/fault_runs.sh [--kills N] [--calls N] [--mounts N] [--seed N] [MOE [MPIEXEC]]
#
# 500, 500 and 200 faults by default, with build/release; mounts need MPI. After each fault a run
# continues without one. Lost: no checkpoint as new as the newest one before the fault verifies, or
# the run that continues does not end with the weights of a run that never stopped. Silent: a run
# ends with 0 and lacks a checkpoint without a warning, or fails without a line or with a code that
# is not the fault's. Prints a line for each kind; faults that lost something or were silent are
# shown with the command that repeats them. Exit code 1 if there are any.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kills=500 calls=500 mounts=200 seed=$RANDOM
while [[ ${1-} == --* ]]; do
  case $1 in
    --kills | --calls | --mounts | --seed) printf -v "${1#--}" %d "${2-}" || exit 2 ;;
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

# The result of every run that continues, and the initial folders of the faults.
run "${train[@]}" --save-interval 4 --ranks 2 --out "$work/out"
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

call_faults() {
  local i at kind codes met=0 most
  local kinds=(5 28 13 24 short) # EIO, ENOSPC, EACCES, EMFILE
  local names=,open,write,fsync,close,mmap,rename,unlink,rmdir,mkdir,opendir,
  local resume=("${train[@]}" --save-interval 2 --ranks 2 --out "$work/out")
  lost[calls]=0 silent[calls]=0 begin=$SECONDS before=8
  counted FAULT_CALLS=$names "${resume[@]}" >most
  most=$(<most)
  for ((i = 0; i < calls; ++i)); do
    afresh
    draw "$most"
    kind=${kinds[i % 5]} at=$((drawn + 1))
    codes=4
    [[ $kind == 13 ]] && codes="2 4"
    run "${fault[@]}" FAULT_CALLS=$names FAULT_KIND="$kind" FAULT_AT=$at "${resume[@]}"
    [[ -e met ]] && met=$((met + 1)) && ended calls "call $at of $most, errno $kind" "$codes"
    goes_on calls "call $at of $most, errno $kind"
  done
  say calls "$calls" "$met met their call"
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
