#!/usr/bin/env bash
# Completions in a shell with the script of `moe completion SHELL`: bash completion.sh <moe>
# bash|zsh|fish
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
shell=$2
driver=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/complete.zsh
command -v "$shell" >/dev/null || {
  echo "skipped: no $shell"
  exit 77
}
cd "$work" && mkdir runs home talk && touch run.json "two words.txt" || exit 1
talk=$work/talk # files shared with complete.zsh
export HOME=$work/home

expect 0 "completion $shell" "$moe" completion "$shell"
mkdir bin && ln -s "$moe" bin/moe # the script calls moe
export PATH=$work/bin:$PATH
script=$work/_moe
cp stdout "$script"
"$shell" -n "$script" || fail "$shell -n"
folder=runs # in the form that the shell offers
commands=$("$moe" --help | sed -n '/^$/d; s/^  \([a-z]*\)  *[a-z].*/\1/p' | grep -v '^moe$')

# offers <word...>: sets `offered` to the completions of the last word, one a line.
case $shell in
  bash) # as readline requests it
    source "$script"
    [[ $(complete -p moe) == "complete -F _moe moe" ]] || fail "registered as: $(complete -p moe)"
    offers() {
      COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
      _moe
      offered=$(printf '%s\n' ${COMPREPLY[@]+"${COMPREPLY[@]}"})
    }
    ;;
  fish) # which puts descriptions after a tab
    folder=runs/
    offers() {
      offered=$(fish --no-config -c 'source $argv[1]; complete -C $argv[2]' "$script" \
        "$(printf '%q ' "${@:1:$#-1}")${*: -1}" | cut -f 1)
    }
    ;;
  zsh) # interactive, on a terminal of its own
    answer() { # waits for the answer
      await 30 test -e "$talk/answer" && return
      fail "zsh does not answer: $(cat "$talk/query" 2>/dev/null)"
      finish
    }
    offers() {
      printf '%s' "$(printf '%q ' "${@:1:$#-1}")${*: -1}" >"$talk/query"
      rm -f "$talk/answer"
      echo >&"${zsh[1]}"
      answer
      offered=$(sed 's/=$//' "$talk/answer" | sort -u)
    }
    coproc zsh { exec zsh -f "$driver" "$script" "$talk" 2>"$talk/errors"; }
    answer
    ;;
esac

# flags_of <command>: every flag that its --help lists.
flags_of() {
  "$moe" "$1" --help >"$work/help"
  flags_in "$work/help"
}

# wants <expected words> <word...>: expects exactly these, in any order.
wants() {
  local expected found
  offers "${@:2}"
  found=$(sort <<<"$offered" | xargs)
  expected=$(tr ' ' '\n' <<<"$1" | sort | xargs)
  [[ $found == "$expected" ]] || fail "'${*:2}': offered '$found', expected '$expected'"
}

# includes <expected words> <word...>: expects these, and perhaps others.
includes() {
  local word
  offers "${@:2}"
  for word in $1; do
    grep -qxF -- "$word" <<<"$offered" || fail "'${*:2}': '$word' is not offered"
  done
}

(($(wc -w <<<"$commands") > 5)) || fail "moe --help lists: $commands"
[[ $("$moe" __complete train --out "") == ":folders" ]] || fail "what asks for folders"
[[ $("$moe" __complete train --router=mixt) == "--router=mixtral" ]] || fail "a value behind '='"
includes "$commands help" moe ""
wants "train" moe tr
wants "" moe nothing
includes "$commands" moe help ""
wants "alltoall alltoallv" moe bench allto
includes "alltoall layer p2p" moe bench ""
wants "zsh" moe completion z
wants "prune" moe ckpt pr
includes "run.json" moe ckpt verify ru

# `layer` is a command and an operation; here it is the latter.
wants "--minbytes" moe bench layer --minb
wants "--hf-config" moe layer --hf

wants "mixtral" moe train --router mix
wants "deepseek-v2 deepseek-v3" moe verify --router deep
wants "layout-invariant" moe train --steps 3 --numerics l
wants "jsonl json" moe bench alltoall -o js
wants "jsonl json" moe doctor -oe js
wants "1 0" moe bench alltoall -c ""
wants "none" moe train --capacity-factor ""
wants "gradient-scale-by-ep group-mask-zero" moe verify --inject g
wants "" moe train --steps ""

for command in $commands; do
  includes "$(flags_of "$command")" moe "$command" -
done
(($(flags_of train | wc -l) > 50)) || fail "train --help lists $(flags_of train | wc -l) flags"

# Files and folders.
includes "$folder run.json" moe train --data ru
wants "$folder" moe train --out ru
includes "$folder run.json" moe report run.json ru

case $shell in
  bash)
    includes "runs run.json" moe report ru
    includes "run.json" moe report --compare run.json ru
    includes "--title" moe report --compare run.json runs --ti
    offers moe train --data two
    [[ $offered == "two words.txt" ]] || fail "a name with a space: '$offered'"
    includes "runs run.json" moe bench alltoall -J ru

    # A value after '=', which readline makes a word of its own.
    wants "switch" moe train --router = sw
    includes "mixtral switch" moe train --router =
    includes "--steps" moe train --router = switch --ste
    # The same for ':'; the text after it is free.
    wants "" moe bench alltoallv --routing zipf : 1
    includes "--seed" moe bench alltoallv --routing zipf : 1.2 --se
    wants "zipf: zero_rank" moe bench alltoallv --routing z

    # Without a prefix: required words, else the flags.
    includes "--data --help -h -q" moe train ""
    includes "--minbytes -b" moe bench alltoall ""
    wants "bash fish zsh" moe completion ""

    # The names of files are single words, whatever they contain.
    touch "ru\$(touch bad)"
    includes "run.json" moe train --data ru
    [[ ! -e bad ]] || fail "a file's name was run"
    ;;
  fish)
    wants "--router=switch" moe train --router=sw
    includes "--data=run.json" moe train --data=ru
    fish --no-config -c 'source $argv[1]; complete -C "moe train --num-exp"' "$script" |
      grep -q "experts of a layer in total, never per rank\$" || fail "no description of --num-experts"
    ;;
  zsh)
    wants "--router=switch" moe train --router=sw
    # As an autoloaded function: the file is its body.
    mkdir functions
    cp "$script" functions/_moe
    found=$(zsh -f -c 'fpath=($1 $fpath); autoload -U compinit; compinit -u -D; print $_comps[moe]' \
      zsh "$work/functions")
    [[ $found == _moe ]] || fail "compinit finds '$found' for moe"
    ;;
esac
finish
