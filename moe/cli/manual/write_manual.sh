#!/usr/bin/env bash
# Run by the build: write_manual.sh HELP2MAN MOE FOLDER writes moe.1 and a page per command there.
set -euo pipefail
help2man=$1 moe=$2 folder=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
programs=$(mktemp -d) # help2man names a page after the program that it runs
trap 'rm -rf "$programs"' EXIT

page() { # name, summary, command
  printf '#!/bin/sh\n"%s" %s --help | awk -f "%s"\n' "$moe" "$3" "$here/help2man.awk" >"$programs/$1"
  chmod +x "$programs/$1"
  "$help2man" --no-info --name "$2" --version-string "$version" --manual "Commands of moe" "${@:4}" \
    --output "$folder/$1.1" "$programs/$1"
}

version=$("$moe" --version | sed -n "1s/^moe //p") # with its name, all pages would be named moe
page moe "mixture-of-experts layers whose experts are spread over ranks" "" --include "$here/moe.h2m"
while IFS=$'\t' read -r command summary; do
  [[ $command == help || $command == -* ]] || page "moe-$command" "$summary" "$command" --include "$here/command.h2m"
done < <("$moe" __complete "")
