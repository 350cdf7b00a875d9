#!/usr/bin/env bash
# The manual pages: bash manual.sh <moe> <folder of the pages>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
folder=$2
command -v groff >/dev/null || {
  echo "skipped: no groff"
  exit 77
}

# text_of <page>: as a terminal shows it, without formatting; warnings are failures.
text_of() {
  groff -man -Tascii -ww -P-cbou -rLL=200n "$folder/$1.1" 2>"$work/warnings" >"$work/$1.txt" ||
    fail "$1: groff fails"
  [[ ! -s $work/warnings ]] || fail "$1: $(head -n 3 "$work/warnings")"
}

# section <page> <heading>: its lines.
section() { awk -v wanted="$2" '/^[A-Z]/ { on = $0 == wanted } on' "$work/$1.txt"; }

text_of moe
for heading in NAME SYNOPSIS DESCRIPTION "EXIT STATUS" ENVIRONMENT FILES EXAMPLES; do
  [[ -n $(section moe "$heading") ]] || fail "moe: no $heading"
done
while IFS=$'\t' read -r command summary; do
  [[ $command != help && $command != -* ]] || continue
  page=moe-$command
  text_of "$page"
  section "$page" NAME | grep -xF -- "       $page - $summary" >/dev/null || fail "$page: NAME: $(section "$page" NAME)"
  for heading in SYNOPSIS DESCRIPTION OPTIONS "EXIT STATUS" EXAMPLES "SEE ALSO"; do
    [[ -n $(section "$page" "$heading") ]] || fail "$page: no $heading"
  done
  "$moe" "$command" --help >"$work/help"
  while IFS= read -r flag; do
    section "$page" OPTIONS | grep -E -- "^ +(.*, )?$flag(,| |\$)" >/dev/null || fail "$page: no $flag"
  done < <(flags_in "$work/help")
  while IFS= read -r line; do
    section "$page" EXAMPLES | tr -s ' \n' ' ' | grep -F -- "$(tr -s ' ' <<<"${line%\\}")" >/dev/null ||
      fail "$page: no example '$line'"
  done < <(grep -E '^  (moe|mpirun) ' "$work/help" | sed 's/^  /$ /')
done < <("$moe" __complete "")
[[ -n $(section moe-train FILES) ]] || fail "moe-train: no FILES"
[[ -n $(section moe-train ENVIRONMENT) ]] || fail "moe-train: no ENVIRONMENT"
(($(find "$folder" -name '*.1' | wc -l) > 10)) || fail "pages: $(ls "$folder")"
finish
