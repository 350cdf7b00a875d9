#!/usr/bin/env bash
# Trains the reference model at every layout and compares every loss and the final weights, bit by
# bit, with one rank's:
#
#   scripts/invariance_all.sh [--quick] [flags of moe train...]
#
# Layouts: ranks 1 2 3 4 5 6 8 x every expert-parallel size that divides them x transport (local,
# mpi) x dispatch (staged, direct, hierarchical) x overlap degree (1, 4) x threads per rank (1, 2);
# staged without overlap x ZeRO (1, 2, 3); staged with overlap x what is recomputed x ZeRO (0, 3);
# pipelines of 2, 3 and 4 stages x schedule x expert-parallel size x ZeRO (0, 2, 3) x what is
# recomputed; runs that are saved after two steps at one layout and resumed at another, in 61 pairs; and,
# of another model, every number of tensor-parallel ranks, some in stages, some with shared experts;
# and by `moe verify` every combination that fits 16 ranks of tensor, expert-tensor, expert and data
# parallelism, stages, chunks, schedule, ZeRO, what is recomputed and offload, which takes longest.
# --quick varies each axis by itself around one layout. Uses build/release; MPI runs are left out if
# the build has no MPI. The last line is "N layouts equal, N differ or fail".
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec </dev/null

quick=
if [[ ${1-} == --quick ]]; then
  quick=1
  shift
fi
extra=("$@")

dir=build/release
moe=$dir/moe/cli/moe
if [[ ! -x $moe ]]; then
  echo "invariance: no $moe: run cmake --preset release && cmake --build --preset release" >&2
  exit 2
fi
mpiexec=$(sed -n 's/^MOE_MPIEXEC:FILEPATH=//p' "$dir/CMakeCache.txt")
transports=(local)
if grep -q '^MOE_ENABLE_MPI:[A-Z]*=OFF' "$dir/CMakeCache.txt" || [[ $mpiexec == *NOTFOUND || -z $mpiexec ]]; then
  echo "invariance: no MPI in $dir, local ranks only"
else
  transports+=(mpi)
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The text: a copy, since pages may be edited during the run.
mkdir "$work/text"
cp -r README.md CONTRIBUTING.md LICENSE docs "$work/text"
# Small, but with uneven experts per rank and, at most rank counts, ranks without a micro-batch.
model=(--data "$work/text"
  --numerics layout-invariant --num-experts 6 --topk 2 --num-layers 4 --moe-layer-freq 2 --hidden-size 48
  --moe-ffn-hidden-size 40 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2
  --micro-batches 7 --steps 4 --lr 0.003 --moe-aux-loss-coeff 0.01 --capacity-factor 1.25 --seed 7)

# Everything that must be equal: every hexadecimal number of every step, the last held-out loss, and
# the weights; not the losses at the end of a stopped run and at the start of a resumed one.
series() {
  grep -oE '"([a-z_]+_hex|weights_xxh3)": *"[^"]*"' "$1" | grep -v val_loss_before | tr -d ' ' |
    awk '/val_loss_hex/ {last = $0; next} {print} END {print last}'
}

equal=0 bad=0
oracle=oracle # what runs of the model are compared with

# at <ranks> <ep> <transport> <dispatch> <overlap> <threads>: sets name, launch and flags of a
# layout.
at() {
  local ranks=$1 ep=$2 transport=$3 dispatch=$4 overlap=$5 threads=$6 node_size=1 n
  name="ranks $ranks ep $ep $transport $dispatch overlap $overlap threads $threads"
  launch=()
  flags=(--ep "$ep" --dispatch "$dispatch" --moe-overlap-degree "$overlap" --threads "$threads")
  if [[ $dispatch == hierarchical ]]; then
    for ((n = 2; n <= ep; ++n)); do
      ((ep % n == 0)) && node_size=$n && break
    done
    flags+=(--node-size "$node_size")
  fi
  if [[ $transport == mpi ]]; then
    launch=("$mpiexec" -n "$ranks")
    flags+=(--backend mpi)
  else
    flags+=(--ranks "$ranks")
  fi
}

# trained <flags...>: a run in the layout that was set last; its metrics are in $work/run.
trained() {
  timeout 300 "${launch[@]}" "$moe" train "${model[@]}" "${flags[@]}" --out "$work/run" \
    "${extra[@]}" "$@" >"$work/log" 2>&1 && return
  echo "FAIL   $name"
  tail -n 5 "$work/log"
  bad=$((bad + 1))
  return 1
}

