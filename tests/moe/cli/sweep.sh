#!/usr/bin/env bash
# `moe sweep` on threads and, given <mpiexec>, on processes: bash sweep.sh <moe> [<mpiexec>]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
mpiexec=${2:-}
cd "$work" || exit 1
# Three calls: these runs test results, not speed.
layer=(--hidden-size 16 --moe-ffn-hidden-size 8 --tokens-per-rank 32 -n 3 -w 1 -T 0 --threads 1)
train=(--measure train "${model[@]}" --steps 3)

# rows <file> <python expression over the list r>: prints its value.
rows() { python3 -c 'import json, sys; r = [json.loads(l) for l in open(sys.argv[1])]; print(eval(sys.argv[2]))' "$1" "$2"; }
# same <what> <got> <expected>
same() { [[ $2 == "$3" ]] || fail "$1: $2, expected $3"; }

# Every combination, in the documented order, in a file and on the screen.
expect 0 "a sweep of layers" "$moe" sweep "${layer[@]}" --num-experts 4-8*2 --topk 1-2 --ranks 1,3 -r 2 -J layer.jsonl
same "order" "$(rows layer.jsonl '[(x["ranks"], x["experts"], x["topk"]) for x in r]')" \
  "[(1, 4, 1), (1, 4, 2), (1, 8, 1), (1, 8, 2), (3, 4, 1), (3, 4, 2), (3, 8, 1), (3, 8, 2)]"
same "ep of a layer" "$(rows layer.jsonl 'all(x["ep"] == x["ranks"] and x["dp"] == 1 for x in r)')" True
same "figures" "$(rows layer.jsonl 'all(x["tok_s"] > 0 and x["tok_s_sd"] >= 0 and x["repetitions"] == 2 and x["status"] == "ok" for x in r)')" True
(($(wc -l <stdout) == 9)) || fail "table: $(cat stdout)"
matches '^ *ranks [|] experts [|] topk [|]'
says ' * |'
matches '^\[1/8\] R=1 E=4 k=1 cf=none eta --:--:--$' stderr
matches '^\[8/8\] R=3 E=8 k=2 cf=none eta 00:00:0[0-9]$' stderr

# Lists that go together, and repetitions in turn.
expect 0 "coupled lists" "$moe" sweep "${layer[@]}" --num-experts 4,8,16 --with --topk 1,2,2 --capacity-factor none,1 --ranks 1 -r 2 \
  --interleave -J coupled.jsonl
same "coupled" "$(rows coupled.jsonl '[(x["experts"], x["topk"], x["cf"]) for x in r]')" \
  "[(4, 1, 'none'), (4, 1, 1.0), (8, 2, 'none'), (8, 2, 1.0), (16, 2, 'none'), (16, 2, 1.0)]"
same "in turn" "$(grep -o '^.[0-9]' stderr | tr -d '[\n')" 123456123456
same "in turn" "$(rows coupled.jsonl 'all(x["tok_s_sd"] > 0 and x["repetitions"] == 2 for x in r)')" True

# Skew and capacity: the dropped slots, and the imbalance of the load.
expect 0 "a skewed layer" "$moe" sweep "${layer[@]}" --ranks 2 --num-experts 4 --topk 1 --routing uniform,hot_expert:1 \
  --capacity-factor none,1 --ep 1,2 -r 1 -q -J skew.jsonl
# All tokens choose expert 0, which keeps a quarter of them: 24 of 32 are dropped.
same "drops" "$(rows skew.jsonl '[(x["ep"], x["routing"], x["cf"], x["drop_end"], x["max_vio"], x["dead"]) for x in r][:4]')" \
  "[(1, 'uniform', 'none', 0.0, 0.0, 0), (1, 'uniform', 1.0, 0.0, 0.0, 0), (1, 'hot_expert:1', 'none', 0.0, 3.0, 3), (1, 'hot_expert:1', 1.0, 75.0, 3.0, 3)]"
same "ep 2" "$(rows skew.jsonl '[x["drop_end"] for x in r[4:]]')" "[0.0, 0.0, 0.0, 75.0]"

# Forms, which TablesTest reads back.
expect 0 "-o csv -oe md" "$moe" sweep "${layer[@]}" --num-experts 4,8 --ranks 1 -r 1 -q -o csv -oe md
matches "^schema,measure,experts,topk,cf,"
(($(grep -c '^moe.sweep/1,.*\bok\b' stdout) == 2)) || fail "-o csv: $(cat stdout)"
matches '^[|] schema [|] measure [|] experts [|] topk [|] cf [|]' stderr
matches '^[{]"schema":"moe.sweep/1","measure":"layer","experts":4,"topk":1,"cf"' layer.jsonl

