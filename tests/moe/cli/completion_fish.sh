#!/usr/bin/env bash
# What fish offers with the script of `moe completion fish`.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$(dirname "${BASH_SOURCE[0]}")/completion_lib.sh"
command -v fish >/dev/null || skip "no fish"
export HOME=$work/home
mkdir "$HOME"

expect 0 "completion fish" "$moe" completion fish
cp "$work/stdout" "$work/moe.fish"
fish -n "$work/moe.fish" || fail "fish -n"

# fish describes what it offers behind a tab.
offers() {
  local line
  line=$(printf '%q ' "${@:1:$#-1}")${*: -1}
  offered=$(fish --no-config -c \
    'source $argv[1]; complete -C $argv[2]' "$work/moe.fish" "$line" | cut -f 1)
}

common_cases

includes "runs/ run.json" moe train --data ru
wants "runs/" moe train --out ru
includes "runs/ run.json" moe report run.json ru
wants "--router=switch" moe train --router=sw
grep -q "experts of a layer in total, never per rank'" "$work/moe.fish" ||
  fail "no description of --num-experts"
finish
