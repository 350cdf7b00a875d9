#!/usr/bin/env bash
# `moe train` on threads, end to end: bash train.sh <moe>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The loss falls, and the report, the metrics and the progress agree about it.
expect 0 "training" "$moe" train "${model[@]}" --ranks 2 --ep 2 --steps 30 --lr 0.01 --lr-warmup-steps 3 \
  --log-interval 10 --eval-interval 15 --out "$work/a"
metrics=$work/a/metrics.jsonl
(($(wc -l <"$metrics") == 32)) || fail "metrics: $(wc -l <"$metrics") lines, expected a start, 30 steps and an end"
start=$(head -n 1 "$metrics")
for part in '{"schema":"moe.train/1","provenance":{"version":"' '"host":"' '"ranks":2,"backend":"local"' \
  '"settings":{"data":["' '"steps":"30"' '"adam-beta1":"0.9"'; do
  grep -qF -- "$part" <<<"$start" || fail "metrics: no $part in the first line: $start"
done
below "$(value "$metrics" loss 30)" "$(awk "BEGIN { print 0.7 * $(value "$metrics" loss 1) }")" ||
  fail "loss $(value "$metrics" loss 1) -> $(value "$metrics" loss 30), expected 30 % less"
below "$(value "$metrics" val_loss)" "$(value "$metrics" val_loss_before)" ||
  fail "held-out loss did not fall"
[[ $(value "$metrics" val_loss 14) == null ]] || fail "val_loss of a step without validation"
[[ $(value "$metrics" val_loss 15) != null ]] || fail "val_loss is missing at --eval-interval"
[[ $(value "$metrics" val_loss_hex) == "$(value "$metrics" val_loss_hex 30)" ]] ||
  fail "the last validation and the end disagree"
hash=$(value "$metrics" weights_xxh3)
[[ $hash =~ ^[0-9a-f]{16}$ ]] || fail "weights_xxh3 is '$hash'"
grep -qE "^weights_xxh3 +$hash$" "$work/stdout" || fail "the report has another hash"
for phase in gate plan dispatch expert combine dense all-reduce optimiser; do
  grep -qE "^$phase +[0-9.]+ +[0-9.]+ %$" "$work/stdout" || fail "no phase $phase in the report"
done
for kind in "dispatch \+ combine" "gradient all-reduce"; do
  matches "^$kind +[0-9,]+ +[0-9.]+ [kM]?B +[0-9.]+ +[0-9.]+ GB/s +[0-9.]+ GB/s +[0-9.]+ %$"
done
for part in "held-out bits per byte" "tok/s" "expert load" "dropped 0 of" "gradients: all-reduce" \
  "metrics.jsonl"; do
  grep -qF -- "$part" "$work/stdout" || fail "no '$part' in the report"
done
for step in 1 10 20 30; do
  matches "^step +$step/30 \| loss [0-9.]+ \| lr [0-9.e+-]+ \| gnorm [0-9.]+ \| [0-9.]+ ms \| [0-9,]+ tok/s \| moe: a2a [0-9.]+ ms [0-9]+% expert [0-9.]+ ms drop [0-9.]+% maxvio [0-9.]+ dead [0-9]+ aux [0-9.e+-]+ \| ar [0-9.]+ ms [0-9]+% \| [0-9]+ MiB \| eta [0-9:]+$" "$work/stderr"
done
grep -q "^step *11/" "$work/stderr" && fail "a line for step 11 with --log-interval 10"
says "text   1 file, 40,000 bytes: 23,616 to train on, 16,384 held out; 0 files skipped" "$work/stderr"

# A second run does not take the place of the first.
before=$(cat "$metrics")
again=$(sed -n 's/^reproduce *//p' "$work/stdout")
expect 2 "a second run into --out" bash -c "$again --steps 1"
says "'$work/a', which holds an earlier run, expected a new folder: give another one, or remove '$metrics'" "$work/stderr"
[[ $(cat "$metrics") == "$before" ]] || fail "a second run into --out has changed the first"

# The command in the report gives the same run (fast numerics: the same layout, the same bits).
expect 0 "reproduce: $again" bash -c "$again --out $work/b"
[[ $(bits "$metrics") == "$(bits "$work/b/metrics.jsonl")" ]] || fail "the run did not repeat"