# Impossible points are rows; the others are measured. A memory limit is one of the reasons.
expect 1 "values that do not go together" "$moe" sweep "${layer[@]}" --num-experts 2,4 --topk 1,3 --ranks 1 -r 1 -J errors.jsonl
same "status" "$(rows errors.jsonl '[x["status"] for x in r]')" "['ok', 'error', 'ok', 'ok']"
same "reason" "$(rows errors.jsonl 'r[1]["error"]')" "--moe-router-topk is 3, expected at most 2 (--num-experts)"
tail -n 1 stderr | grep -qF "moe sweep: 1 of 4 points failed, the first: --moe-router-topk is 3" || fail "verdict: $(tail -n 1 stderr)"
expect 1 "a point above --max-memory" "$moe" sweep "${layer[@]}" --hidden-size 1024 --moe-ffn-hidden-size 8,4096 --ranks 1 \
  -r 1 --max-memory 100 -J memory.jsonl
same "too big" "$(rows memory.jsonl '[x["status"] for x in r]')" "['ok', 'error']"
same "too big" "$(rows memory.jsonl '"expected at most --max-memory 100 MiB" in r[1]["error"]')" True
expect 1 "a point above any memory" "$moe" sweep "${layer[@]}" --moe-ffn-hidden-size 8,2000000 --hidden-size 4096 --ranks 1 -r 1 -o jsonl
grep -qF "that are available" stdout || fail "a point above any memory: $(cat stdout)"
grep -qF "at most 1e12" <("$moe" sweep "${layer[@]}" --moe-ffn-hidden-size 8,2000000000 --hidden-size 4096 --ranks 1 -r 1 -q 2>&1) || fail "a point above 1e12"

# A point that fails while it runs. Threads continue; processes end, and --resume continues after
# it.
expect 1 "points that diverge" "$moe" sweep "${train[@]}" --ranks 2 --lr 1e30 --num-experts 4,8 -J failed.jsonl
same "points that diverge" "$(rows failed.jsonl '["gradient norm is" in x["error"] for x in r]')" "[True, True]"

# Points that are not run are predicted, and are in no file: of eight three are measured.
predicted=("${train[@]}" --ranks 2 --ep 1,2 --num-experts 4,8 --hidden-size 32,64)
expect 0 "--predict" "$moe" sweep "${predicted[@]}" --predict 3 -J predict.jsonl -o jsonl
cp stdout all.jsonl
same "measured" "$(wc -l <predict.jsonl)" 3
same "predicted" "$(rows all.jsonl '[x["status"] for x in r].count("predicted"), len(r)')" "(5, 8)"
same "predicted" "$(rows all.jsonl 'all(x["step_ms"] > 0 and x["tok_s"] > 0 and x["peak_mib"] > 0 and x["val_loss"] is None for x in r if x["status"] == "predicted")')" True
matches '^moe sweep: 5 points predicted from 3 measured; step times of [23] of these, each predicted from the others: median error ' stderr
expect 0 "the rest of it" "$moe" sweep "${predicted[@]}" --resume predict.jsonl -q
same "the rest of it" "$(rows predict.jsonl '[x["status"] for x in r]')" "$(python3 -c 'print(["ok"] * 8)')"
refused 2 "--predict is 2, expected 0, or at least 3 points to measure" sweep "${predicted[@]}" --predict 2
refused 2 "--predict is 3, expected --measure train with it" sweep "${layer[@]}" --num-experts 4,8 --ranks 1 --predict 3

# Training: capacity against drops and loss. Points that are repeated are not run again.
axes=(--capacity-factor none,0.5,1 --num-experts 4,8 --ranks 2 --ep 2)
expect 0 "a sweep of training" "$moe" sweep "${train[@]}" "${axes[@]}" -J train.jsonl
same "dropless drops" "$(rows train.jsonl 'all((x["drop_init"] == x["drop_end"] == 0) == (x["cf"] == "none") for x in r if x["cf"] != 1)')" True
same "losses" "$(rows train.jsonl 'all(1 < x["val_loss"] < 6 and x["tok_s_sd"] is None and x["ar_ms"] > 0 and x["peak_mib"] > 0 for x in r)')" True
cp train.jsonl whole.jsonl
expect 0 "--resume of a finished sweep" "$moe" sweep "${train[@]}" "${axes[@]}" --resume train.jsonl
cmp -s train.jsonl whole.jsonl || fail "--resume of a finished sweep wrote"
(($(wc -l <stdout) == 7)) || fail "--resume of a finished sweep: $(cat stdout)"
[[ ! -s stderr ]] || fail "--resume of a finished sweep ran: $(cat stderr)"
expect 0 "--resume with other settings" "$moe" sweep "${train[@]}" "${axes[@]}" --lr 0.003 --capacity-factor 1 --resume train.jsonl
grep -qF "6 of 6 rows are of other settings and left alone, the first in line 1" stderr || fail "other settings: $(cat stderr)"
same "other settings" "$(wc -l <train.jsonl)" 8
expect 0 "the report of a sweep" "$moe" report whole.jsonl layer.jsonl --out page.html
for chart in "Capacity factor against dropped slots" "Capacity factor against loss" "Speed against loss"; do
  grep -qF "$chart" page.html || fail "the report has no chart '$chart'"
