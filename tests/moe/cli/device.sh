#!/usr/bin/env bash
# A command with --device cuda: device.sh <moe> none|simulated|any <bench|train|verify>. The second
# argument is the kind of devices that the build has.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
devices=$2 command=$3
cd "$work" || exit 1

bench() {
  local short=(-n 2 -w 1 -T 0 --tokens 24 --num-experts 4 --device cuda) call rows
  run "$moe" bench layer --ranks 1 "${short[@]}" -o jsonl
  needs_device "$devices"
  expect 0 "layer --device cuda"
  for call in "--ranks 1" "--ranks 2 --share-device -d bf16 --moe-overlap-degree 2" "--ranks 1 --router gshard --topk 2" \
    "--ranks 1 --routing zipf:1" "--ranks 1 --capacity-factor 1 --moe-pad-expert-input-to-capacity"; do
    # shellcheck disable=SC2086
    expect 0 "layer $call" "$moe" bench layer $call "${short[@]}" --hidden-size 8 --moe-ffn-hidden-size 8 -oe jsonl
    rows=$(grep -c '"device":"cuda".*"status":"ok"' stderr)
    ((rows == $(wc -l <stderr) && rows >= 2)) || fail "layer $call: $(cat stderr)"
  done
  expect 2 "more ranks than GPUs" "$moe" bench layer --ranks 64 "${short[@]}"
  expect 2 "packed weights on a GPU" "$moe" bench layer --pack-weights "${short[@]}"

  # Without NCCL, ranks exchange host memory.
  expect 10 "alltoall --device cuda" "$moe" bench alltoall --device cuda
  says "--device is cuda, expected cpu, or --backend nccl" stderr
}

train() {
  # Little work, because a simulator does it.
  local short=(train "${model[@]}" --seq-length 8 --micro-batches 2 --steps 2 --lr-warmup-steps 1 --eval-sequences 2
    --device cuda) ranks
  local invariant=("$moe" "${short[@]}" --numerics layout-invariant)
  run "${invariant[@]}" --ranks 1 --out one
  needs_device "$devices"
  expect 0 "one rank"

  # Ranks that share devices have the bits of one rank.
  expect 2 "more ranks than GPUs" "${invariant[@]}" --ranks 64
  says "or --share-device" stderr
  expect 10 "stages that NCCL does not join" "${invariant[@]}" --ranks 2 --pp 2 --share-device
  says "--pp is 2 on CUDA devices over the local backend, expected 1 or" stderr
  expect 0 "two ranks" "${invariant[@]}" --ranks 2 --ep 2 --share-device --out two
  same_weights one two
  for ranks in 1 2; do
    expect 0 "float16 on $ranks ranks" "${invariant[@]}" --ranks $ranks --share-device --dtype f16 \
      --initial-loss-scale 4194304 --hysteresis 1 --out f16-$ranks
    says '"skipped":true' f16-$ranks/metrics.jsonl
  done
  same_weights f16-1 f16-2

  run "$moe" "${short[@]}" --ranks 1 --dtype bf16 --grouped-gemm cublas --numerics fast
  [[ $devices != simulated && $rc == 10 ]] || expect 0 "products by cuBLAS"
  expect 2 "cuBLAS in layout-invariant numerics" "$moe" "${short[@]}" --ranks 1 --grouped-gemm cublas
  expect 10 "a kernel that is not there" "$moe" "${short[@]}" --ranks 1 --grouped-gemm wgmma
}

verify() {
  local small=("$moe" verify --device cuda --router mixtral)
  # Products of whole tiles. moe_layer_test has layouts in 16 bits.
  local tiles=("$moe" verify --device cuda --num-experts 8 --topk 2 --hidden-size 32 --moe-ffn-hidden-size 32
    --layouts 'ranks=2 ep=2 dispatch=staged overlap=1 capacity=none')
  run "${small[@]}" --layouts 'ranks=1,3 overlap=1,2' --backend local
  needs_device "$devices"
  expect 0 "layouts on the device"
  matches "^mixtral +3 ranks ep 3 local .* layout-invariant +one rank .* ok"
  matches "^mixtral +1 rank .* float64 .* ok"
  ! grep -qE " mpi | hierarchical " stdout || fail "layouts that were not asked for"

  expect 0 "bfloat16, tensor cores" "${tiles[@]}" --router deepseek-v3 --dtype bf16 --numerics layout-invariant
  expect 0 "float16, tensor cores" "${tiles[@]}" --router mixtral --dtype f16
  expect 1 "a planted fault" "${small[@]}" --layouts 'ranks=2 capacity=none' --inject gradient-scale-by-ep -q
  matches "experts.down_proj.weight.* FAILED"
  expect 2 "the axis named twice" "$moe" verify --backend local --layouts 'transport=local'
}

"$command"
finish