compare() {
  series "$work/run/metrics.jsonl" >"$work/series"
  if [[ ! -f $work/$oracle ]]; then
    cp "$work/series" "$work/$oracle"
    if ! grep -q weights_xxh3 "$work/$oracle" || ! grep -q loss_hex "$work/$oracle"; then
      echo "invariance: metrics.jsonl of one rank has no loss_hex or no weights_xxh3" >&2
      exit 1
    fi
  fi
  if cmp -s "$work/$oracle" "$work/series"; then
    echo "equal  $name"
    equal=$((equal + 1))
  else
    echo "DIFFER $name"
    diff "$work/$oracle" "$work/series" | head -n 4
    bad=$((bad + 1))
  fi
}

layout() { # arguments of at
  rm -rf "$work/run"
  at "$@"
  trained && compare
}

zero() { # ZeRO stage, ranks, ep, transport
  rm -rf "$work/run"
  at "$2" "$3" "$4" staged 1 1
  name+=" zero $1"
  flags+=(--zero "$1" --bucket-size-mb 0.05)
  trained && compare
}

tensor() { # TP, ranks, ep, transport, ZeRO stage, PP, ETP: of a model with trees, and heads for 8 ranks
  local oracle=tensor_oracle
  rm -rf "$work/run"
  at "$2" "$3" "$4" staged 1 1
  name+=" tp $1 etp ${7-1} zero ${5-0} pp ${6-1}"
  flags+=(--tp "$1" --etp "${7-1}" --zero "${5-0}" --pp "${6-1}" --bucket-size-mb 0.05)
  trained --tensor-leaves 8 --num-attention-heads 8 --moe-shared-expert-intermediate-size 128 \
    --dense-ffn-hidden-size 128 && compare
}

recomputed() { # what is recomputed, ZeRO stage, arguments of at
  rm -rf "$work/run"
  at "${@:3}"
  name+=" recompute $1 zero $2"
  flags+=(--recompute "$1" --zero "$2" --bucket-size-mb 0.05)
  trained && compare
}

offloaded() { # ZeRO stage, ranks, ep, transport
  rm -rf "$work/run"
  mkdir -p "$work/scratch"
  at "$2" "$3" "$4" staged 1 1
  name+=" zero $1 offload file"
  flags+=(--zero "$1" --bucket-size-mb 0.05 --offload "optimizer:file=$work/scratch")
  trained && compare
}

pipeline() { # stages, chunks, schedule, ZeRO stage, what is recomputed, ranks, ep, transport
  rm -rf "$work/run"
  at "$6" "$7" "$8" staged 1 1
  name+=" pp $1 vp $2 $3 zero $4 recompute $5"
  flags+=(--pp "$1" --vp "$2" --pipeline-schedule "$3" --zero "$4" --bucket-size-mb 0.05
    --recompute "$5")
  trained && compare
}

resumed() { # ranks and ep of the first two steps, then of the others; ZeRO and pp of both
  rm -rf "$work/run" "$work/ckpt"
  at "$1" "$2" local staged 1 1
  trained --steps 2 --lr-decay-steps 4 --save "$work/ckpt" --zero "${5-0}" --pp "${7-1}" || return
  at "$3" "$4" local staged 1 1
  name="ranks $1 ep $2 zero ${5-0} pp ${7-1}, resumed by $name zero ${6-0} pp ${8-1}"
  trained --save "$work/ckpt" --resume auto --zero "${6-0}" --pp "${8-1}" && compare
}