done
# Stages and ranks that share matrices: other times, the same loss.
expect 0 "stages and tensor ranks" "$moe" sweep "${train[@]}" --ranks 4 --pp 1,2 --tp 1,2 --ep 2 --tensor-leaves 2 -J mesh.jsonl
same "stages and tensor ranks" "$(rows mesh.jsonl '[(x["pp"], x["tp"], x["ep"], x["dp"]) for x in r]')" \
  "[(1, 1, 2, 2), (1, 2, 2, 2), (2, 1, 2, 1), (2, 2, 2, 1)]"
same "their losses" "$(rows mesh.jsonl 'len({x["val_loss"] for x in r})')" 1
matches '^ *pp [|] tp [|] experts [|] topk [|]'
matches '^\[4/4\] pp=2 tp=2 E=4 k=' stderr
# Token ids as a text; --tokens is also a synonym of --tokens-per-rank for a layer.
LC_ALL=C sed -z 's/./&\x01/g' "$text" >ids
expect 0 "a sweep on ids" "$moe" sweep --measure train "${model[@]:2}" --tokens ids --vocab-size 512 --steps 1 --ranks 1 -q -o jsonl
same "a sweep on ids" "$(rows stdout '[(x["status"], "--vocab-size 512" in x["settings"], "ids" in x["settings"], 5 < x["val_loss"] < 8) for x in r]')" \
  "[('ok', True, False, True)]"
expect 0 "--tokens of a layer" "$moe" sweep "${layer[@]/--tokens-per-rank/--tokens}" --ranks 1 -r 1 -q -o jsonl
same "--tokens of a layer" "$(rows stdout '[(x["tok_per_rank"], "--tokens-per-rank 32 " in x["settings"]) for x in r]')" "[(32, True)]"
# The identity of a row: everything but speed has the same bits in every run.
facts='sorted((x["settings"], x["val_loss"], x["drop_end"], x["status"]) for x in r)'
wanted=$(rows whole.jsonl "$facts")

# Rows of another build, and of builds from before rows named them, cannot be resumed.
sed 's/"commit":"[^"]*"/"commit":"0123456789ab"/' whole.jsonl >other.jsonl
cp other.jsonl other_before.jsonl
refused 2 "--resume is 'other.jsonl', expected rows of this build, moe $(value whole.jsonl version 1), commit $(value whole.jsonl commit 1)" sweep \
  "${train[@]}" "${axes[@]}" --resume other.jsonl
refused 2 "; line 1 is of moe $(value whole.jsonl version 1), commit 0123456789ab, " sweep "${train[@]}" "${axes[@]}" --resume other.jsonl
cmp -s other.jsonl other_before.jsonl || fail "rows of another build were written to"
sed 's/"version":"[^"]*"/"version":null/' whole.jsonl >other.jsonl
refused 2 "; line 1 is of an unknown build" sweep "${train[@]}" "${axes[@]}" --resume other.jsonl
same "provenance" "$(rows whole.jsonl 'all(x[k] for x in r for k in ("version", "commit", "build", "host", "cpu", "date"))')" True

# kill -9 at any moment loses at most the current point.
"$moe" sweep "${train[@]}" "${axes[@]}" -J killed.jsonl >/dev/null 2>&1 &
pid=$!
until [[ -s killed.jsonl ]]; do sleep 0.02; done
kill -9 $pid
wait $pid 2>/dev/null
printf '{"schema":"moe.sweep/1","measure":"tr' >>killed.jsonl # as if in the middle of a row
expect 0 "--resume after kill -9" "$moe" sweep "${train[@]}" "${axes[@]}" --resume killed.jsonl
same "rows after kill -9" "$(rows killed.jsonl "$facts")" "$wanted"