# So does a CPU without AVX-512.
if "$moe" doctor | grep -q "SIMD .*AVX2"; then
  MOE_SIMD=AVX2 run bash -c "$again --out $work/avx2"
  expect 0 "MOE_SIMD=AVX2"
  [[ $(bits "$metrics") == "$(bits "$work/avx2/metrics.jsonl")" ]] || fail "AVX2 has other bits"
  grep -q '"simd":"AVX2"' "$work/avx2/metrics.jsonl" || fail "the run does not say that it had AVX2"
fi

# So do the settings in the first line.
sed 's/.*"settings"://; s/}$//' <<<"$start" >"$work/settings.json"
expect 0 "settings of the first line as --config" "$moe" train --config "$work/settings.json" --out "$work/c"
[[ $(bits "$metrics") == "$(bits "$work/c/metrics.jsonl")" ]] || fail "the settings did not repeat the run"

# The model size that is announced is the one that was trained.
announced=$(sed -n 's/^model  \([0-9,]*\) parameters, \([0-9,]*\) used.*/\1 \2/p' "$work/stderr")
trained=$(sed -n 's/^parameters *\([0-9,]*\) in all, \([0-9,]*\) used.*/\1 \2/p' "$work/stdout")
[[ -n $announced && $announced == "$trained" ]] || fail "size: '$announced' and '$trained'"

