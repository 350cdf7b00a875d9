#!/usr/bin/env bash
# What bash offers with the script of `moe completion bash`, as readline asks for it.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$(dirname "${BASH_SOURCE[0]}")/completion_lib.sh"

expect 0 "completion bash" "$moe" completion bash
cp "$work/stdout" "$work/moe.bash"
bash -n "$work/moe.bash" || fail "bash -n"
source "$work/moe.bash"
[[ $(complete -p moe) == "complete -F _moe moe" ]] || fail "registered as: $(complete -p moe)"

offers() {
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  _moe
  offered=$(printf '%s\n' ${COMPREPLY[@]+"${COMPREPLY[@]}"})
}

common_cases

# Files, folders, and paths as arguments.
includes "runs run.json" moe train --data ru
wants "runs" moe train --out ru
includes "runs run.json" moe report ru
includes "runs run.json" moe report run.json ru
includes "run.json" moe report --compare run.json ru
includes "--title" moe report --compare run.json runs --ti
offers moe train --data two
[[ $offered == "two words.txt" ]] || fail "a name with a space: '$offered'"
includes "runs run.json" moe bench alltoall -J ru

# A value behind '=', which readline makes a word of its own.
wants "switch" moe train --router = sw
includes "mixtral switch" moe train --router =
includes "--steps" moe train --router = switch --ste
# ':' too; what follows is free.
wants "" moe bench alltoallv --routing zipf : 1
includes "--seed" moe bench alltoallv --routing zipf : 1.2 --se
wants "zipf: zero_rank" moe bench alltoallv --routing z

# With nothing typed: what must come next, else the flags.
includes "--data --help -h -q" moe train ""
includes "--minbytes -b" moe bench alltoall ""
wants "bash fish zsh" moe completion ""

# The names of files are words, whatever is in them.
touch "$work/ru\$(touch bad)"
includes "run.json" moe train --data ru
[[ ! -e $work/bad ]] || fail "a file's name was run"
finish
