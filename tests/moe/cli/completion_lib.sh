# Sourced after lib.sh by the tests of completion, one for each shell. They define
#   offers <word...>: sets `offered`, what the shell offers for the last word, one a line.

skip() {
  echo "skipped: $*"
  exit 77
}

commands=$("$moe" --help | sed -n '/^$/d; s/^  \([a-z]*\)  *[a-z].*/\1/p' | grep -v '^moe$')

# flags_of <command>: every flag that its --help lists.
flags_of() {
  "$moe" "$1" --help >"$work/help"
  flags_in "$work/help"
}

# wants <expected words> <word...>: exactly these, in any order.
wants() {
  local expected=$1 found
  shift
  offers "$@"
  found=$(sort <<<"$offered" | tr '\n' ' ')
  found=${found% }
  expected=$(tr ' ' '\n' <<<"$expected" | sort | tr '\n' ' ')
  expected=${expected% }
  [[ $found == "$expected" ]] || fail "'$*': offered '$found', expected '$expected'"
}

# includes <expected words> <word...>: these, and others perhaps.
includes() {
  local word
  offers "${@:2}"
  for word in $1; do
    grep -qxF -- "$word" <<<"$offered" || fail "'${*:2}': '$word' is not offered"
  done
}

# The cases that every shell must pass. In a folder with runs/, run.json and "two words.txt".
common_cases() {
  local command flag
  cd "$work" && mkdir runs && touch run.json "two words.txt" || exit 1
  (($(wc -w <<<"$commands") > 5)) || fail "moe --help lists: $commands"

  includes "$commands help" moe ""
  wants "train" moe tr
  wants "" moe nothing
  includes "$commands" moe help ""
  wants "alltoall alltoallv" moe bench allto
  includes "alltoall gemm layer p2p" moe bench ""
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
}
