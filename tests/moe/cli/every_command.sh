#!/usr/bin/env bash
# Every command once, on the smallest input that runs all of it, for sanitizers: bash every_command.sh
# <moe> <golden data>. What the commands tell is checked by their own tests, in builds without.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
case=$2/mixtral-1
cd "$work" || exit 1

every() { expect 0 "$*" "$moe" "$@"; }
every doctor
every layer --hf-config "$case/config.json" --weights "$case" --input "$case/io.safetensors" --output y \
  --grad-output "$case/io.safetensors" --grads g --ranks 2
every verify --layouts 'ranks=4 ep=2 overlap=2' --router mixtral -q
every bench alltoallv --ranks 3 --routing zipf:1.2 -b 4K -e 4K -n 1 -w 0 -T 0 -J bench.json
every bench layer --ranks 2 --hidden-size 16 --moe-ffn-hidden-size 16 --tokens 32 -n 1 -w 0 -T 0 -J layer.json
train=("${model[@]}" --ranks 2 --quiet --steps 2 --save run/checkpoints --eval-sequences 2)
every train "${train[@]}" --capacity-factor 1 --out run --trace trace.json --record-routing routing \
  --tensorboard-dir curves --metrics-file metrics.prom --flight-dir flight
every train "${train[@]}" --steps 3 --resume auto --dtype bf16 --moe-overlap-degree 2 --out dry --dry-run
every train "${train[@]}" --steps 3 --resume auto --capacity-factor 1 --out again
every train "${model[@]}" --quiet --steps 1 --ranks 4 --ep 2 --tp 2 --tensor-leaves 2 --pp 2 --pipeline-schedule zb-h1 \
  --zero 2 --recompute layer --dtype bf16 --out hybrid
every eval --checkpoint run --data "$text" --split held-out --eval-sequences 2 --ranks 2
every generate --checkpoint run --prompt "the " --max-new-tokens 3 --ranks 2
every ckpt ls run/checkpoints
every ckpt export run --format mixtral --out exported
every status run/checkpoints
every debug flight flight
every plan --model "$case/../../models/mixtral" --gpus 4 --top 2 --routing-trace dirichlet:30 --mtbf 3
every sweep --hidden-size 16 --moe-ffn-hidden-size 8 --tokens-per-rank 32 -n 1 -w 0 -T 0 --threads 1 \
  --num-experts 4,8 --ranks 2 -r 1 -q -J sweep.jsonl
every report run bench.json layer.json sweep.jsonl
every launch --engine local -- "$moe" train "${model[@]}" --quiet --steps 1
every completion bash
finish
