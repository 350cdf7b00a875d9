#!/usr/bin/env bash
# What zsh offers with the script of `moe completion zsh`, in an interactive shell on a terminal of
# its own.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$(dirname "${BASH_SOURCE[0]}")/completion_lib.sh"
command -v zsh >/dev/null || skip "no zsh"
driver=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/complete.zsh

expect 0 "completion zsh" "$moe" completion zsh
script=$work/_moe
cp "$work/stdout" "$script"
zsh -n "$script" || fail "zsh -n"

answer() { # waits for it
  for ((i = 0; i < 600; ++i)); do
    [[ -e $talk/answer ]] && return
    sleep 0.05
  done
  fail "zsh does not answer: $(cat "$talk/query" 2>/dev/null)"
  finish
}

offers() {
  printf '%q ' "${@:1:$#-1}" >"$talk/query"
  printf '%s' "${*: -1}" >>"$talk/query"
  rm -f "$talk/answer"
  echo >&"${shell[1]}"
  answer
  offered=$(sed 's/=$//' "$talk/answer" | sort -u)
}

talk=$(mktemp -d)
trap 'rm -rf "$work" "$talk"' EXIT
cd "$work" || exit 1
coproc shell { exec zsh -f "$driver" "$script" "$talk" 2>"$talk/errors"; }
answer

common_cases
includes "runs run.json" moe train --data ru
wants "runs" moe train --out ru
includes "runs run.json" moe report run.json ru
wants "switch" moe train --router=sw

# As an autoloaded function: the file is its body.
mkdir "$work/functions"
cp "$script" "$work/functions/_moe"
found=$(zsh -f -c 'fpath=($1 $fpath); autoload -U compinit; compinit -u -D; print $_comps[moe]' \
  zsh "$work/functions")
[[ $found == _moe ]] || fail "compinit finds '$found' for moe"
finish
