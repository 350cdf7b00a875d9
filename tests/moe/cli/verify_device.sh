#!/usr/bin/env bash
# moe verify --device cuda: verify_device.sh <moe> none|simulated|any, the devices that the build has.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
devices=$2
small=(--device cuda --router mixtral)

run "$moe" verify "${small[@]}" --layouts 'ranks=1,3 overlap=1,2' --backend local
if [[ $devices != simulated && $rc == 10 ]]; then
  (($(wc -l <"$work/stderr") == 1)) || fail "no device: $(cat "$work/stderr")"
  grep -qF -- "--device is cuda: " "$work/stderr" || fail "no device: $(cat "$work/stderr")"
  finish
fi
expect 0 "layouts on the device"
grep -qE "^mixtral +3 ranks ep 3 local .* layout-invariant +one rank .* ok" "$work/stdout" ||
  fail "no layout of three ranks"
grep -qE "^mixtral +1 rank .* float64 .* ok" "$work/stdout" || fail "not compared with float64"
! grep -qE " mpi | hierarchical " "$work/stdout" || fail "layouts that were not asked for"

run "$moe" verify --device cuda --router deepseek-v3 --dtype bf16 --num-experts 8 --topk 2 \
  --hidden-size 32 --moe-ffn-hidden-size 32 --numerics layout-invariant --layouts 'ranks=1,2 capacity=none'
expect 0 "bfloat16, tensor cores"
run "$moe" verify --device cuda --router mixtral --dtype f16 --num-experts 8 --topk 2 \
  --hidden-size 32 --moe-ffn-hidden-size 32 --layouts 'ranks=1,2 capacity=none'
expect 0 "float16, tensor cores"
run "$moe" verify "${small[@]}" --layouts 'ranks=2 capacity=none' --inject gradient-scale-by-ep -q
expect 1 "a planted fault"
grep -qE "experts.down_proj.weight.* FAILED" "$work/stdout" || fail "the planted fault: not in its tensor"

run "$moe" verify --backend local --layouts 'transport=local'
expect 2 "the axis named twice"
finish
