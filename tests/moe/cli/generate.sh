#!/usr/bin/env bash
# `moe generate`: the same text at any number of ranks: bash generate.sh <moe>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

training=("${model[@]}" --ranks 2 --steps 8 --lr 0.02 --quiet --num-query-groups 1 --qk-layernorm head)
expect 0 "training" "$moe" train "${training[@]}" --save "$work/run"
start=(--checkpoint "$work/run" --prompt "the router " --max-new-tokens 40)
for sampling in "--temperature 0" "--temperature 1 --top-k 20 --top-p 0.9 --seed 5"; do
  reference=
  for layout in "1" "3 --dispatch direct" "8"; do
    # shellcheck disable=SC2086 # several words
    expect 0 "generate $sampling on $layout" "$moe" generate "${start[@]}" $sampling --ranks $layout
    reference=${reference:-$(cat "$work/stdout")}
    [[ -n $reference && $(cat "$work/stdout") == "$reference" ]] ||
      fail "generate $sampling on $layout: '$(cat "$work/stdout")', expected '$reference'"
  done
done
matches "prompt of 11 tokens in [0-9.]+ s; 40 tokens in [0-9.]+ s, [0-9.]+ tok/s" "$work/stderr"
says "warning: prompt and new tokens are 51, the model has learnt sequences of 32" "$work/stderr"
run "$moe" generate "${start[@]}" --temperature 1 --top-k 20 --top-p 0.9 --seed 6
[[ $(cat "$work/stdout") != "$reference" ]] || fail "two seeds, one text"

# Ranks that share attention: the text of one rank with as many leaves, by a norm of all heads.
public=(--checkpoint "$(dirname "${BASH_SOURCE[0]}")/../../golden/models/olmoe" --prompt-tokens 1,2,3 --max-new-tokens 12 --quiet)
run "$moe" generate "${public[@]}" --tensor-leaves 2
reference=$(cat "$work/stdout")
expect 0 "generate on ranks that share attention" "$moe" generate "${public[@]}" --tensor-leaves 2 --ranks 2 --tp 2
[[ -n $reference && $(cat "$work/stdout") == "$reference" ]] || fail "--tp 2: $(cat "$work/stdout"), expected $reference"
expect 2 "more ranks than leaves" "$moe" generate "${public[@]}" --ranks 2 --tp 2
says "expected at most as many ranks as leaves: --tensor-leaves 8" "$work/stderr"

# A public model: the tokens that transformers generates (model.generate, greedy).
models=$(dirname "${BASH_SOURCE[0]}")/../../golden/models
while read -r family expected; do
  for ranks in 1 3; do
    run "$moe" generate --checkpoint "$models/$family" --prompt-tokens 1,2,3 --max-new-tokens 12 --ranks $ranks --quiet
    expect 0 "generate with $family on $ranks"
    [[ $(cat "$work/stdout") == "$expected" ]] || fail "$family on $ranks: $(cat "$work/stdout"), expected $expected"
  done
done <<'EOF'
mixtral 21 4 28 4 10 19 4 22 22 22 3 11
olmoe 23 26 1 8 1 1 22 26 26 26 8 22
qwen2_moe 1 17 1 1 1 1 34 34 1 17 1 1
qwen3_moe 8 8 8 8 8 8 8 8 8 8 8 8
EOF

# Weights in files: the text of weights in memory, nothing left behind, and room or an error at once.
scratch=$work/scratch
mkdir "$scratch"
least() { # the least memory of a line that refuses less
  grep -o 'expected at least [0-9]*' "$work/stderr" | grep -o '[0-9]*$'
}
offloaded=(--temperature 1 --seed 5 --offload weights:file="$scratch")
expect 0 "weights in memory" "$moe" generate "${start[@]}" --temperature 1 --seed 5 --quiet
cp "$work/stdout" "$work/resident"
refused 2 "--weight-memory is 1GiB, expected --offload weights:file=DIR with it" generate "${start[@]}" --weight-memory 1GiB
refused 2 "--offload is weights:file=$scratch, expected --weight-memory SIZE with it" generate "${start[@]}" "${offloaded[@]}"
refused 2 "--weight-memory is many, expected a size such as" generate "${start[@]}" "${offloaded[@]}" --weight-memory many
for what in weights:file= weights optimizer; do
  refused 2 "--offload is $what, expected none or weights:file=DIR" generate "${start[@]}" --offload $what --weight-memory 1GiB
