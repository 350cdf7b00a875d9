#!/usr/bin/env bash
# `moe train` on threads, end to end: bash train.sh <moe>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$work" || exit 1

# The loss falls, and the report, the metrics and the progress agree on it.
expect 0 "training" "$moe" train "${model[@]}" --ranks 2 --ep 2 --steps 30 --lr 0.01 --lr-warmup-steps 3 \
  --log-interval 10 --eval-interval 15 --out a --save a/ckpt
metrics=a/metrics.jsonl
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
matches "^weights_xxh3 +$hash$"
for phase in gate plan dispatch expert combine dense all-reduce optimiser; do
  matches "^$phase +[0-9.]+ +[0-9.]+ %$"
done
for kind in "dispatch \+ combine" "gradient all-reduce"; do
  matches "^$kind +[0-9,]+ +[0-9.]+ [kM]?B +[0-9.]+ +[0-9.]+ GB/s +[0-9.]+ GB/s +[0-9.]+ %$"
done
for part in "held-out bits per byte" "tok/s" "expert load" "dropped 0 of" "gradients: all-reduce" \
  "metrics.jsonl"; do
  says "$part"
done
for step in 1 10 20 30; do
  matches "^step +$step/30 \| loss [0-9.]+ \| lr [0-9.e+-]+ \| gnorm [0-9.]+ \| [0-9.]+ ms \| [0-9,]+ tok/s \| moe: a2a [0-9.]+ ms [0-9]+% expert [0-9.]+ ms drop [0-9.]+% maxvio [0-9.]+ dead [0-9]+ aux [0-9.e+-]+ \| ar [0-9.]+ ms [0-9]+% \| [0-9]+ MiB \| eta [0-9:]+$" stderr
done
grep -q "^step *11/" stderr && fail "a line for step 11 with --log-interval 10"
says "text   1 file, 40,000 bytes: 23,616 to train on, 16,384 held out; 0 files skipped" stderr

# A second run does not overwrite the first.
before=$(cat "$metrics")
again=$(sed -n 's/^reproduce *//p' stdout)
expect 2 "a second run into --out" bash -c "$again --steps 1 --out a"
says "'a', which holds an earlier run, expected a new folder: give another one, or remove '$metrics'" stderr
[[ $(cat "$metrics") == "$before" ]] || fail "a second run into --out has changed the first"

# The command in the report, as printed, repeats the run in another folder, including checkpoints
# (fast numerics: the same layout, the same bits).
expect 0 "reproduce: $again" bash -c "$again"
same_bits a a-2
[[ $(ls a-2/ckpt) == "$(ls a/ckpt)" ]] || fail "reproduce: saved $(ls a-2/ckpt), expected $(ls a/ckpt)"

# A CPU without AVX-512 has the same bits.
if "$moe" doctor | grep -q "SIMD .*AVX2"; then
  MOE_SIMD=AVX2 expect 0 "MOE_SIMD=AVX2" bash -c "$again --out avx2 --save avx2/ckpt"
  same_bits a avx2
  says '"simd":"AVX2"' avx2/metrics.jsonl
fi

# The settings in the first line give the same bits.
sed 's/.*"settings"://; s/}$//' <<<"$start" >settings.json
expect 0 "settings of the first line as --config" "$moe" train --config settings.json --out c --save c/ckpt
same_bits a c

# The model size that is announced is the one that was trained.
announced=$(sed -n 's/^model  \([0-9,]*\) parameters, \([0-9,]*\) used.*/\1 \2/p' stderr)
trained=$(sed -n 's/^parameters *\([0-9,]*\) in all, \([0-9,]*\) used.*/\1 \2/p' stdout)
[[ -n $announced && $announced == "$trained" ]] || fail "size: '$announced' and '$trained'"

