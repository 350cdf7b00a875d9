#!/usr/bin/env bash
# `moe bench` on threads (mpi_commands.sh has processes): bash bench.sh <moe>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$work" || exit 1
# Exactly three calls of two sizes: these runs test results, not speed.
short=(-b 4K -e 16K -f 4 -n 3 -w 1 -T 0)

# Bad calls.
cat >trace <<'END'
{"schema":"moe.routing/1","ranks":6,"expert_parallel_size":6,"num_experts":8,"topk":2,"hidden_size":16,"dtype":"bf16","moe_layers":2}
{"step":0,"layer":0,"tokens":[9,9,9,9,9,9],"slots":[[9,5,2,2,0,0,0,0],[9,5,2,2,0,0,0,0],[9,5,2,2,0,0,0,0],[9,5,2,2,0,0,0,0],[9,5,2,2,0,0,0,0],[9,5,1,1,0,0,0,0]]}
{"step":0,"layer":1,"tokens":[9,9,9,9,9,0],"slots":[[2,2,2,2,2,2,3,3],[2,2,2,2,2,2,3,3],[2,2,2,2,2,2,3,3],[2,2,2,2,2,2,3,3],[2,2,2,2,2,2,3,3],[0,0,0,0,0,0,0,0]]}
END
refused 2 "4 ranks for routing recorded on 6, expected 1, 2, 3, 6" bench alltoallv --routing trace:trace
sed '2s/9,5/9,50/' trace >bad_trace
refused 3 "bad_trace:2: slots[0][1] is 50, expected a whole number from 0 to 9" bench alltoallv --ranks 6 --routing trace:bad_trace

# Rows of every operation; bench_ranks_test has every number of ranks, routing, type and algorithm.
for call in alltoall allreduce allgather memcpy p2p "alltoallv --routing zipf:1.2" "reducescatter -d i64" \
  "alltoallv --routing hot_rank:0.9 --dispatch hierarchical --node-size 1"; do
  # shellcheck disable=SC2086
  expect 0 "$call" "$moe" bench $call --ranks 3 "${short[@]}" -oe jsonl
  rows=$([[ $call == p2p ]] && echo $((2 * 3 * 3)) || echo 2)
  (($(grep -c '"nwrong":0,.*"status":"ok","error":null,"busiest_tx":.*,"settings":"[^"]*"}$' stderr) == rows)) ||
    fail "$what: not $rows right rows: $(cat stderr)"
  says "# Out of bounds values : 0 OK"
done
run "$moe" bench alltoall --ranks 1 "${short[@]}"
grep -q "With one rank nothing crosses a bus" stdout || fail "one rank: no note"

# A traffic matrix, seeds and hosts by flag.
printf '0 1\n3 0 # half as much comes back\n' >matrix
expect 0 "matrix" "$moe" bench alltoallv --routing matrix:matrix --ranks 2 -b 3000 -e 3000 -n 3 -T 0 --node-size 1 -o jsonl
[[ $(value stdout bytes_cross_host) == 4000 && $(value stdout bytes_self) == 0 &&
  $(value stdout size_bytes) == 3000 && $(value stdout hosts) == 2 ]] || fail "matrix: $(cat stdout)"
# The same from a file of settings, which flags override.
echo '{"ranks": 3, "routing": "matrix:matrix", "minbytes": "3000", "maxbytes": "3000", "iters": 3}' >config.json
expect 0 "--config" "$moe" bench alltoallv --config config.json --ranks 2 -T 0 --node-size 1 -o jsonl
[[ $(value stdout bytes_cross_host) == 4000 && $(value stdout ranks) == 2 ]] || fail "--config: $(cat stdout)"
for seed in 1 1 2; do
  run "$moe" bench alltoallv --routing ragged --seed $seed --ranks 3 "${short[@]}" -o jsonl
  sizes+=("$(value stdout size_bytes)")
done
[[ ${sizes[0]} == "${sizes[1]}" && ${sizes[0]} != "${sizes[2]}" ]] || fail "seeds: ${sizes[*]}"