done
for ranks in 1 3; do
  refused 2 "--weight-memory is 1000, expected at least" generate "${start[@]}" "${offloaded[@]}" --ranks $ranks --weight-memory 1000 --quiet
  memory=$(least)
  expect 0 "weights in files on $ranks" "$moe" generate "${start[@]}" "${offloaded[@]}" --ranks $ranks --weight-memory "$memory"
  cmp "$work/stdout" "$work/resident" || fail "weights in files on $ranks: another text"
  matches "in memory, .* in files; room for [0-9]+ of 8 experts, of [0-9]+ that were needed [0-9.]+ % were there; read" "$work/stderr"
done
expect 0 "weights in files, -o json" "$moe" generate "${start[@]}" "${offloaded[@]}" --weight-memory "$memory" -o json --quiet
matches '"offload":\{"memory_bytes":[0-9]+,"file_bytes":[1-9][0-9]*,"experts":8,"experts_in_memory":[0-9]+,"expert_hits":[0-9]+,"expert_misses":[1-9]'
refused 2 "there is no folder 'none'" generate "${start[@]}" --offload weights:file=none --weight-memory "$memory" --quiet
[[ -z $(ls "$scratch") ]] || fail "scratch files are left: $(ls "$scratch")"
(
  ulimit -f 8
  timeout 300 "$moe" generate "${start[@]}" "${offloaded[@]}" --weight-memory "$memory" --quiet >"$work/stdout" 2>"$work/stderr"
)
rc=$?
expect 4 "a full disk for weights"
(($(wc -l <"$work/stderr") == 1)) || fail "a full disk for weights: $(wc -l <"$work/stderr") lines on stderr"
matches "cannot reserve [0-9]+ bytes for '$scratch/moe-weights-rank-0-" "$work/stderr"

# Generation ends at the tokens of generation_config.json, else config.json, or the run's.
cp -r "$models/mixtral" "$work/ends"
sed -i 's/"eos_token_id": null/"eos_token_id": 10/' "$work/ends/config.json"
ends() { # ends TEXT FLAGS
  local text=$1 ranks
  shift
  for ranks in 1 3; do
    expect 0 "generate $* on $ranks" "$moe" generate --prompt-tokens 1,2,3 --max-new-tokens 12 --ranks $ranks --quiet "$@"
    [[ $(cat "$work/stdout") == "$text" ]] || fail "$* on $ranks: $(cat "$work/stdout"), expected $text"
  done
}
whole="21 4 28 4 10 19 4 22 22 22 3 11"
ends "21 4 28 4 10" --checkpoint "$work/ends"
ends "$whole" --checkpoint "$work/ends" --ignore-eos
echo '{"eos_token_id": [28, 11]}' >"$work/ends/generation_config.json"
ends "21 4 28" --checkpoint "$work/ends"
echo '{}' >"$work/ends/generation_config.json"
ends "$whole" --checkpoint "$work/ends"
expect 0 "the first token" "$moe" generate "${start[@]}" -o json
token=$(grep -o '"tokens":\[[0-9]*' "$work/stdout" | grep -o '[0-9]*$')
expect 0 "training with --eos-token-id" "$moe" train "${training[@]}" --save "$work/eos" --eos-token-id "256,$token"
expect 0 "the end of the run's texts" "$moe" generate "${start[@]}" --checkpoint "$work/eos" -o json
says "\"tokens\":[$token]"

# With its own output layer, and a config.json that ties it: as transformers 5, which does not tie
# it.
cp -r "$models/mixtral" "$work/tied"
sed -i 's/"tie_word_embeddings": false/"tie_word_embeddings": true/' "$work/tied/config.json"
expect 0 "not tied" "$moe" generate --checkpoint "$work/tied" --prompt-tokens 1,2,3 --max-new-tokens 12
[[ $(cat "$work/stdout") == "21 4 28 4 10 19 4 22 22 22 3 11" ]] || fail "not tied: $(cat "$work/stdout")"
says "lm_head.weight is another than model.embed_tokens.weight: they are not tied" "$work/stderr"

# As JSON; with the prompt from a file, and as ids.
printf 'the router ' >"$work/start"
expect 0 "-o json" "$moe" generate "${start[@]}" -o json --quiet
[[ ! -s $work/stderr ]] || fail "--quiet, but: $(cat "$work/stderr")"
tokens=$(grep -o '"tokens":\[[0-9,]*\]' "$work/stdout")
says '"prompt_tokens":[116,104,101,32,114,111,117,116,101,114,32]'
for flags in "--prompt-file $work/start" "--prompt-tokens 116,104,101,32,114,111,117,116,101,114,32"; do
  # shellcheck disable=SC2086 # several words
  run "$moe" generate --checkpoint "$work/run" --max-new-tokens 40 -o json $flags
  [[ $(grep -o '"tokens":\[[0-9,]*\]' "$work/stdout") == "$tokens" ]] || fail "$flags: other tokens"
done

finish
