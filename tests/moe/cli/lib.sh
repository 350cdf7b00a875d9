# Sourced by the end-to-end tests of the program: bash TEST.sh <moe> [<mpiexec> ...].
set -uo pipefail
moe=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# No outside setting has an effect.
for name in ${!MOE_@} ${!OMPI_COMM_@} ${!PMI_@} ${!PMIX_@} ${!SLURM_@} RANK WORLD_SIZE LOCAL_RANK \
  MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID; do
  unset "$name"
done
export NO_COLOR=1
# Open MPI: as root, and with more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
failures=0

fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}

finish() {
  ((failures == 0)) && echo "all passed"
  exit $((failures > 0))
}

# run <command...>: sets what, rc and seconds, leaves $work/stdout and $work/stderr.
run() {
  local begin=$SECONDS
  what=$*
  timeout 300 "$@" >"$work/stdout" 2>"$work/stderr" </dev/null
  rc=$?
  seconds=$((SECONDS - begin))
}

# expect <exit code> <what> [<command...>]: checks the command, or the last run; sets what.
expect() {
  (($# == 2)) || run "${@:3}"
  what=$2
  ((rc == $1)) && return
  fail "$what: exit code $rc, expected $1"
  tail -n 5 "$work/stderr"
}

# says <text> [<file>], matches <extended regular expression> [<file>]: checks the standard output
# of the last run, or a file.
says() { grep -qF -- "$1" "${2:-$work/stdout}" || fail "$what: no '$1' in: $(cat "${2:-$work/stdout}")"; }
matches() { grep -qE -- "$1" "${2:-$work/stdout}" || fail "$what: no '$1' in: $(cat "${2:-$work/stdout}")"; }

# refused <exit code> <part of the line> <arguments of moe...>: one line on standard error, nothing
# on standard output. For cases that need a test's own files; refusals.txt has all others.
refused() {
  expect "$1" "${*:3}" "$moe" "${@:3}"
  (($(wc -l <"$work/stderr") == 1)) || fail "$what: $(wc -l <"$work/stderr") lines on stderr"
  says "$2" "$work/stderr"
  [[ ! -s $work/stdout ]] || fail "$what: wrote to stdout"
}

# await <seconds> <command...>: waits until it succeeds; returns whether it did.
await() {
  local i
  for ((i = 0; i < 50 * $1; ++i)); do
    "${@:2}" >/dev/null 2>&1 && return
    sleep 0.02
  done
  return 1
}

# gone <text>: no process has it in its command line.
gone() { ! pgrep -f -- "$1"; }

# ranks_of <extended regular expression>: ids of the processes moe with it in their command line, not
# of launchers nor watches.
ranks_of() {
  local id
  for id in $(pgrep -f -- "$1"); do
    [[ $(cat "/proc/$id/comm" 2>/dev/null) != moe ]] || echo "$id"
  done
}

# needs_device <none|simulated|any>, the kind of devices of the build: ends the test unless the last
# run, which requested a device, found one.
needs_device() {
  [[ $1 == simulated || $rc != 10 ]] && return
  (($(wc -l <"$work/stderr") == 1)) || fail "no device: $(cat "$work/stderr")"
  [[ $1 == any ]] || says "this build has no CUDA: configure with -DMOE_ENABLE_CUDA=ON" "$work/stderr"
  finish
}

# flags_in <file>: every flag in the text of a --help, one a line.
flags_in() {
  sed -n 's/^  \(-.*\)/\1/p' "$1" | sed 's/  .*//' | grep -oE -- '(^| )--?[A-Za-z0-9][a-z0-9-]*' |
    tr -d ' ' | sort -u
}

# make_text <file> <bytes>: words, the same every time, that a model can learn.
make_text() {
  awk -v bytes="$2" 'BEGIN {
    split("the router sends every token to two experts and each of them answers in turn", word, " ")
    state = 1
    while (length(text) < bytes) {
      state = (state * 1103515245 + 12345) % 2147483648
      text = text word[1 + int(state / 65536) % 14] (state % 7 == 0 ? ".\n" : " ")
    }
    printf "%s", substr(text, 1, bytes)
  }' >"$1"
}

# value <file> <key> [<step>]: a JSON scalar from a step's line of a metrics file, by default from
# the last line, without quotes.
value() { sed -n "${3:+1,+$3}p" "$1" | tail -n 1 | sed -n "s/.*\"$2\":\"\{0,1\}\([^\",}]*\).*/\1/p"; }

# Everything that must have the same bits in two runs.
bits() { grep -oE '"([a-z_]+_hex|weights_xxh3)":"[^"]*"' "$1"; }

# same_weights <folder> <folder>, same_bits: compare two runs at their ends, or in everything that
# must be equal.
same_weights() {
  local hash
  hash=$(value "$1/metrics.jsonl" weights_xxh3)
  [[ -n $hash && $hash == "$(value "$2/metrics.jsonl" weights_xxh3)" ]] || fail "$what: other weights than $1"
}
same_bits() {
  [[ -n $(bits "$1/metrics.jsonl") && $(bits "$1/metrics.jsonl") == "$(bits "$2/metrics.jsonl")" ]] ||
    fail "$what: other bits than $1"
}

# below <a> <b>: a < b, as real numbers.
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a + 0 < b + 0) }'; }

# A model that trains in moments. 40,000 bytes of text suffice: 23,616 to train on.
text=$work/text
make_text "$text" 40000
model=(--data "$text" --num-layers 2 --hidden-size 32 --num-attention-heads 2 --num-experts 4
  --moe-ffn-hidden-size 32 --seq-length 32 --micro-batch-size 2 --micro-batches 6
  --eval-sequences 16 --threads 1)