# Ctrl-C: the rows so far, and the command that resumes. A shell makes its background jobs ignore
# the signal, and so these do.
env --default-signal=INT "$moe" sweep "${train[@]}" "${axes[@]}" --steps 20 -J 'stopped run.jsonl' >stdout 2>stderr &
pid=$!
until [[ -s 'stopped run.jsonl' ]]; do sleep 0.02; done
kill -INT $pid
wait $pid
same "exit code of an interrupt" $? 130
grep -qE "interrupted with [1-5] of 6 points done; go on with:" stderr || fail "interrupt: $(cat stderr)"
(($(wc -l <stdout) == 1 + $(wc -l <'stopped run.jsonl'))) || fail "interrupt: $(cat stdout)"
again=$(grep -F -- "--resume" stderr)
expect 0 "the command after an interrupt: $again" bash -c "$again"
same "rows after an interrupt" "$(rows 'stopped run.jsonl' 'len(r), len({x["settings"] for x in r})')" "(6, 6)"

# Errors count as done, except with --retry.
cp errors.jsonl again.jsonl
expect 1 "--resume with an error row" "$moe" sweep "${layer[@]}" --num-experts 2,4 --topk 1,3 --ranks 1 -r 1 --resume again.jsonl
same "an error row stays" "$(wc -l <again.jsonl)" 4
expect 1 "--retry" "$moe" sweep "${layer[@]}" --num-experts 2,4 --topk 1,3 --ranks 1 -r 1 --resume again.jsonl --retry
same "--retry" "$(wc -l <again.jsonl)" 5

# Seeds of repetitions are seed, seed + 1, ...
run "$moe" sweep "${train[@]}" --ranks 1 --seed 7 -r 2 -q -o jsonl
both=$(rows stdout 'r[0]["val_loss"]')
one=$(for seed in 7 8; do "$moe" sweep "${train[@]}" --ranks 1 --seed $seed -q -o jsonl; done | rows /dev/stdin '(r[0]["val_loss"] + r[1]["val_loss"]) / 2')
same "mean of two seeds" "$both" "$one"

expect 4 "full standard output" bash -c '"$0" sweep "$@" --ranks 1 -r 1 >/dev/full' "$moe" "${layer[@]}"
expect 4 "a full disk" "$moe" sweep "${layer[@]}" --ranks 1 -r 1 -J /dev/full
expect 0 "--help" "$moe" sweep --help
grep -qF "4-64*2            4, 8, 16, 32, 64" stdout || fail "--help: no notation"

if [[ -n $mpiexec ]]; then
  expect 1 "three processes" "$mpiexec" -n 3 "$moe" sweep "${train[@]}" --ep 1,2,3 --capacity-factor none,1 -J mpi.jsonl
  same "three processes" "$(rows mpi.jsonl '[(x["ep"], x["backend"], x["status"]) for x in r]')" \
    "[(1, 'mpi', 'ok'), (1, 'mpi', 'ok'), (2, 'mpi', 'error'), (2, 'mpi', 'error'), (3, 'mpi', 'ok'), (3, 'mpi', 'ok')]"
  (($(wc -l <stdout) == 7)) || fail "three processes: $(cat stdout)"
  head -n 3 mpi.jsonl >part.jsonl
  expect 1 "--resume on three processes" "$mpiexec" -n 3 "$moe" sweep "${train[@]}" --ep 1,2,3 --capacity-factor none,1 --resume part.jsonl
  same "--resume on three processes" "$(rows part.jsonl "$facts")" "$(rows mpi.jsonl "$facts")"
  expect 0 "layers on three processes" "$mpiexec" -n 3 "$moe" sweep "${layer[@]}" --num-experts 4,8 -r 1 -q -o jsonl
  same "layers on three processes" "$(rows stdout '[(x["ranks"], x["experts"]) for x in r]')" "[(3, 4), (3, 8)]"
  expect 6 "a point that diverges" "$mpiexec" -n 3 "$moe" sweep "${train[@]}" --ep 1 --lr 1e30 --num-experts 4,8 -J ended.jsonl
  same "it is a row" "$(rows ended.jsonl '[(x["experts"], "gradient norm is" in x["error"]) for x in r]')" "[(4, True)]"
  expect 6 "--resume behind it" "$mpiexec" -n 3 "$moe" sweep "${train[@]}" --ep 1 --lr 1e30 --num-experts 4,8 --resume ended.jsonl
  same "--resume behind it" "$(rows ended.jsonl '[x["experts"] for x in r]')" "[4, 8]"
  expect 2 "other ranks than the launcher's" "$mpiexec" -n 3 "$moe" sweep "${layer[@]}" --ranks 1,3
  grep -qF "ranks is 1, the launcher" stderr || fail "other ranks: $(cat stderr)"
fi
finish
