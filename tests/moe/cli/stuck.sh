#!/usr/bin/env bash
# A rank that is a thread and does not return: bash stuck.sh <moe>. The others leave at their
# deadline, and the process within 2 s of it, with a line if standard error accepts one.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
freeze=$(realpath "$(dirname "${BASH_SOURCE[0]}")")/freeze.py
cd "$work" || exit 1
: >stderr # each run has its own
train=("$moe" train "${model[@]}" --steps 1000000 --comm-timeout 1 --ranks 3)

ended() { ! kill -0 "$1"; }

# ends <name> <exit code> <pattern of the one line, or ""> <process> <begin in ns>
ends() {
  local name=$1 code=$2 pattern=$3 took
  await 10 ended "$4"
  kill -KILL "$4" 2>/dev/null # it hangs
  wait "$4"
  rc=$?
  took=$((($(date +%s%N) - $5) / 1000000))
  expect "$code" "$name"
  # One more second, since this machine may start processes late.
  ((took < 4000)) || fail "$name: ended after $took ms, expected under 3000"
  [[ -z $pattern ]] || { (($(grep -c "^moe " "$name.err") == 1)) && grep -qE "$pattern" "$name.err"; } ||
    fail "$name: $(grep "^moe " "$name.err")"
  echo "$name: exit code $rc after $took ms"
}

# frozen <name> <threads> <command...>: runs it with a rank that a debugger stops.
frozen() {
  local name=$1 threads=$2 process begin
  "${@:3}" >/dev/null 2>"$name.err" &
  process=$!
  python3 "$freeze" "$process" "$threads" >"$name.begin" &
  await 10 eval "[[ -s $name.begin ]] || ended $!"
  if [[ ! -s $name.begin ]]; then
    echo "$name: left out, a debugger is not allowed"
    kill "$process"
    return
  fi
  begin=$(cut -d ' ' -f 2 "$name.begin")
  ends "$name" 8 "waited .* for rank.*; rank [0-2] did not return, and was left" "$process" "$begin"
}
if command -v python3 >/dev/null; then
  frozen train 5 "${train[@]}" -q # main, what waits for SIGUSR2, ranks
  # On one core, where only ranks are threads. Large enough that ranks are at work, not beginning or
  # ending.
  core=$(taskset -cp $$ | sed 's/.*: \([0-9]*\).*/\1/')
  frozen verify 4 taskset -c "$core" "$moe" verify --router mixtral --hidden-size 256 \
    --moe-ffn-hidden-size 512 --layouts 'ranks=3 transport=local' --comm-timeout 1
fi

# Pipes that are open but not read, and one without a reader.
mkfifo unread unopened
sleep 120 <>unread &
reader=$!
head -c 65000 /dev/zero >unread & # leaves little room
wait $!
begin=$(date +%s%N)
"${train[@]}" -v 2>unread &
ends stderr 8 "" $! "$begin"
for ranks in 1 3; do
  begin=$(date +%s%N)
  "$moe" train "${model[@]}" --steps 2 --comm-timeout 1 --ranks "$ranks" -q --trace unopened \
    2>"trace$ranks.err" >/dev/null &
  ends "trace$ranks" 4 "^moe train: --trace: cannot write 'unopened': .* nobody reads it" $! "$begin"
done
kill "$reader"
finish
