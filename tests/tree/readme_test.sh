#!/usr/bin/env bash
# Checks the README and the pages of its examples: programs and build files equal those that are
# built and run, and commands run.
#
#   readme_test.sh SOURCE_DIR [FOLDER_OF_MOE [MPIEXEC]]
#
# In `sh` blocks, lines that start with `moe` are run, and `mpirun` lines if MPI is given; training
# takes two steps. `moe verify` without a flag is left to cli_verify. Scripts, which take minutes,
# must exist, and so must presets of `cmake` lines; anything else is refused.
set -uo pipefail
source_dir=$(cd "$1" && pwd) bin_dir=${2-} mpiexec=${3-}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
failed=0

# The text of all blocks of a language in a page, each followed by an end marker.
blocks() { # page, language, [end of a block]
  awk -v fence="\`\`\`$2" -v end="${3-}" \
    '$0 == fence {on = 1; next} on && $0 == "```" {on = 0; printf "%s", end} on' "$source_dir/$1"
}

same() { # page, language, file
  if ! diff -u "$source_dir/$3" <(blocks "$1" "$2") >diff.txt; then
    echo "the $2 block of $1 is not $3:"
    cat diff.txt
    failed=1
  fi
}
same docs/first_layer.md cpp examples/first_layer.cc
same docs/first_layer.md cmake tests/tree/consumer/CMakeLists.txt

# The README's excerpts are lines of that program.
program=$(<"$source_dir/examples/first_layer.cc")
excerpts=0
while IFS= read -r -d $'\x01' excerpt; do
  excerpts=$((excerpts + 1))
  [[ $program == *"$excerpt"* ]] && continue
  printf 'README: not in examples/first_layer.cc:\n%s' "$excerpt"
  failed=1
done < <(blocks README.md cpp $'\x01')

run() { # page, command
  local command
  command=$(sed -E 's/--steps [0-9]+/--steps 2/' <<<"$2")
  echo "+ $command"
  if ! timeout 120 bash -c "$command" >out.txt 2>&1 </dev/null; then
    echo "$1: this command fails: $2"
    tail -n 20 out.txt
    failed=1
  fi
}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
commands=0
[[ $bin_dir ]] && PATH=$bin_dir:$PATH
for page in README.md docs/tour.md; do
  while IFS= read -r line; do
    line=${line%%  #*}
    line=${line%"${line##*[! ]}"}
    [[ -z ${line// /} || $line == \#* ]] && continue
    commands=$((commands + 1))
    case "$line" in
      scripts/*)
        [[ -x $source_dir/${line%% *} ]] && continue
        echo "$page: no such script: $line"
        failed=1
        ;;
      cmake\ *)
        for preset in $(grep -oE -- '--preset [a-z]+' <<<"$line" | cut -d ' ' -f 2 | sort -u); do
          grep -q "\"name\": \"$preset\"" "$source_dir/CMakePresets.json" && continue
          echo "$page: no such preset: $preset"
          failed=1
        done
        ;;
      "moe verify" | "mpirun -n 4 moe verify") ;;
      moe\ *) [[ -z $bin_dir ]] || run "$page" "$line" ;;
      mpirun\ *) [[ -z $bin_dir || -z $mpiexec ]] || run "$page" "${line/#mpirun/$mpiexec}" ;;
      *)
        echo "$page: this test does not know how to run: $line"
        failed=1
        ;;
    esac
  done < <(blocks $page sh)
done
if ((commands < 8 || excerpts < 2)); then
  echo "README and docs/tour.md show $commands commands and $excerpts excerpts, expected 8 and 2 at least"
  failed=1
fi

# Links between pages must lead to a file, and to one of its headings. A heading's anchor is its
# letters, digits, `-` and `_` in lower case, with `-` for a space.
cd "$source_dir"
prose() { awk '/^ *```/ {code = !code; next} !code' "$1"; }
anchors() {
  prose "$1" | sed -nE 's/^#+ //p' | sed -E 's/\[([^]]*)\]\([^)]*\)/\1/g' | tr '[:upper:]' '[:lower:]' |
    LC_ALL=C sed -E 's/[^a-z0-9 _-]//g; s/ /-/g'
}
for page in *.md docs/*.md tests/golden/README.md; do
  while IFS= read -r link; do
    [[ $link == http* ]] && continue
    file=$page
    [[ ${link%%#*} ]] && file=$(dirname "$page")/${link%%#*}
    if [[ ! -e $file ]]; then
      echo "$page: no such file: $link"
    elif [[ $link == *#* ]] && ! anchors "$file" | grep -qxF -- "${link#*#}"; then
      echo "$page: no such heading: $link"
    else
      continue
    fi
    failed=1
  done < <(prose "$page" | grep -oE '\]\([^)]+\)' | sed 's/^](\(.*\))$/\1/')
done
exit $failed
