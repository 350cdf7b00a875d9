#!/usr/bin/env bash
# moe train --device cuda: train_device.sh <moe> none|simulated|any, the devices that the build has.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
devices=$2
# Little work: a simulator does it.
short=("${model[@]}" --seq-length 8 --micro-batches 2 --steps 2 --lr-warmup-steps 1 --eval-sequences 2 --device cuda)

run "$moe" train "${short[@]}" --ranks 1 --numerics layout-invariant --out "$work/one"
needs_device "$devices"
expect 0 "one rank"

# Ranks that share devices have the bits of one.
expect 2 "more ranks than GPUs" "$moe" train "${short[@]}" --ranks 64 --numerics layout-invariant
grep -qF -- "or --share-device" "$work/stderr" || fail "more ranks than GPUs: $(cat "$work/stderr")"
expect 0 "two ranks" "$moe" train "${short[@]}" --ranks 2 --ep 2 --share-device --numerics layout-invariant --out "$work/two"
[[ $(value "$work/one/metrics.jsonl" weights_xxh3) == "$(value "$work/two/metrics.jsonl" weights_xxh3)" ]] ||
  fail "one rank and two have other weights"

for ranks in 1 2; do
  expect 0 "float16 on $ranks ranks" "$moe" train "${short[@]}" --ranks $ranks --share-device --numerics layout-invariant --dtype f16 \
    --initial-loss-scale 4194304 --hysteresis 1 --out "$work/f16-$ranks"
  grep -q '"skipped":true' "$work/f16-$ranks/metrics.jsonl" || fail "float16 on $ranks ranks: no step was skipped"
done
[[ $(value "$work/f16-1/metrics.jsonl" weights_xxh3) == "$(value "$work/f16-2/metrics.jsonl" weights_xxh3)" ]] ||
  fail "float16: one rank and two have other weights"

# Graphs, from the third micro-batch on, have the bits of what they hold.
padded=(--ranks 1 --capacity-factor 1.25 --moe-pad-expert-input-to-capacity --numerics layout-invariant)
expect 0 "without graphs" "$moe" train "${short[@]}" "${padded[@]}" --out "$work/padded"
expect 0 "graphs" "$moe" train "${short[@]}" "${padded[@]}" --cuda-graph --out "$work/graphs"
[[ $(value "$work/padded/metrics.jsonl" weights_xxh3) == "$(value "$work/graphs/metrics.jsonl" weights_xxh3)" ]] ||
  fail "with graphs and without are other weights"
expect 2 "graphs without padding" "$moe" train "${short[@]}" --ranks 1 --cuda-graph
grep -qF -- "--cuda-graph without --moe-pad-expert-input-to-capacity, expected it" "$work/stderr" ||
  fail "graphs without padding: $(cat "$work/stderr")"

run "$moe" train "${short[@]}" --ranks 1 --dtype bf16 --grouped-gemm cublas --numerics fast
[[ $devices != simulated && $rc == 10 ]] || expect 0 "products by cuBLAS"
expect 2 "cuBLAS in layout-invariant numerics" "$moe" train "${short[@]}" --ranks 1 --grouped-gemm cublas
expect 10 "a kernel that is not there" "$moe" train "${short[@]}" --ranks 1 --grouped-gemm wgmma
finish
