#!/usr/bin/env bash
# --backend nccl, a GPU for each rank: nccl.sh <moe> none|simulated|any <golden data>. The second
# argument is the kind of devices that the build has.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
devices=$2
data=$3
cd "$work" || exit 1
export CUSIM_DEVICES=3
short=("${model[@]}" --seq-length 8 --micro-batches 3 --steps 2 --lr-warmup-steps 1 --eval-sequences 2
  --numerics layout-invariant --device cuda)

run "$moe" train "${short[@]}" --ranks 1 --backend nccl --out one
needs_device "$devices"
expect 0 "one rank"
matches "^trained .* on 1 rank \(a GPU over NCCL\)"

# enough_gpus <what>: whether the last run had a GPU for each rank; only simulated ones are
# guaranteed.
enough_gpus() {
  [[ $devices == any && $rc == 2 ]] && grep -qE "expected at most its [0-9]+ GPU" stderr && return 1
  expect 0 "$1"
}

# The same bits as one rank, whichever rank sums the gradients.
for call in "--ranks 2 --ep 2 --moe-overlap-degree 2" "--ranks 2 --ep 2 --dispatch hierarchical" "--ranks 3 --ep 1 --all-reduce library"; do
  rm -rf more
  # shellcheck disable=SC2086
  run "$moe" train "${short[@]}" --backend nccl $call --out more
  enough_gpus "$call" || continue
  same_weights one more
done
# Ranks that share matrices, over NCCL: nodes, rows and columns in the devices' memory.
short+=(--tensor-leaves 2)
expect 0 "leaves on one rank" "$moe" train "${short[@]}" --ranks 1 --backend nccl --out leaves
for call in "--ranks 2 --ep 1 --etp 2 --tp 2" "--ranks 4 --ep 2 --tp 2 --pp 2"; do
  rm -rf more
  # shellcheck disable=SC2086
  CUSIM_DEVICES=4 run "$moe" train "${short[@]}" --backend nccl $call --out more
  enough_gpus "$call" || continue
  same_weights leaves more
done
expect 0 "verify" "$moe" verify --device cuda --router mixtral --layouts 'ranks=2,3,4 transport=nccl overlap=2' \
  --numerics layout-invariant -v
if [[ $devices == simulated ]]; then
  matches "^mixtral +3 ranks ep 3 nccl .* layout-invariant +one rank .* ok"
  matches "skipped \(4 ranks, [0-3] GPUs?\)"
fi
# Ranks that are processes; with simulated devices there can only be one.
one_gpu=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../scripts" && pwd)/nccl_one_gpu.sh
expect 0 "verify over processes" "$one_gpu" -n 1 "$moe" verify --device cuda --router mixtral --numerics layout-invariant
matches "^mixtral +1 rank ep 1 nccl .* layout-invariant +one rank .* ok"
expect 2 "no secret" env -u MOE_NCCL_SECRET RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29599 \
  "$moe" train "${short[@]}" --share-device
says "MOE_NCCL_SECRET" stderr

run "$moe" bench layer --device cuda --backend nccl --ranks 2 -n 2 -w 1 -T 0 --tokens 24 --num-experts 4 \
  --hidden-size 8 --moe-ffn-hidden-size 8 -o jsonl
enough_gpus "bench layer" && matches '"backend":"nccl".*"status":"ok"'

for call in alltoall "alltoallv --routing zipf:1" "allreduce -d i64" "allreduce --all-reduce library -d bf16" \
  allgather reducescatter p2p memcpy; do
  # shellcheck disable=SC2086
  run "$moe" bench $call --device cuda --backend nccl --ranks 2 -b 1K -e 4K -n 2 -w 1 -T 0 -o jsonl
  enough_gpus "bench $call" || continue
  rows=$(grep -c '"backend":"nccl","transport":"nccl".*"nwrong":0,' stdout)
  ((rows == $(wc -l <stdout) && rows >= 2)) || fail "bench $call: $(cat stdout)"
done
case=$data/deepseek_v3-1
for ranks in 1 2; do
  run "$moe" layer --hf-config "$case/config.json" --weights "$case" --input "$case/io.safetensors" --output y$ranks \
    --grad-output "$case/io.safetensors" --grads g$ranks --device cuda --backend nccl --ranks $ranks
  enough_gpus "layer" || continue
  cmp -s y$ranks y1 && cmp -s g$ranks g1 || fail "layer: other bytes than one rank"
done
expect 1 "sweep" "$moe" sweep --device cuda --backend nccl --ranks 1,64 --num-experts 4 --tokens 16 --hidden-size 8 \
  --moe-ffn-hidden-size 8 -n 2 -w 1 --timeout 0 -r 1 -o jsonl
matches '"ranks":1,.*"backend":"nccl".*"status":"ok".*--device cuda'
matches '"ranks":64,.*"error":"--ranks: 64 on this machine, expected at most its [0-9]+ GPU'

expect 2 "two hops over memory of the host" "$moe" bench alltoall --device cuda --backend nccl --dispatch hierarchical --ranks 2
expect 2 "more ranks than GPUs" "$moe" train "${short[@]}" --backend nccl --ranks 64
expect 2 "NCCL ranks on one GPU" "$moe" train "${short[@]}" --backend nccl --ranks 2 --share-device
expect 2 "NCCL ranks on the CPU" "$moe" train "${model[@]}" --backend nccl --ranks 2
expect 2 "sums in memory of the host that is not shared" "$moe" train "${short[@]}" --backend nccl --ranks 2 --all-reduce direct
expect 2 "verify of NCCL on the CPU" "$moe" verify --router mixtral --backend nccl
finish