layout 1 1 local staged 1 1 # the oracle
if [[ $quick ]]; then
  for ranks in 2 3 4 5 6 8; do layout $ranks $ranks local staged 1 1; done
  layout 6 1 local staged 1 1
  layout 6 3 local staged 1 1
  layout 4 4 local direct 1 1
  layout 4 4 local hierarchical 1 1
  layout 2 2 local staged 4 1
  layout 2 2 local staged 1 2
  zero 1 8 4 local
  zero 2 3 1 local
  zero 3 8 4 local
  zero 3 3 1 local
  recomputed layer 0 4 2 local staged 4 1
  recomputed layer 3 4 2 local staged 4 1
  recomputed activations 3 4 2 local staged 4 1
  offloaded 0 3 1 local
  offloaded 1 8 4 local
  offloaded 3 4 2 local
  tensor 1 1 1 local
  for tp in 2 3 4 8; do tensor $tp $tp $tp local; done
  tensor 2 8 4 local 1
  tensor 2 8 4 local 3
  tensor 2 8 2 local 2 2
  tensor 1 2 1 local 0 1 2
  tensor 2 8 2 local 3 2 2
  pipeline 2 1 1f1b 2 layer 4 2 local
  pipeline 2 2 interleaved 0 none 8 2 local
  pipeline 4 1 gpipe 0 none 4 1 local
  pipeline 2 1 zb-h1 0 activations 4 2 local
  resumed 1 1 8 4
  resumed 8 8 3 1 2 1
  resumed 4 2 3 1 3 0
  resumed 3 1 8 4 0 3
  [[ ${#transports[@]} == 1 ]] || { layout 4 2 mpi staged 1 1; layout 4 2 mpi direct 1 1; }
else
  tensor 1 1 1 local
  for transport in "${transports[@]}"; do
    for tp in 2 3 4 5 6 7 8; do tensor $tp $tp $tp "$transport"; done
    for stage in 1 2 3; do tensor 2 4 2 "$transport" $stage; done
    tensor 2 8 4 "$transport"
    tensor 2 6 6 "$transport"
    tensor 3 6 3 "$transport"
    tensor 4 8 4 "$transport"
    for tp in 1 2 3 6; do tensor $tp 6 2 "$transport" 1 1 3; done
    for tp in 1 2 4; do tensor $tp 8 2 "$transport" 3 1 2; done
  done
  for ranks in 1 2 3 4 5 6 8; do
    for ((ep = 1; ep <= ranks; ++ep)); do
      ((ranks % ep == 0)) || continue
      for transport in "${transports[@]}"; do
        for stage in 1 2 3; do zero $stage $ranks $ep "$transport"; done
        for what in activations layer; do
          for stage in 0 3; do recomputed $what $stage $ranks $ep "$transport" staged 4 1; done
        done
        for stage in 0 1 2 3; do offloaded $stage $ranks $ep "$transport"; done
        for dispatch in staged direct hierarchical; do
          for overlap in 1 4; do
            for threads in 1 2; do
              layout $ranks $ep "$transport" "$dispatch" $overlap $threads
            done
          done
        done
      done
    done
  done
  for ranks in 2 3 4 6 8; do
    for pp in 2 3 4; do
      ((ranks % pp == 0)) || continue
      for ((ep = 1; ep <= ranks / pp; ++ep)); do
        ((ranks / pp % ep == 0)) || continue
        for stage in 0 2 3; do
          for what in none activations layer; do
            for schedule in gpipe 1f1b zb-h1 1f1b-overlap; do
              pipeline $pp 1 $schedule $stage $what $ranks $ep local
            done
            ((pp > 2)) || pipeline $pp 2 interleaved $stage $what $ranks $ep local
            ((pp > 2)) || pipeline $pp 2 1f1b-overlap $stage $what $ranks $ep local
          done
        done
        [[ ${#transports[@]} == 1 ]] || pipeline $pp 1 1f1b 2 layer $ranks $ep mpi
        [[ ${#transports[@]} == 1 ]] || pipeline $pp 1 1f1b-overlap 2 none $ranks $ep mpi
      done
    done
  done
  at_ep=("1 1" "3 3" "4 2" "5 5" "8 4" "6 1")
  for from in "${at_ep[@]}"; do
    for to in "${at_ep[@]}"; do resumed $from $to; done # each holds two numbers
  done
  for from in 0 1 2 3; do
    for to in 0 1 2 3; do resumed 8 4 3 1 $from $to; done
  done
  for from in 1 2 4; do
    for to in 1 2 4; do resumed 8 2 4 1 0 2 $from $to; done
  done
  axes="ranks=1,2,3,4,6,8,12,16 tp=1,2,3,4,8 etp=1,2 ep=1,2,4 pp=1,2,4 vp=1,2 schedule=all zero=all recompute=all"
  "$moe" verify --full -q --moe-shared-expert-intermediate-size 128 \
    --layouts "$axes offload=none,optimizer:file=$work dispatch=staged overlap=1 capacity=none" >"$work/verify"
  ended=$(tail -n 1 "$work/verify" | tr -d ,) # "verified 1,234 layouts against one rank in 2.0 s: 0 failed"
  if [[ $ended =~ ^verified\ ([0-9]+)\ layouts.*:\ ([0-9]+)\ failed$ ]]; then
    equal=$((equal + BASH_REMATCH[1] - BASH_REMATCH[2])) bad=$((bad + BASH_REMATCH[2]))
  else
    bad=$((bad + 1))
  fi
  grep FAILED "$work/verify"
fi
echo "$equal layouts equal, $bad differ or fail"
((bad == 0))
