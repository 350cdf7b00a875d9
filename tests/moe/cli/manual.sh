#!/usr/bin/env bash
# The manual pages: bash manual.sh <moe> <folder of the pages>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
folder=$2
command -v groff >/dev/null || {
  echo "skipped: no groff"
  exit 77
}

# text_of <page>: as a terminal shows it, in plain letters; warnings are failures.
text_of() {
  groff -man -Tascii -ww -P-cbou -rLL=200n "$folder/$1.1" 2>"$work/warnings" >"$work/$1.txt" ||
    fail "$1: groff fails"
  [[ ! -s $work/warnings ]] || fail "$1: $(head -n 3 "$work/warnings")"
}

# section <page> <heading>: its lines.
section() { awk -v wanted="$2" '/^[A-Z]/ { on = $0 == wanted } on' "$work/$1.txt"; }

commands=$("$moe" --help | sed -n 's/^  \([a-z]*\)  *[a-z].*/\1/p' | grep -v '^moe$')
(($(wc -w <<<"$commands") > 5)) || fail "moe --help lists: $commands"
(($(find "$folder" -name '*.1' | wc -l) == $(wc -w <<<"$commands") + 1)) ||
  fail "pages: $(ls "$folder")"

text_of moe
for heading in NAME SYNOPSIS DESCRIPTION COMMANDS "EXIT STATUS" ENVIRONMENT FILES EXAMPLES "SEE ALSO"; do
  [[ -n $(section moe "$heading") ]] || fail "moe: no $heading"
done
for ((code = 0; code <= 10; ++code)); do
  section moe "EXIT STATUS" | grep -E "^ +$code  " >/dev/null || fail "moe: no exit code $code"
done

for command in $commands; do
  page=moe-$command
  text_of "$page"
  section moe COMMANDS | grep -F -- "$page(1)" >/dev/null || fail "moe: no $page"
  for heading in NAME SYNOPSIS DESCRIPTION OPTIONS "EXIT STATUS" EXAMPLES "SEE ALSO"; do
    [[ -n $(section "$page" "$heading") ]] || fail "$page: no $heading"
  done
  expect 0 "$command --help" "$moe" "$command" --help
  # Every flag, with its letter.
  while IFS= read -r flag; do
    section "$page" OPTIONS | grep -E -- "^ +(.*, )?$flag(,| |\$)" >/dev/null || fail "$page: no $flag"
  done < <(flags_in "$work/stdout")
  # Every exit code that the help names.
  help_codes=$(tr '\n' ' ' <"$work/stdout" | grep -oE 'Exit codes: .*' | grep -oE '(^|: |, )[0-9]+ ' |
    tr -dc '0-9\n' | tr '\n' ' ')
  [[ $help_codes == "0 "* ]] || fail "$command --help: exit codes '$help_codes'"
  for code in $help_codes; do
    section "$page" "EXIT STATUS" | grep -E "^ +$code  " >/dev/null || fail "$page: no exit code $code"
  done
  # Every example.
  while IFS= read -r line; do
    section "$page" EXAMPLES | grep -F -- "${line#  }" >/dev/null || fail "$page: no example '$line'"
  done < <(grep -E '^  (moe|mpirun) ' "$work/stdout")
done
[[ -n $(section moe-train FILES) ]] || fail "moe-train: no FILES"
[[ -n $(section moe-train ENVIRONMENT) ]] || fail "moe-train: no ENVIRONMENT"
[[ -n $(section moe-bench OPERATIONS) ]] || fail "moe-bench: no OPERATIONS"
finish
