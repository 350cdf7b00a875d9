#!/usr/bin/env bash
# --backend nccl, a GPU for each rank: nccl.sh <moe> none|simulated|any <golden data>,
# the devices that the build has.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
devices=$2
data=$3
export CUSIM_DEVICES=3
short=("${model[@]}" --seq-length 8 --micro-batches 3 --steps 2 --lr-warmup-steps 1 --eval-sequences 2
  --numerics layout-invariant --device cuda)

run "$moe" train "${short[@]}" --ranks 1 --backend nccl --out "$work/one"
needs_device "$devices"
expect 0 "one rank"
grep -qE "^trained .* on 1 rank \(a GPU over NCCL\)" "$work/stdout" || fail "one rank: $(head -1 "$work/stdout")"

# enough_gpus <what>: whether the last run had a GPU for each rank; only simulated ones are promised.
enough_gpus() {
  [[ $devices == any && $rc == 2 ]] && grep -qE "expected at most its [0-9]+ GPU" "$work/stderr" && return 1
  expect 0 "$1"
}

# The same bits as one rank, whoever sums the gradients.
for call in "--ranks 2 --ep 2 --moe-overlap-degree 2" "--ranks 2 --ep 2 --dispatch hierarchical" "--ranks 3 --ep 1 --all-reduce library"; do
  rm -rf "$work/more"
  # shellcheck disable=SC2086
  run "$moe" train "${short[@]}" --backend nccl $call --out "$work/more"
  enough_gpus "$call" || continue
  [[ $(value "$work/one/metrics.jsonl" weights_xxh3) == "$(value "$work/more/metrics.jsonl" weights_xxh3)" ]] ||
    fail "$call: other weights than one rank"
done
run "$moe" verify --device cuda --router mixtral --layouts 'ranks=2,3,4 transport=nccl overlap=2' --numerics layout-invariant -v
expect 0 "verify"
if [[ $devices == simulated ]]; then
  grep -qE "^mixtral +3 ranks ep 3 nccl .* layout-invariant +one rank .* ok" "$work/stdout" || fail "verify: no layout of three ranks"
fi
grep -qE "skipped \(4 ranks, [0-3] GPUs?\)" "$work/stdout" || [[ $devices == any ]] || fail "verify: ranks without a GPU"
# Ranks that are processes, of which simulated devices can have but one.
one_gpu=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../scripts" && pwd)/nccl_one_gpu.sh
run "$moe" verify --device cuda --router mixtral --layouts 'ranks=1 transport=nccl' --numerics layout-invariant --mpirun "$one_gpu"
expect 0 "verify over processes"
grep -qE "^mixtral +1 rank ep 1 nccl .* layout-invariant +one rank .* ok" "$work/stdout" || fail "verify over processes: $(cat "$work/stdout")"
expect 10 "a launcher that is not there" "$moe" verify --device cuda --router mixtral --layouts 'ranks=1 transport=nccl' --mpirun /nowhere
expect 2 "no secret" env -u MOE_NCCL_SECRET RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29599 \
  "$moe" train "${short[@]}" --share-device
grep -qF "MOE_NCCL_SECRET" "$work/stderr" || fail "no secret: $(cat "$work/stderr")"

run "$moe" bench layer --device cuda --backend nccl --ranks 2 -n 2 -w 1 -T 0 --tokens 24 --num-experts 4 \
  --hidden-size 8 --moe-ffn-hidden-size 8 -o jsonl
enough_gpus "bench layer" && { grep -q '"backend":"nccl".*"status":"ok"' "$work/stdout" || fail "bench layer: $(cat "$work/stdout")"; }

for call in alltoall "alltoallv --routing zipf:1" "allreduce -d i64" "allreduce --all-reduce library -d bf16" \
  allgather reducescatter p2p memcpy; do
  # shellcheck disable=SC2086
  run "$moe" bench $call --device cuda --backend nccl --ranks 2 -b 1K -e 4K -n 2 -w 1 -T 0 -o jsonl
  enough_gpus "bench $call" || continue
  rows=$(grep -c '"backend":"nccl","transport":"nccl".*"nwrong":0,' "$work/stdout")
  ((rows == $(wc -l <"$work/stdout") && rows >= 2)) || fail "bench $call: $(cat "$work/stdout")"
done
case=$data/deepseek_v3-1
for ranks in 1 2; do
  run "$moe" layer --hf-config "$case/config.json" --weights "$case" --input "$case/io.safetensors" --output "$work/y$ranks" \
    --grad-output "$case/io.safetensors" --grads "$work/g$ranks" --device cuda --backend nccl --ranks $ranks
  enough_gpus "layer" || continue
  cmp -s "$work/y$ranks" "$work/y1" && cmp -s "$work/g$ranks" "$work/g1" || fail "layer: other bytes than one rank"
done
run "$moe" sweep --device cuda --backend nccl --ranks 1,64 --num-experts 4 --tokens 16 --hidden-size 8 --moe-ffn-hidden-size 8 \
  -n 2 -w 1 --timeout 0 -r 1 -o jsonl
expect 1 "sweep"
grep -q '"ranks":1,.*"backend":"nccl".*"status":"ok".*--device cuda' "$work/stdout" || fail "sweep: $(cat "$work/stdout")"
grep -qE '"ranks":64,.*"error":"--ranks: 64 on this machine, expected at most its [0-9]+ GPU' "$work/stdout" || fail "sweep: $(cat "$work/stdout")"

expect 2 "two hops over memory of the host" "$moe" bench alltoall --device cuda --backend nccl --dispatch hierarchical --ranks 2

expect 2 "more ranks than GPUs" "$moe" train "${short[@]}" --backend nccl --ranks 64
expect 2 "NCCL ranks on one GPU" "$moe" train "${short[@]}" --backend nccl --ranks 2 --share-device
expect 2 "NCCL ranks on the CPU" "$moe" train "${model[@]}" --backend nccl --ranks 2
expect 2 "sums in memory of the host that is not shared" "$moe" train "${short[@]}" --backend nccl --ranks 2 --all-reduce direct
expect 2 "verify of NCCL on the CPU" "$moe" verify --router mixtral --backend nccl
finish
