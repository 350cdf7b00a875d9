#!/usr/bin/env bash
# Every command under a launcher: messages common to all processes are printed once.
#   bash mpi_commands.sh <moe> <mpiexec> <golden data> <openmpi|mpich>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
mpiexec=$2
data=$3
mpi=$4
cd "$work" || exit 1

# on_three <exit code> <arguments of moe...>
on_three() {
  local code=$1
  shift
  expect "$code" "three processes: $*" "$mpiexec" -n 3 "$moe" "$@"
  what=$*
}

# once <pattern> [<file>]: exactly one line of stdout matches.
once() {
  local file=${2:-stdout} count
  count=$(grep -cE -- "$1" "$file")
  ((count == 1)) || fail "three processes: $what: $count lines of $file with '$1'"
}

# same <arguments...>: the output is the same as without a launcher.
same() {
  "$moe" "$@" >alone
  on_three 0 "$@"
  cmp -s stdout alone || fail "three processes: $*: $(wc -l <stdout) lines, alone $(wc -l <alone)"
}

# refused <part of the line> <arguments...>: exit code 2, reported once.
refused() {
  on_three 2 "${@:2}"
  once "^moe.*$1" stderr
  (($(grep -cE '^moe[ :]' stderr) == 1)) || fail "three processes: $what: $(grep -E '^moe' stderr)"
  [[ ! -s stdout ]] || fail "three processes: $what: wrote to stdout"
}

# Help, and commands that only print. How a process detects that it is one of three depends on the
# MPI, its output does not: under MPICH one command of each kind.
same --help
refused "unknown command 'trian'" trian
if [[ $mpi == openmpi ]]; then
  same --version
  same train --help
  same help train
  same train --print-config
  same bench alltoall --print-config
  same verify --inject help
  for shell in bash zsh fish; do same completion "$shell"; done
  refused "no command"
  refused "unknown flag '--bad'" bench alltoall --bad
  refused "--router is 'mixtrl'" train --router mixtrl
  refused "'none' does not exist" train --data none
  refused "--weights is missing" layer --hf-config "$data/mixtral-1/config.json"
  refused "cannot open 'none.json'" report none.json
  refused "--ranks is 0" doctor --ranks 0
  refused "unknown shell 'zhs'" completion zhs
fi

# Ranks are processes.
sizes=(-b 4K -e 4K -T 0 -n 2)
for call in "alltoall --dispatch direct" "alltoallv --routing zipf:1.2 --dispatch hierarchical --node-size 1" \
  "allreduce --all-reduce library" "allreduce -d bf16" allgather reducescatter memcpy; do
  # shellcheck disable=SC2086
  on_three 0 bench $call "${sizes[@]}" -J rows.json
  once "^# moe bench ${call%% *}: 3 ranks"
  once "^# Out of bounds values : 0 OK"
  (($(grep -c '"op"' rows.json) == 1)) || fail "bench $call: rows: $(cat rows.json)"
  ! grep -qF "needs peer memory" stderr || fail "bench $call: ran staged: $(cat stderr)"
done
refused "direct" bench allreduce --all-reduce direct
on_three 0 bench p2p "${sizes[@]}" -o jsonl
(($(grep -c '"op":"p2p"' stdout) == 9)) || fail "bench p2p: $(grep -c '"op"' stdout) of 9 pairs"
on_three 0 bench layer --tokens 8 --hidden-size 16 --moe-ffn-hidden-size 16 -n 2 -T 0
once "^# moe bench layer: 3 ranks"
once "^ +backward +all "
on_three 0 train "${model[@]}" --ep 1 --steps 2 --out trained
once "^trained 2 steps .* on 3 ranks"
(($(wc -l <trained/metrics.jsonl) == 4)) || fail "train: $(wc -l <trained/metrics.jsonl) lines"
once "^step +2/2 [|] loss" stderr
on_three 0 train "${model[@]}" --ep 3 --steps 2 --out exchanged
plan=(plan --model "$data/../models/mixtral" --gpus 3 --dtype f32 --seq-length 16 --global-batch-size 3)
on_three 0 "${plan[@]}" --calibrate trained/metrics.jsonl --calibrate exchanged/metrics.jsonl --check 2 --steps 2 --repetitions 2
once "^step times: median error"
refused "--ranks is 2, the launcher .* started 3" "${plan[@]}" --gpus 2 --calibrate trained/metrics.jsonl --check 1
case=$data/mixtral-1
on_three 0 layer --hf-config "$case/config.json" --weights "$case" --ep 1 \
  --input "$case/io.safetensors" --output y
once "^mixtral layer"

# One process does the work, for the ranks of this launch.
on_three 0 report trained rows.json --out page.html
once "^wrote page.html"
"$moe" doctor --ranks 3 -o jsonl >alone
verdict=$?
on_three $verdict doctor -o jsonl
once '"subject":"build"'
once '"subject":"launcher"'
diff <(grep -E '"(build|SIMD|memory)"' alone | cut -d , -f 1-2) \
  <(grep -E '"(build|SIMD|memory)"' stdout | cut -d , -f 1-2) >difference ||
  fail "doctor: $(cat difference)"
if grep -q '"MPI ranks"' stdout; then once '3 processes on'; fi
on_three $verdict doctor --seconds 0.3 --save shared -o jsonl
once '"subject":"core speed"'
grep -q '"subject":"links"' stdout || fail "doctor --seconds: no links"

refused "--ranks is 2, the launcher .* started 3" bench alltoall --ranks 2
# A setting in the environment of one host alone.
run "$mpiexec" -n 3 sh -c 'test "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 && export MOE_TRACE=t; exec "$@"' sh \
  "$moe" layer --hf-config "$case/config.json" --weights "$case" --ep 1 --input "$case/io.safetensors" --output z
expect 2 "--trace on one process"
grep -qF "moe layer: --trace is given on some ranks alone" stderr || fail "--trace on one process: $(cat stderr)"
on_three 1 bench alltoall "${sizes[@]}" --fail-if 'time > 0'
once "^moe bench: --fail-if 'time > 0' holds" stderr
once "^# Out of bounds values : 0 OK"
finish
