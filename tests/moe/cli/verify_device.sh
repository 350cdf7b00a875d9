#!/usr/bin/env bash
# moe verify --device cuda: verify_device.sh <moe> none|simulated|any, the devices that the build has.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
devices=$2
small=(--device cuda --router mixtral)

run "$moe" verify "${small[@]}" --layouts 'ranks=1,3 overlap=1,2' --backend local
needs_device "$devices"
expect 0 "layouts on the device"
matches "^mixtral +3 ranks ep 3 local .* layout-invariant +one rank .* ok"
grep -qE "^mixtral +1 rank .* float64 .* ok" "$work/stdout" || fail "not compared with float64"
! grep -qE " mpi | hierarchical " "$work/stdout" || fail "layouts that were not asked for"

# Products of whole tiles. Layouts in 16 bits are moe_layer_test's.
tiles=(--device cuda --num-experts 8 --topk 2 --hidden-size 32 --moe-ffn-hidden-size 32
  --layouts 'ranks=2 ep=2 dispatch=staged overlap=1 capacity=none')
expect 0 "bfloat16, tensor cores" "$moe" verify "${tiles[@]}" --router deepseek-v3 --dtype bf16 --numerics layout-invariant
expect 0 "float16, tensor cores" "$moe" verify "${tiles[@]}" --router mixtral --dtype f16
expect 1 "a planted fault" "$moe" verify "${small[@]}" --layouts 'ranks=2 capacity=none' --inject gradient-scale-by-ep -q
grep -qE "experts.down_proj.weight.* FAILED" "$work/stdout" || fail "the planted fault: not in its tensor"

expect 2 "the axis named twice" "$moe" verify --backend local --layouts 'transport=local'
finish