# The end report as JSON: the last line of the metrics, and the other contents of the tables.
expect 0 "-o json" "$moe" train "${model[@]}" --ranks 2 --ep 2 --steps 2 --quiet -o json --out json
(($(wc -l <stdout) == 1)) || fail "-o json: $(wc -l <stdout) lines"
last=$(tail -n 1 json/metrics.jsonl)
[[ $(head -c $((${#last} - 1)) stdout) == "${last%\}}" ]] || fail "-o json: other than the metrics' end"
for part in '"phase_seconds":{"gate":' '"exchange_seconds":{"copy":' '"communication":[{"name":"dispatch + combine","calls":' '"total_slots":3072,' \
  '"name":"gradient all-reduce"' '"files":["json/metrics.jsonl"]' '"command":"'; do
  says "$part"
done

# Any number of ranks, even more than micro-batches, gives the same bits in layout-invariant
# numerics.
invariant=("${model[@]}" --numerics layout-invariant --steps 3 --lr 0.01 --quiet)
while read -r ranks ep dispatch node; do
  expect 0 "$ranks ranks, $dispatch" "$moe" train "${invariant[@]}" --ranks "$ranks" --ep "$ep" \
    --dispatch "$dispatch" --node-size "$node" --out "ranks$ranks"
  [[ ! -s stderr ]] || fail "--quiet, but: $(head -n 1 stderr)"
  same_bits ranks1 "ranks$ranks"
done <<<$'1 1 staged 1\n3 3 direct 1\n8 4 hierarchical 2'

# A layout that is found has the same bits, and is recorded as if it were given.
loud=("${invariant[@]:0:${#invariant[@]}-1}") # without --quiet
expect 0 "--mesh auto" "$moe" train "${loud[@]}" --ranks 4 --mesh auto --zero 1 --out auto
matches '^mesh   --pp [0-9]+ --tp 1 --ep [0-9]+ .*--zero 1 --recompute [a-z]+: .* ms a step and [0-9]+ MiB a rank predicted' stderr
same_bits ranks1 auto
matches '^[{].*"mesh":"given".*"zero":"1"' auto/metrics.jsonl
refused 2 "--mesh is auto, expected a layout of 4 ranks with --expert-model-parallel-size 3, of which there is none" \
  train "${invariant[@]}" --ranks 4 --mesh auto --ep 3

# Bytes as ids of two bytes each, in two files, are the same text.
LC_ALL=C sed -z 's/./&\x00/g' "$text" >ids
head -c 30002 ids >ids.0
tail -c +30003 ids >ids.1
expect 0 "--tokens" "$moe" train --tokens ids.0 --tokens ids.1 "${invariant[@]:2}" --ranks 3 --out ids.run
same_bits ranks1 ids.run
says "held-out bits per token"

# One of everything; and the start reports which ranks do more than others.
expect 0 "one step on one rank" "$moe" train "${model[@]}" --steps 1 --ranks 1 --micro-batches 1
matches "^trained 1 step in [0-9:]+ on 1 rank \(this process\) = EP 1 x DP 1$"
says "step   1 micro-batch x 2 sequences x 32 bytes = 64 tokens" stderr
grep -q "^uneven" stderr && fail "one rank, but: $(cat stderr)"
says "| lr 1.00e-03 |" stderr # it learns
expect 0 "four micro-batches on three ranks" "$moe" train "${model[@]}" --steps 1 --ranks 3 --micro-batches 4
says "uneven 1 of 3 ranks: 2 micro-batches a step, the others 1; --micro-batches 6 takes no longer" stderr

# PrecedenceTest has the other origins.
MOE_SEED=6 expect 0 "--print-config" "$moe" train --steps 1 --print-config
matches "^seed +6 +env MOE_SEED$"

# whole_lines <file>
whole_lines() { [[ $(tail -c 1 "$1" | od -An -c) == *'\n'* ]] || fail "$what: half a line in $1"; }

# Divergence: exit code 6, one line, and complete lines for the steps before.
expect 6 "divergence" "$moe" train "${model[@]}" --quiet --steps 50 --lr 1e30 --clip-grad 0 --out nan
(($(wc -l <stderr) == 1)) || fail "divergence: $(wc -l <stderr) lines on stderr"
says "finite" stderr
[[ ! -s nan/metrics.jsonl ]] || whole_lines nan/metrics.jsonl

# Float16: steps that overflow are skipped; overflow at the least scale ends the run.
half=(--dtype f16 --steps 4 --hysteresis 1)
expect 0 "float16" "$moe" train "${model[@]}" "${half[@]}" --initial-loss-scale 16777216 --out half
says "| scale 16777216 skipped |" stderr
matches "^skipped [1-4] of 4 steps, whose gradients overflowed float16"
expect 6 "overflow at the least loss scale" "$moe" train "${model[@]}" "${half[@]}" --initial-loss-scale 16777216 \
  --min-loss-scale 16777216 --quiet
says "gradient norm is inf and the loss scale is at its minimum" stderr

# A grid too coarse for the gradients: reported once as they occur, and at the end.
expect 0 "a coarse grid" "$moe" train "${model[@]}" --steps 3 --grid-unit-log2 -20 --out coarse
says "the exact grid of gradients (unit 2^-20) took up to" stderr
[[ $(grep -c "took up to" stderr) == 1 ]] || fail "a coarse grid: $(grep -c "took up to" stderr) warnings"
matches "^the exact grid took up to [0-9.e-]+ of [a-z0-9._]+ in step [1-3], relative to its norm"
says '"grid_unit_log2":-20' coarse/metrics.jsonl

# A full disk: exit code 4, one line, complete lines. The limit on file size replaces the disk.
(
  ulimit -f 8
  timeout 300 "$moe" train "${model[@]}" --quiet --steps 50 --out full >stdout 2>stderr
)
rc=$?
expect 4 "full disk"
(($(wc -l <stderr) == 1)) || fail "full disk: $(wc -l <stderr) lines on stderr"
says "metrics.jsonl" stderr
whole_lines full/metrics.jsonl
# Products of bf16 have an order, which the end says and the reproducing command gives.
expect 0 "products in tiles" "$moe" train "${model[@]}" --steps 2 --dtype bf16 --bf16-order tile --quiet --out tile --save tile/ckpt
says "bf16 order    tile"
says '"bf16_order":"tile"' tile/metrics.jsonl
expect 0 "an order by itself" "$moe" train "${model[@]}" --steps 2 --dtype bf16 --quiet
order=$(sed -n 's/^bf16 order *//p' stdout)
[[ $order == dot || $order == tile ]] || fail "an order by itself: '$order'"
says "--bf16-order $order"
refused 2 "--bf16-order is dot, tile in the checkpoint" train "${model[@]}" --steps 3 --dtype bf16 --bf16-order dot --quiet --save tile/ckpt --resume auto
expect 0 "a resumed order" "$moe" train "${model[@]}" --steps 3 --dtype bf16 --quiet --save tile/ckpt --resume auto
says "bf16 order    tile"
# Optimiser state in files: the bits of memory, nothing left behind, and room or an error at once.
mkdir scratch
offload=(--steps 2 --dtype bf16 --zero 1 --bucket-size-mb 0.5)
expect 0 "state in memory" "$moe" train "${model[@]}" "${offload[@]}" --offload optimizer
says "optimiser state is in memory of the host already" stderr
hash=$(grep ^weights_xxh3 stdout)
expect 0 "state in files" "$moe" train "${model[@]}" "${offload[@]}" --offload optimizer:file=scratch
says "$hash"
[[ -z $(ls scratch) ]] || fail "scratch files are left: $(ls scratch)"
refused 2 "there is no folder 'no-scratch'" train "${model[@]}" --quiet --offload optimizer:file=no-scratch
(
  ulimit -f 8
  timeout 300 "$moe" train "${model[@]}" "${offload[@]}" --quiet --offload optimizer:file=scratch >stdout 2>stderr
)
rc=$?
expect 4 "a full disk for state"
(($(wc -l <stderr) == 1)) || fail "a full disk for state: $(wc -l <stderr) lines on stderr"
matches "cannot reserve [0-9]+ bytes for 'scratch/moe-optimizer-rank-[0-9]-" stderr
# A pipe as output: its reader receives one complete trace.
mkfifo pipe
timeout 100 cat pipe >piped &
reader=$!
expect 0 "a trace into a pipe" "$moe" train "${model[@]}" --quiet --steps 1 --trace pipe
wait "$reader"
[[ $(tail -c 2 piped) == "}" ]] || fail "a trace into a pipe is not whole"

# The report precedes the measurement of bandwidth, which may fail: here the other rank waits too
# long for the one whose report is not read until half a second after its deadline. The last line of
# the metrics immediately precedes the report.
mkfifo slow
exec 7<>slow
head -c 65536 /dev/zero >&7 # all that a pipe holds
(
  until grep -qs weights_xxh3 late/metrics.jsonl; do sleep 0.05; done
  sleep 1
  exec cat <&7 >taken
) &
reader=$!
expect 8 "a report that is taken late" timeout 20 bash -c '"$@" >"$0"' slow \
  "$moe" train "${model[@]}" --quiet --steps 1 --ranks 2 --comm-timeout 0.5 --out late
await 5 grep -qa "^weights_xxh3" taken || fail "no report of a run whose bandwidth could not be measured"
kill "$reader"
wait "$reader" 2>/dev/null
exec 7>&-

# Standard streams that are closed or broken: files are complete, and lost progress output does not
# end a run.
steps=("$moe" train "${model[@]}" --steps 3 --log-interval 1 --ranks 2 --out streams)
for streams in '2>&-' '>&-' '<&- >&- 2>&-' '2>/dev/full' '2> >(exec <&-)'; do
  rm -rf streams
  expect 0 "training with $streams" bash -c '"$@" '"$streams" bash "${steps[@]}" --record-routing streams-routing
  (($(grep -c '^{.*}$' streams/metrics.jsonl) == 5)) || fail "$streams: metrics.jsonl is $(head -c 300 streams/metrics.jsonl)"
  (($(grep -vac '^{.*}$' streams-routing) == 0)) || fail "$streams: something else in the routing"
done

expect 4 "full standard output" bash -c '"$0" train --help >/dev/full' "$moe"

# More than any machine has is refused before a text is read, with the estimate.
expect 5 "a model above any memory" "$moe" train "${model[@]}" --hidden-size 8192 --num-experts 256 --moe-ffn-hidden-size 8192 --quiet
matches "moe train: the model needs about [0-9]+ MiB for [0-9]+ ranks of this machine \([0-9]+ MiB of parameters, gradients and optimiser, [0-9]+ MiB of activations each\), expected at most the [0-9]+ MiB that are available$" stderr
expect 5 "a dry run of it" "$moe" train "${model[@]}" --hidden-size 8192 --num-experts 256 --moe-ffn-hidden-size 8192 --dry-run
matches "^memory  [0-9.]+ MiB a rank: "
expect 0 "a dry run" "$moe" train "${model[@]}" --dry-run --out dry --save dry/ckpt -o json
matches '^[{]"rank_bytes":[0-9]+,"state_bytes":'
[[ ! -e dry && ! -s stderr ]] || fail "a dry run: made $(ls dry), wrote $(cat stderr)"

expect 0 "identity experts" "$moe" train "${model[@]}" --router longcat --num-zero-experts 2 --steps 2 --quiet \
  --moe-router-load-balancing-type global_aux_loss
says "experts that return the token"

# Help and version.
for call in "--help" "help" "help train" "train --help" "--version"; do
  # shellcheck disable=SC2086
  expect 0 "moe $call" "$moe" $call
  [[ -s stdout && ! -s stderr ]] || fail "moe $call: wrong streams"
done
[[ $(head -n 1 stdout) =~ ^moe\ [0-9.]+$ ]] || fail "--version: $(cat stdout)"
for fact in "commit    ([0-9a-f]{12}[+]?|unknown)" "build     (optimised|with assertions)" "features  .+"; do
  matches "^($fact)"
done

# Asked to stop without --save: a report of what was trained, one line on what is lost, and the
# signal ends it.
"$moe" train "${model[@]}" --steps 100000 --ranks 2 -v --out stopped >stdout 2>stderr &
pid=$!
await 20 grep -q "^step" stderr
kill -TERM $pid
wait $pid
rc=$?
expect 143 "SIGTERM without --save"
matches "^moe train: stopped on request after step [0-9]+ of 100000, and its weights are gone: --save DIR keeps them$" stderr
(($(grep -c "^moe train: " stderr) == 1)) || fail "$what: $(grep "^moe train: " stderr)"
matches "^trained [0-9,]+ steps?, stopped on request, in "
matches "^weights_xxh3 +[0-9a-f]{16}$"
finish
