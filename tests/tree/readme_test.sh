#!/usr/bin/env bash
# What the README shows is true: its program and its CMakeLists.txt are the files that are built and
# run, and its commands run.
#
#   readme_test.sh SOURCE_DIR [FOLDER_OF_MOE [MPIEXEC]]
#
# In `sh` blocks, lines that start with `moe` are run, but for `moe verify` alone, which cli_verify
# runs, and `mpirun` lines where MPI was given; the two scripts take minutes, so they must only exist;
# anything else is refused.
set -uo pipefail
source_dir=$(cd "$1" && pwd) bin_dir=${2-} mpiexec=${3-}
readme=$source_dir/README.md
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
failed=0

# The text of all blocks of a language.
blocks() { awk -v fence="\`\`\`$1" '$0 == fence {on = 1; next} $0 == "```" {on = 0} on' "$readme"; }

same() { # language, file
  if ! diff -u "$source_dir/$2" <(blocks "$1") >diff.txt; then
    echo "README's $1 block is not $2:"
    cat diff.txt
    failed=1
  fi
}
same cpp examples/first_layer.cc
same cmake tests/tree/consumer/CMakeLists.txt

run() {
  echo "+ $*"
  if ! timeout 120 bash -c "$*" >out.txt 2>&1 </dev/null; then
    echo "README: this command fails: $*"
    tail -n 20 out.txt
    failed=1
  fi
}

commands=0
[[ $bin_dir ]] && PATH=$bin_dir:$PATH
while IFS= read -r line; do
  line=${line%%  #*}
  line=${line%"${line##*[! ]}"}
  [[ -z ${line// /} || $line == \#* ]] && continue
  commands=$((commands + 1))
  case "$line" in
    scripts/*)
      [[ -x $source_dir/${line%% *} ]] && continue
      echo "README: no such script: $line"
      failed=1
      ;;
    "moe verify") ;;
    moe\ *) [[ -z $bin_dir ]] || run "$line" ;;
    mpirun\ *) [[ -z $bin_dir || -z $mpiexec ]] || run "${line/#mpirun/$mpiexec}" ;;
    *)
      echo "README: this test does not know how to run: $line"
      failed=1
      ;;
  esac
done < <(blocks sh)
if ((commands < 2)); then
  echo "README shows $commands commands, expected scripts/demo.sh and scripts/test.sh at least"
  failed=1
fi

# Links between pages lead somewhere.
cd "$source_dir"
for page in README.md CONTRIBUTING.md docs/*.md; do
  while IFS= read -r link; do
    [[ $link == http* || -e $(dirname "$page")/${link%%#*} || ${link%%#*} == "" ]] && continue
    echo "$page: no such file: $link"
    failed=1
  done < <(awk '/^```/ {code = !code} !code' "$page" | grep -oE '\]\([^)]+\)' | sed 's/^](\(.*\))$/\1/')
done
exit $failed