# Forms. nccl-tests' thirteen columns, all with figures; bench_test checks their widths and the
# words around them.
for call in "alltoall --dispatch direct" "alltoallv --routing zipf:1" allreduce allgather reducescatter; do
  # shellcheck disable=SC2086
  expect 0 "$call --format nccl" "$moe" bench $call --ranks 2 -b 64K -e 256K -n 3 -T 0 --format nccl
  (($(grep -cE '^[0-9 ]{12}  [0-9 ]{12}     float  (   sum|  none)      -1(  [0-9. ]{7}  [0-9. ]{6}  [0-9. ]{6}       0){2}$' stdout) == 2)) ||
    fail "$call --format nccl: $(cat stdout)"
  matches "^# Avg bus bandwidth    : [0-9.]+ $"
done
expect 0 "p2p --format nccl" "$moe" bench p2p --ranks 2 -b 64K -e 64K -n 3 -T 0 -c 0 --format nccl
(($(grep -cE '^ +65536 .* N/A  .* N/A$' stdout) == 4)) || fail "p2p --format nccl: $(cat stdout)"
# Every row states its origin.
small="--tokens 32 --hidden-size 16 --num-experts 4"
for call in "alltoall --ranks 2 -b 4K -e 4K" "layer --ranks 2 $small --moe-ffn-hidden-size 8"; do
  # shellcheck disable=SC2086
  expect 0 "$call -o jsonl" "$moe" bench $call -n 1 -T 0 -o jsonl
  origin='"version":"[0-9.]+","commit":"[^"]+","host":"[^"]+","cpu":"[^"]+","gpu":null,"date":"20[0-9-]+T[0-9:]+Z"'
  (($(grep -cE "$origin" stdout) == $(wc -l <stdout))) || fail "$call: $(cat stdout)"
done
expect 0 "-o csv" "$moe" bench alltoall --ranks 2 "${short[@]}" -o csv -J rows.json
awk -F, 'NR == 1 { n = NF } NF != n || n < 30 { exit 1 } END { exit NR != 3 }' stdout || fail "-o csv: $(cat stdout)"
[[ $(head -c 1 rows.json) == "[" && $(grep -c '"op":"alltoall"' rows.json) == 2 ]] || fail "-J: $(cat rows.json)"
expect 0 "p2p" "$moe" bench p2p --ranks 3 -b 4K -e 4K -n 3 -T 0
(($(grep -cE '^ +[012]( +[0-9.]+.*){3}$' stdout) == 3)) || fail "p2p: $(cat stdout)"

# A whole layer.
layer=(layer --tokens 32 --hidden-size 16 --moe-ffn-hidden-size 8 --num-experts 5 -n 3 -T 0)
for ranks in 1 3; do
  expect 0 "layer on $ranks ranks" "$moe" bench "${layer[@]}" --ranks "$ranks" -oe jsonl
  (($(grep -c '"nwrong":0,"status":"ok"' stderr) == 12)) || fail "layer: $(cat stderr)"
done
(($(grep -cE '^  (forward|backward) +(gate|plan|dispatch|expert|combine|all) ' stdout) == 12)) || fail "layer: $(cat stdout)"
expect 1 "layer --fail-if" "$moe" bench "${layer[@]}" --ranks 4 --dispatch hierarchical --node-size 2 -d bf16 --fail-if 'share_pct==100'
expect 0 "layer --pack-weights" "$moe" bench "${layer[@]}" --ranks 2 --pack-weights -oe jsonl
(($(grep -c '"nwrong":0,"status":"ok"' stderr) == 12)) || fail "layer --pack-weights: $(cat stderr)"
expect 0 "layer --forward-only" "$moe" bench "${layer[@]}" --ranks 3 --forward-only -oe jsonl
(($(grep -c '"pass":"forward",.*"nwrong":0,"status":"ok"' stderr) == 6)) || fail "layer --forward-only: $(cat stderr)"
[[ $(wc -l <stderr) == 6 ]] || fail "layer --forward-only: rows of another pass: $(cat stderr)"
refused 2 "--moe-router-topk is 2, expected none: the trace says it" bench layer --ranks 6 --routing trace:trace --topk 2
refused 2 "--expert-tensor-parallel-size is 2, expected none: the trace says it" bench layer --ranks 6 --routing trace:trace --etp 2 --tensor-leaves 2
expect 0 "layer --routing" "$moe" bench "${layer[@]}" --ranks 3 --routing zipf:1.2 --capacity-factor 1 -oe jsonl \
  --fail-if 'tokens_per_s<=0 || dead_experts>5'