# The end report as JSON: the last line of the metrics, and what else the tables say.
expect 0 "-o json" "$moe" train "${model[@]}" --ranks 2 --ep 2 --steps 2 --quiet -o json --out "$work/json"
(($(wc -l <"$work/stdout") == 1)) || fail "-o json: $(wc -l <"$work/stdout") lines"
last=$(tail -n 1 "$work/json/metrics.jsonl")
[[ $(head -c $((${#last} - 1)) "$work/stdout") == "${last%\}}" ]] || fail "-o json: other than the metrics' end"
for part in '"phase_seconds":{"gate":' '"exchange_seconds":{"copy":' '"communication":[{"name":"dispatch + combine","calls":' '"total_slots":3072,' \
  '"name":"gradient all-reduce"' '"files":["'"$work"'/json/metrics.jsonl"]' '"command":"'; do
  grep -qF -- "$part" "$work/stdout" || fail "-o json: no $part in $(cat "$work/stdout")"
done

# Any number of ranks, more than micro-batches too, gives the same bits in layout-invariant numerics.
invariant=("${model[@]}" --numerics layout-invariant --steps 3 --lr 0.01 --quiet)
reference=
for layout in "1 1 staged" "3 3 direct" "8 4 hierarchical"; do
  read -r ranks ep dispatch <<<"$layout"
  rm -rf "$work/layout"
  expect 0 "ranks $layout" "$moe" train "${invariant[@]}" --ranks "$ranks" --ep "$ep" --dispatch "$dispatch" \
    --node-size "$((ep == 4 ? 2 : 1))" --out "$work/layout"
  [[ ! -s $work/stderr ]] || fail "--quiet, but: $(head -n 1 "$work/stderr")"
  now=$(bits "$work/layout/metrics.jsonl")
  reference=${reference:-$now}
  [[ -n $now && $now == "$reference" ]] || fail "ranks $layout: other bits than one rank"
done

# Bytes as ids of two bytes each, in two files, are the same text.
LC_ALL=C sed -z 's/./&\x00/g' "$text" >"$work/ids"
head -c 30002 "$work/ids" >"$work/ids.0"
tail -c +30003 "$work/ids" >"$work/ids.1"
expect 0 "--tokens" "$moe" train --tokens "$work/ids.0" --tokens "$work/ids.1" "${invariant[@]:2}" --ranks 3 --out "$work/ids.run"
[[ $(bits "$work/ids.run/metrics.jsonl") == "$reference" ]] || fail "--tokens: other bits than the same --data"
grep -qF "held-out bits per token" "$work/stdout" || fail "--tokens: $(cat "$work/stdout")"

# One of anything; and the start says which ranks do more than others.
expect 0 "one step on one rank" "$moe" train "${model[@]}" --steps 1 --ranks 1 --micro-batches 1
matches "^trained 1 step in [0-9:]+ on 1 rank \(this process\) = EP 1 x DP 1$"
grep -qF "step   1 micro-batch x 2 sequences x 32 bytes = 64 tokens" "$work/stderr" || fail "one micro-batch: $(cat "$work/stderr")"
grep -q "^uneven" "$work/stderr" && fail "one rank, but: $(cat "$work/stderr")"
grep -q "| lr 1.00e-03 |" "$work/stderr" || fail "a run of one step learns nothing: $(cat "$work/stderr")"
expect 0 "four micro-batches on three ranks" "$moe" train "${model[@]}" --steps 1 --ranks 3 --micro-batches 4
says "uneven 1 of 3 ranks: 2 micro-batches a step, the others 1; --micro-batches 6 takes no longer" "$work/stderr"

# Precedence, through the whole program.
echo '{"steps": 3, "seed": 4, "num_layers": 5}' >"$work/config.json"
MOE_STEPS=2 MOE_SEED=6 expect 0 "--print-config" "$moe" train --steps 1 --config "$work/config.json" --print-config
for line in "steps +1 +flag --steps" "seed +6 +env MOE_SEED" \
  "num-layers +5 +file .*config.json: num_layers" "lr-warmup-steps +[0-9]+ +default"; do
  grep -qE "^$line$" "$work/stdout" || fail "--print-config has no line '$line'"
done

# Divergence: exit 6, one line, and the steps until then are whole.
expect 6 "divergence" "$moe" train "${model[@]}" --quiet --steps 50 --lr 1e30 --clip-grad 0 --out "$work/nan"
(($(wc -l <"$work/stderr") == 1)) || fail "divergence: $(wc -l <"$work/stderr") lines on stderr"
grep -q "finite" "$work/stderr" || fail "divergence: $(cat "$work/stderr")"
[[ ! -s $work/nan/metrics.jsonl || $(tail -c 1 "$work/nan/metrics.jsonl" | od -An -c) == *'\n'* ]] ||
  fail "divergence: half a line in metrics.jsonl"

# Float16: steps that overflow are skipped, those at the least scale end the run.
half=(--dtype f16 --steps 4 --hysteresis 1)
expect 0 "float16" "$moe" train "${model[@]}" "${half[@]}" --initial-loss-scale 16777216 --out "$work/half"
grep -q "| scale 16777216 skipped |" "$work/stderr" || fail "float16: no skipped step: $(cat "$work/stderr")"
grep -qE "^skipped [1-4] of 4 steps, whose gradients overflowed float16" "$work/stdout" || fail "float16: no skipped step in the report"
run "$moe" train "${model[@]}" "${half[@]}" --initial-loss-scale 16777216 --min-loss-scale 16777216 --quiet
expect 6 "overflow at the least loss scale"
grep -qF "gradient norm is inf and the loss scale is at its minimum" "$work/stderr" || fail "the least loss scale: $(cat "$work/stderr")"

# A full disk: exit 4, one line, whole lines. The limit on file size stands for the disk.
(
  ulimit -f 8
  timeout 300 "$moe" train "${model[@]}" --quiet --steps 50 --out "$work/full" \
    >"$work/stdout" 2>"$work/stderr"
)
rc=$?
expect 4 "full disk"
(($(wc -l <"$work/stderr") == 1)) || fail "full disk: $(wc -l <"$work/stderr") lines on stderr"
grep -qF "metrics.jsonl" "$work/stderr" || fail "full disk: $(cat "$work/stderr")"
[[ $(tail -c 1 "$work/full/metrics.jsonl" | od -An -c) == *'\n'* ]] ||
  fail "full disk: half a line in metrics.jsonl"
# A pipe as output: its reader sees one whole trace.
mkfifo "$work/pipe"
timeout 100 cat "$work/pipe" >"$work/piped" &
reader=$!
expect 0 "a trace into a pipe" "$moe" train "${model[@]}" --quiet --steps 1 --trace "$work/pipe"
wait "$reader"
[[ $(tail -c 2 "$work/piped") == "}" ]] || fail "a trace into a pipe is not whole"


# The report comes before the bandwidth is measured, which may fail: here the other rank waits too
# long for the one whose report nobody takes, until half a second after its deadline. The last line
# of the metrics comes right before the report.
mkfifo "$work/slow"
exec 7<>"$work/slow"
head -c 65536 /dev/zero >&7 # all that a pipe holds
(
  until grep -qs weights_xxh3 "$work/late/metrics.jsonl"; do sleep 0.05; done
  sleep 1
  exec cat <&7 >"$work/taken"
) &
reader=$!
expect 8 "a report that is taken late" timeout 20 bash -c '"$@" >"$0"' "$work/slow" \
  "$moe" train "${model[@]}" --quiet --steps 1 --ranks 2 --comm-timeout 0.5 --out "$work/late"
for ((i = 0; i < 100; ++i)); do # what was written may still be in the pipe
  grep -qa "^weights_xxh3" "$work/taken" && break
  sleep 0.05
done
kill "$reader"
wait "$reader" 2>/dev/null
exec 7>&-
grep -qa "^weights_xxh3" "$work/taken" || fail "no report of a run whose bandwidth could not be measured"

# Standard streams that are closed or broken: files hold what is theirs, and progress is not worth a
# run.
steps=("$moe" train "${model[@]}" --steps 3 --log-interval 1 --ranks 2 --out "$work/streams")
for streams in '2>&-' '>&-' '<&- >&- 2>&-' '2>/dev/full' '2> >(exec <&-)'; do
  rm -rf "$work/streams"
  expect 0 "training with $streams" bash -c '"$@" '"$streams" bash "${steps[@]}" --record-routing "$work/streams-routing"
  (($(grep -c '^{.*}$' "$work/streams/metrics.jsonl") == 5)) || fail "$streams: metrics.jsonl is $(head -c 300 "$work/streams/metrics.jsonl")"
  (($(grep -vac '^{.*}$' "$work/streams-routing") == 0)) || fail "$streams: something else in the routing"
done

expect 4 "full standard output" bash -c '"$0" train --help >/dev/full' "$moe"

# More than any machine has is refused before a text is read, with the estimate.
expect 5 "a model above any memory" "$moe" train "${model[@]}" --hidden-size 8192 --num-experts 256 --moe-ffn-hidden-size 8192 --quiet
matches "moe train: the model needs about [0-9]+ MiB for [0-9]+ ranks of this machine \([0-9]+ MiB of parameters, gradients and optimiser, [0-9]+ MiB of activations each\), expected at most the [0-9]+ MiB that are available$" "$work/stderr"

# A gate of the table and one that is not train to the same bits on one rank and on three;
# trainer_test has the others.
for gate in mixtral gshard; do
  gate_model=("${model[@]}" --router "$gate" --numerics layout-invariant --steps 2 --quiet
    --moe-shared-expert-intermediate-size 16)
  for ranks in 1 3; do
    expect 0 "--router $gate on $ranks ranks" "$moe" train "${gate_model[@]}" --ranks $ranks --ep $ranks --out "$work/$gate-$ranks"
  done
  [[ -n $(bits "$work/$gate-1/metrics.jsonl") &&
    $(bits "$work/$gate-1/metrics.jsonl") == "$(bits "$work/$gate-3/metrics.jsonl")" ]] ||
    fail "--router $gate: other bits on three ranks"
done
expect 0 "identity experts" "$moe" train "${model[@]}" --router longcat --num-zero-experts 2 --steps 2 --quiet \
  --moe-router-load-balancing-type global_aux_loss
grep -q "experts that return the token" "$work/stdout" || fail "identity experts: no load"

# Help and version.
for call in "--help" "help" "help train" "train --help" "--version"; do
  # shellcheck disable=SC2086
  expect 0 "moe $call" "$moe" $call
  [[ -s $work/stdout && ! -s $work/stderr ]] || fail "moe $call: wrong streams"
done
[[ $(head -n 1 "$work/stdout") =~ ^moe\ [0-9.]+$ ]] || fail "--version: $(cat "$work/stdout")"
for fact in "commit    ([0-9a-f]{12}[+]?|unknown)" "build     (optimised|with assertions)" "features  .+"; do
  grep -qE "^($fact)" "$work/stdout" || fail "--version: no '$fact' in: $(cat "$work/stdout")"
done
finish
