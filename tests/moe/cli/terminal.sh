#!/usr/bin/env bash
# Colours, variables without effect, and the output of moe doctor: bash terminal.sh <moe>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$work" || exit 1

# Colours, also into a pipe on request, and then from every command.
red=$'\033[31m' yellow=$'\033[33m' cyan=$'\033[36m'
for command in train sweep bench layer verify report ckpt doctor; do
  run "$moe" "$command" --nonsense --color always
  says "${red}moe $command:" "$work/stderr"
done
MOE_STEP=1 MOE_WARMUP_ITERS=2 expect 0 "--color always" "$moe" train "${model[@]}" --steps 1 --color always
says "${cyan}step " "$work/stderr"
says "moe train: ${yellow}warning:" "$work/stderr"
# MOE_WARMUP_ITERS belongs to moe bench.
(($(grep -c warning "$work/stderr") == 1)) || fail "variables: $(grep warning "$work/stderr")"
says "MOE_STEP sets nothing; did you mean 'MOE_STEPS'?" "$work/stderr"
MOE_STEP=1 run "$moe" train "${model[@]}" --steps 1
[[ $(cat "$work/stdout" "$work/stderr") != *$'\033'* ]] || fail "a pipe has colours unasked"

run "$moe" doctor
((rc == 0 || rc == 1)) || fail "doctor: exit code $rc"
matches '^[a-z]* *cores '
run "$moe" doctor -o csv -oe jsonl
head -n 1 "$work/stdout" | grep -qx 'verdict,subject,finding,remedy' || fail "doctor -o csv: no header"
grep -q '^{"verdict":"[a-z]*","subject":"cores"' "$work/stderr" || fail "doctor -oe jsonl: no cores"
finish