(($(grep -c '"routing":"zipf:1.2",.*"nwrong":0,"status":"ok"' stderr) == 12)) || fail "layer --routing: $(cat stderr)"
grep -q '^# [0-9]* tokens/s, drop ' stdout || fail "layer --routing: $(cat stdout)"

# Recorded routing.
for ranks in 2 6; do
  expect 0 "trace on $ranks ranks" "$moe" bench alltoallv --routing trace:trace --ranks "$ranks" -n 4 -T 0 -o jsonl
  grep -q '"dtype":"bf16".*"nwrong":0,' stdout || fail "trace on $ranks ranks: $(cat stdout)"
done
# One rank: 106 and 90 slots of 16 x 2 bytes, two calls each.
run "$moe" bench alltoallv --routing trace:trace --ranks 1 -n 4 -T 0 -o jsonl
grep -q '"size_bytes":3136,' stdout || fail "bytes of a trace: $(cat stdout)"
expect 0 "trace of given sizes" "$moe" bench alltoallv --routing trace:trace --ranks 6 --dispatch hierarchical --node-size 2 "${short[@]}"
expect 0 "layer of a trace" "$moe" bench layer --routing trace:trace --ranks 3 -n 3 -T 0 --moe-ffn-hidden-size 8 -o jsonl
grep -q '"hidden":16,.*"routing":"trace:trace",.*"nwrong":0,' stdout || fail "layer of a trace: $(cat stdout)"

# Settings without a key of their own that change results: a report keeps such rows apart.
run "$moe" bench alltoall --ranks 2 --node-size 1 --dispatch hierarchical "${short[@]}" -oe jsonl
(($(grep -c '"settings":"--node-size 1"}$' stderr) == 2)) || fail "settings: $(cat stderr)"

# Bounds: exit code 1 and the row, after the table.
expect 1 "--fail-if" "$moe" bench allgather --ranks 2 "${short[@]}" --fail-if 'time>0 && size==16384'
grep -qF "holds at size 16384" stderr || fail "--fail-if: $(cat stderr)"
grep -q "^# Avg bus" stdout || fail "--fail-if: no table"
expect 0 "--fail-if that does not hold" "$moe" bench allgather --ranks 2 "${short[@]}" --fail-if 'busbw<0 || wrong>0'
expect 0 "-c 0: nothing was checked" "$moe" bench allgather --ranks 2 "${short[@]}" -c 0 --fail-if 'wrong>=0'
grep -qE '  +N/A  ' stdout || fail "-c 0: #wrong is not N/A"
expect 4 "full standard output" bash -c '"$0" bench alltoall -n 1 -T 0 >/dev/full' "$moe"
expect 0 "--help" "$moe" bench --help
grep -qF "busbw    algbw (n-1)/n" stdout || fail "--help: no formulas"
cp stdout help
# For one operation: the flags that it reads, and no others; together they are all flags.
: >of_one
for operation in $(sed -n '/^Operations/,/^$/s/^  \([a-z0-9]*\) .*/\1/p' help); do
  expect 0 "$operation --help" "$moe" bench "$operation" --help
  head -n 1 stdout | grep -qx "usage: moe bench $operation \[flags\]" || fail "$operation --help: $(head -n 1 stdout)"
  flags_in stdout >>of_one
  grep -vxFf help stdout | sed 1,3d | grep . && fail "$operation --help: lines of its own"
  (($(wc -l <stdout) < $(wc -l <help))) || fail "$operation --help: $(wc -l <stdout) lines of $(wc -l <help)"
done
[[ $(sort -u of_one) == "$(flags_in help)" ]] || fail "flags in no help of one operation: $(comm -3 <(sort -u of_one) <(flags_in help))"
run "$moe" bench allreduce --help
! grep -qE -- '--routing|--tokens' stdout || fail "allreduce --help: $(grep -E -- '--routing|--tokens' stdout)"

finish
