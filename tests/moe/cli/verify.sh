#!/usr/bin/env bash
# `moe verify`: bash verify.sh <moe> [<mpiexec>]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
mpiexec=${2:-}

# Everything as it comes.
expect 0 "defaults" "$moe" verify
grep -qE "^verified [0-9]+ one-rank products .*: 0 failed" "$work/stdout" || fail "no summary"
for gate in mixtral deepseek-v3 gshard switch gpt-oss llama4 qwen2 longcat expert-choice \
  noisy-topk sinkhorn sparsemixer; do
  grep -qE "^$gate +8 ranks .* one rank .* ok" "$work/stdout" || fail "$gate: no layout of 8 ranks"
done

# Layouts of as many processes as mpirun starts, and of fewer.
if [[ -n $mpiexec ]]; then
  expect 0 "processes" "$mpiexec" -n 4 "$moe" verify --numerics layout-invariant
  for gate in mixtral deepseek-v3 gshard switch gpt-oss llama4 qwen2 longcat expert-choice \
    noisy-topk sinkhorn sparsemixer; do
    matches "^$gate +1 rank .* layout-invariant +float64 .* ok"
    for ranks in "1 rank" "2 ranks" "3 ranks" "4 ranks"; do
      matches "^$gate +$ranks ep . mpi .* layout-invariant +one rank .* ok"
    done
  done
  (($(grep -c "^verified " "$work/stdout") == 1)) || fail "not one process reports"
  expect 0 "as many as there are, if they are none of the default" "$mpiexec" -n 5 "$moe" verify --router switch -q -v
  matches "^switch +5 ranks ep 5 mpi "
  expect 1 "a planted fault on processes" "$mpiexec" -n 2 "$moe" verify --inject gradient-scale-by-ep -q
  matches "experts.down_proj.weight.* FAILED"
  expect 2 "more ranks than processes" "$mpiexec" -n 2 "$moe" verify --layouts ranks=2,4
  says "ranks is '4', expected at most the 2 that the launcher started" "$work/stderr"
  expect 2 "threads under a launcher" "$mpiexec" -n 2 "$moe" verify --layouts transport=local
  says "transport is 'local', expected mpi, that of the launch" "$work/stderr"
fi

# A planted fault is found; verify_test plants all of them.
expect 0 "--inject help" "$moe" verify --inject help
says gradient-scale-by-ep
expect 1 "a planted fault" "$moe" verify --inject gradient-scale-by-ep --layouts 'ranks=1,2,4 transport=local' -q
matches "experts.down_proj.weight.* FAILED"
expect 0 "a fault that one rank cannot show" "$moe" verify --inject gradient-scale-by-ep --numerics fast --layouts ranks=1 -q
says MISSED

# A model, on threads and on processes.
expect 0 "a hybrid layout" "$moe" verify --layouts 'ranks=8 ep=2 dispatch=staged overlap=2 capacity=none etp=2 tp=2 pp=2 zero=2 schedule=zb-h1 offload=optimizer:file='"$work" -o jsonl
says '"etp":2,"tp":2,"pp":2,"vp":1,"schedule":"zb-h1","zero":2,"offload":"optimizer:file='"$work"'","recompute":"none"'
says '"tensor":"weights_xxh3"'
if [[ -n $mpiexec ]]; then
  expect 0 "a model on processes" "$mpiexec" -n 2 "$moe" verify --layouts 'ranks=2 overlap=1 capacity=none pp=2 schedule=all zero=all' -q
  says " 0 failed"
fi
expect 1 "a fault of models" "$moe" verify --inject lost-micro-batch --layouts 'ranks=2 ep=2 tp=2' -q
matches "loss .* step 1: .* FAILED"
expect 2 "parts that do not fit" "$moe" verify --layouts 'ranks=2 pp=4'
says "no values of ranks, ep, pp fit together" "$work/stderr"
expect 2 "a fault of one layer in a model" "$moe" verify --layouts pp=2 --inject stale-count
says "expected tree-order or lost-micro-batch beside pp of --layouts" "$work/stderr"
expect 2 "fast numerics of a model" "$moe" verify --layouts zero=1 --numerics fast
says "expected layout-invariant for a model" "$work/stderr"

# Forms.
expect 0 "-o jsonl" "$moe" verify --router mixtral --layouts 'ranks=1,2 transport=local' -o jsonl
if command -v python3 >/dev/null; then
  python3 - "$work/stdout" <<'PY' || fail "-o jsonl: malformed"
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
assert {r["numerics"] for r in rows} == {"fast", "layout-invariant"}
assert {r["against"] for r in rows} == {"float64", "one rank"}
assert all(r["verdict"] == "ok" for r in rows)
exact = [r for r in rows if r["numerics"] != "fast" and r["against"] == "one rank"]
assert exact and all(r["max_ulp"] == 0 and r["differing"] == 0 for r in exact)
assert any(r["max_of_bound"] > 0 for r in rows)
PY
fi
expect 0 "-o csv -oe md" "$moe" verify --router mixtral --layouts 'ranks=1 transport=local' -o csv -oe md
head -n 1 "$work/stdout" | grep -q "^router,ranks,ep," || fail "-o csv: no header"
head -n 1 "$work/stderr" | grep -q "^| router | ranks " || fail "-oe md: no header"

# Other shapes.
expect 0 "bf16, seven experts" "$moe" verify --dtype bf16 --router deepseek-v3 --num-experts 7 --topk 3 --hidden-size 33 \
  --layouts 'ranks=1,3,5 transport=local' -q
expect 0 "bf16 in tiles" "$moe" verify --dtype bf16 --bf16-order tile --router mixtral --hidden-size 70 \
  --layouts 'ranks=1,3 transport=local' -q
expect 0 "f16" "$moe" verify --dtype f16 --router deepseek-v3 --num-experts 7 --topk 3 --hidden-size 33 \
  --layouts 'ranks=1,3 transport=local' -q
expect 0 "padding" "$moe" verify --moe-pad-expert-input-to-capacity --capacity-factor 1.25 --router mixtral \
  --layouts 'ranks=2 transport=local' -q
finish
