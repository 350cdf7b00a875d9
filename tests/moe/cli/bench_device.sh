#!/usr/bin/env bash
# moe bench --device cuda: bench_device.sh <moe> none|simulated|any, the devices that the build has.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
devices=$2
cd "$work" || exit 1
short=(-n 2 -w 1 -T 0 --tokens 24 --num-experts 4)

run "$moe" bench permute --device cuda "${short[@]}" --hidden-size 12 -o jsonl
needs_device "$devices"
expect 0 "permute --device cuda"
for call in gate "gate --router switch --topk 1" "gate -d bf16 --topk 4" "gate -d f16" \
  "permute --hidden-size 12" "permute --hidden-size 13 -d bf16" \
  "combine --hidden-size 12 --topk 3" "combine --hidden-size 13 -d bf16 --routing hot_expert:1" \
  "gemm --hidden-size 20 --moe-ffn-hidden-size 12" \
  "gemm --hidden-size 33 --moe-ffn-hidden-size 17 -d bf16 --routing zipf:1" "gemm --hidden-size 33 --moe-ffn-hidden-size 17 -d f16"; do
  # shellcheck disable=SC2086
  expect 0 "$call" "$moe" bench $call --device cuda "${short[@]}" -oe jsonl -J rows.json
  rows=$(grep -c '"device":"cuda","threads":null,.*"nwrong":0,"status":"ok","error":null,"version":.*"settings":""}$' stderr)
  ((rows == $(wc -l <stderr) && rows >= 2)) || fail "$call: $(cat stderr)"
  expect 0 "report of $call" "$moe" report rows.json --out rows.html
done
for call in "--ranks 1" "--ranks 2 --share-device -d bf16 --moe-overlap-degree 2" "--ranks 1 --router gshard --topk 2" \
  "--ranks 1 --routing zipf:1" "--ranks 1 --cuda-graph --capacity-factor 1 --moe-pad-expert-input-to-capacity -w 3"; do
  # shellcheck disable=SC2086
  expect 0 "layer $call" "$moe" bench layer $call --device cuda "${short[@]}" --hidden-size 8 --moe-ffn-hidden-size 8 -oe jsonl
  rows=$(grep -c '"device":"cuda".*"status":"ok"' stderr)
  ((rows == $(wc -l <stderr) && rows >= 2)) || fail "layer $call: $(cat stderr)"
done
expect 2 "more ranks than GPUs" "$moe" bench layer --ranks 64 --device cuda "${short[@]}"
expect 2 "packed weights on a GPU" "$moe" bench layer --pack-weights --device cuda "${short[@]}"
expect 10 "a gate of the CPU alone" "$moe" bench gate --router sinkhorn --device cuda "${short[@]}"
expect 2 "gate -d i64" "$moe" bench gate -d i64 --device cuda "${short[@]}"
if [[ $devices == simulated ]]; then # which always has a cuBLAS
  run "$moe" bench gemm --device cuda "${short[@]}" --hidden-size 8 --moe-ffn-hidden-size 8 --fail-if 'peak_pct<1000000000'
  expect 1 "gemm --fail-if"
fi
expect 1 "permute --fail-if" "$moe" bench permute --device cuda "${short[@]}" --hidden-size 12 --fail-if 'memcpy_pct<1000000000'

# Without NCCL, what ranks exchange is memory of the host.
expect 10 "alltoall --device cuda" "$moe" bench alltoall --device cuda
grep -qF -- "--device is cuda, expected cpu, or --backend nccl" stderr || fail "alltoall --device cuda: $(cat stderr)"
finish
