#!/usr/bin/env bash
# `moe eval`: the loss that training reported, at any layout: bash eval.sh <moe>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

expect 0 "training" "$moe" train "${model[@]}" --ranks 2 --steps 4 --lr 0.01 --quiet --save "$work/run/checkpoints" --save-interval 2 \
  --out "$work/run"
trained=$(value "$work/run/metrics.jsonl" val_loss_hex)
held_out=(--checkpoint "$work/run" --data "$text" --split held-out --eval-sequences 16)
for layout in "1 1" "3 auto --dispatch direct" "8 4 --threads 1 --pp 2 --pipeline-schedule zb-h1"; do
  read -r ranks ep flags <<<"$layout"
  # shellcheck disable=SC2086 # several words
  expect 0 "eval on $layout" "$moe" eval "${held_out[@]}" --ranks "$ranks" --ep "$ep" $flags -o json
  [[ $(value "$work/stdout" loss_hex) == "$trained" ]] ||
    fail "eval on $layout: $(cat "$work/stdout"), training said $trained"
done
refused 2 "2 chunks a stage with schedule gpipe" eval "${held_out[@]}" --ranks 2 --pp 2 --vp 2 --pipeline-schedule gpipe
# An exported public model has the same loss, from its files alone.
expect 0 "export" "$moe" ckpt export "$work/run" --format mixtral --out "$work/model"
expect 0 "eval of the exported model" "$moe" eval --checkpoint "$work/model" "${held_out[@]:2}" --seq-length 32 --ranks 2 --ep 2 -o json
[[ $(value "$work/stdout" loss_hex) == "$trained" ]] || fail "exported: $(cat "$work/stdout"), training said $trained"
cp -r "$work/model" "$work/bad"
truncate -s -8 "$work/bad/model.safetensors"
expect 3 "eval of a damaged model" "$moe" eval --checkpoint "$work/bad" "${held_out[@]:2}" --seq-length 32

expect 0 "eval with another length" "$moe" eval "${held_out[@]}" --seq-length 16 --micro-batch-size 5
says "held-out: 16 sequences of 16 bytes"
expect 0 "eval as bf16" "$moe" eval --checkpoint "$work/run" --data "$text" --dtype bf16
says "40,000 bytes, all: 1,249 sequences of 32 bytes"
refused 2 "--bf16-order is tile with --dtype f32" eval "${held_out[@]}" --bf16-order tile

# A run in bf16 is evaluated in the order of its products, unless another is asked for.
for order in dot tile; do
  expect 0 "training in $order" "$moe" train "${model[@]}" --ranks 2 --steps 2 --quiet --dtype bf16 --bf16-order $order \
    --save "$work/$order/checkpoints" --out "$work/$order"
  for flags in "" "--bf16-order auto" "--bf16-order dot" "--bf16-order tile" "--dtype f32"; do
    # shellcheck disable=SC2086 # several words
    expect 0 "eval of $order $flags" "$moe" eval --checkpoint "$work/$order" "${held_out[@]:2}" $flags -o json
    cp "$work/stdout" "$work/eval-$order${flags// /}"
  done
  says "\"bf16_order\":\"$order\"" "$work/eval-$order"
  says '"bf16_order":"tile"' "$work/eval-$order--bf16-ordertile"
  says '"bf16_order":null' "$work/eval-$order--dtypef32"
  [[ $(value "$work/eval-$order" loss_hex) == "$(value "$work/$order/metrics.jsonl" val_loss_hex)" ]] || fail "eval of $order: other bits"
done

# A run on token ids refuses a text, also when it resumes.
LC_ALL=C sed -z 's/./&\x01/g' "$text" >"$work/ids"
ids=(train "${model[@]:2}" --ranks 1 --steps 1 --quiet --save "$work/ids-run" --vocab-size 512)
expect 0 "training on ids" "$moe" "${ids[@]}" --tokens "$work/ids"
refused 2 "--data, expected --tokens: the 512 ids of this model are no bytes" eval --checkpoint "$work/ids-run" --data "$text"
expect 0 "eval of ids" "$moe" eval --checkpoint "$work/ids-run" --tokens "$work/ids"
says "nats, "
refused 2 "step-00000001: --data, expected --tokens: the run was trained on token ids" "${ids[@]}" --resume auto --data "$text"

step=$work/run/checkpoints/step-00000004
shard=$step/shard-00000-of-00002.safetensors
# Weights and moments alike: eval does not check what it does not read.
size=$(stat -c %s "$shard")
head -c $((size / 2)) /dev/zero | dd of="$shard" bs=1M seek=$((size / 3)) oflag=seek_bytes conv=notrunc status=none
refused 3 "has hash" eval "${held_out[@]}"
refused 3 "; the one before it is '$work/run/checkpoints/step-00000002'" eval "${held_out[@]}"
refused 3 "; the one before it is '$work/run/checkpoints/step-00000002'" generate --checkpoint "$work/run" --prompt a --max-new-tokens 4
refused 3 "; the one before it is '$work/run/checkpoints/step-00000002'" ckpt export "$work/run" --format mixtral --out "$work/other"
truncate -s 100 "$shard"
expect 0 "eval of the one before a damaged header" "$moe" eval "${held_out[@]}"
says "step-00000004 is passed over" "$work/stderr"
rm -r "$work/run/checkpoints/step-00000002"
refused 3 "100 bytes, the manifest says" eval "${held_out[@]}"
refused 3 "100 bytes, the manifest says" eval --checkpoint "$step" --data "$text"
finish
