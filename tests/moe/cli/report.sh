#!/usr/bin/env bash
# `moe report` end to end: bash report.sh <moe> <tests/moe/cli/report/data>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
data=$2
cd "$work" || exit 1

run "$moe" train "${model[@]}" --ranks 2 --steps 12 --capacity-factor 1 --quiet --out train
expect 0 "a training run"
run "$moe" bench alltoall --ranks 2 -b 4K -e 64K -T 0.1 -J bench.json
expect 0 "a benchmark"
run "$moe" bench p2p --ranks 3 -b 64K -e 64K -T 0.05 -J pairs.json
expect 0 "pairs"
for op in gate permute combine gemm; do
  run "$moe" bench $op --tokens 32 -n 2 -T 0 -J $op.json
  expect 0 "$op"
done

# The page: strict HTML, SVG that is XML, nothing to load, the script that its policy names.
cat >check.py <<'PYTHON'
import base64, hashlib, html.parser, re, sys
import xml.etree.ElementTree as xml

page = open(sys.argv[1], encoding="utf-8").read()
VOID = {"meta", "link", "br"}

class Strict(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.ids = [], set()
    def handle_starttag(self, tag, attributes):
        assert tag not in ("img", "iframe", "link", "object", "base"), f"<{tag}>"
        for name, value in attributes:
            assert not name.startswith("on"), f"{tag} {name}"
            assert name not in ("src", "srcset", "style"), f"{tag} {name}"
            if name == "href":
                assert value.startswith("#"), value
            if name == "id":
                assert value not in self.ids, f"two of id {value}"
                self.ids.add(value)
        if tag not in VOID:
            self.open.append(tag)
    def handle_startendtag(self, tag, attributes):
        pass
    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

strict = Strict()
strict.feed(page)
strict.close()
assert not strict.open, strict.open
for link in re.findall(r'href="#([^"]*)"', page):
    assert link in strict.ids, link
scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
assert len(scripts) == 1
digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
assert f"'sha256-{digest}'" in page, f"kScriptHash is not {digest}"
assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
charts = []
for drawing in re.findall(r'<svg class="drawing".*?</svg>', page, re.S):
    root = xml.fromstring(drawing)
    marks = [e for e in root.iter() if "mark" in e.get("class", "").split()]
    assert len(marks) == int(root.get("data-marks")) > 0, root.get("aria-label")
    assert all(e.find("{http://www.w3.org/2000/svg}title") is not None for e in marks)
    charts.append(root.get("aria-label"))
print("\n".join(charts))
PYTHON

# page <flags...>: writes out.html and leaves the titles of its charts in `charts`.
page() {
  run "$moe" report "$@" --out out.html
  expect 0 "$*"
  grep -qE '^wrote out.html, [0-9.]+ KiB$' stdout || fail "$*: said: $(cat stdout)"
  python3 check.py out.html >charts 2>problem || fail "$*: $(tail -n 1 problem)"
}
page train bench.json pairs.json gate.json permute.json combine.json gemm.json "$data/sweep.jsonl"
for chart in "Loss" "Learning rate" "Gradient norm" "Speed" "Dropped slots" \
  "MaxVio: load of the busiest expert" "Time of a step by phase" \
  "Expert load, MoE layer 1: train" "Capacity factor against dropped slots" \
  "Capacity factor against loss" "Speed against loss" "alltoall: bus bandwidth over size" \
  "p2p: GB/s between ranks, 64 KiB" "Kernels: percent of the limit"; do
  grep -qxF "$chart" charts || fail "no chart '$chart'"
done
page --compare "$data/bench_before.json" "$data/bench_after.json"
grep -qxF "alltoallv: skew against bus bandwidth" charts || fail "no skew chart"
grep -qxF "Change from bench_before to bench_after" charts || fail "no comparison"
cp out.html again.html
page --compare "$data/bench_before.json" "$data/bench_after.json"
cmp -s out.html again.html || fail "the same inputs gave other bytes"

# Names and texts from outside stay texts.
evil='<script>alert(1)</script>"&'
mkdir evil
sed "s|zipf:1|<img onerror='x'>|" "$data/bench_before.json" >'evil/<b onclick=x>&.json'
page 'evil/<b onclick=x>&.json' --title "$evil"
page ./train/../train/metrics.jsonl train --title "$(printf '\xff\xfe')"

# A bound.
run "$moe" report bench.json --out out.html --fail-if 'busbw < 1e-9 || wrong > 0' -q
expect 0 "a bound that is kept"
[[ ! -s stdout ]] || fail "--quiet is not"
run "$moe" report bench.json --out out.html --fail-if 'busbw < 0.9*base'
expect 2 "a base without a comparison"
grep -qF "moe report --compare A B" stderr || fail "a base without a comparison: $(cat stderr)"
run "$moe" report --compare bench.json bench.json --out out.html --fail-if 'busbw < 0.9*base'
expect 0 "a run beside itself"
run "$moe" report --compare "$data/bench_before.json" "$data/bench_after.json" --out out.html \
  --fail-if 'busbw < 0.99*base'
expect 1 "a base that is broken"
rm out.html
run "$moe" report --compare "$data/bench_before.json" "$data/bench_after.json" --out out.html \
  --fail-if 'worse_pct > 5'
expect 1 "a bound that is broken"
[[ -s out.html ]] || fail "a broken bound: no page"
(($(wc -l <stderr) == 1)) && grep -qF "holds for" stderr || fail "a broken bound: $(cat stderr)"

# refused <exit code> <part of the line> <flags...>
refused() {
  local code=$1 part=$2
  shift 2
  rm -f out.html
  run "$moe" report --out out.html "$@"
  expect "$code" "$*"
  (($(wc -l <stderr) == 1)) || fail "$*: $(wc -l <stderr) lines on stderr"
  grep -qF -- "$part" stderr || fail "$*: no '$part' in: $(cat stderr)"
  [[ ! -s stdout && ! -e out.html ]] || fail "$*: left output"
}
refused 2 "no input, expected moe report RUN..."
refused 2 "'none'" none
refused 2 "metrics.jsonl" evil
refused 2 "unknown flag '--titel'; did you mean '--title'?" bench.json --titel x
refused 2 "--compare expects two inputs" --compare bench.json
refused 2 "--compare expects two inputs" --compare=bench.json bench.json
refused 2 "expected two of one command" --compare bench.json train
refused 2 "expected a column" bench.json --fail-if 'val_loss > 1'
refused 4 "--out: cannot write '/proc/out'" bench.json --out /proc/out
refused 2 "--out" bench.json --out none/out.html
cp bench.json kept.json
refused 2 "expected another file than RUN" train bench.json --out ./bench.json
cmp -s bench.json kept.json || fail "an input was written to"
cp train/metrics.jsonl kept.jsonl
refused 2 "expected another file than RUN" train --out train/metrics.jsonl
cmp -s train/metrics.jsonl kept.jsonl || fail "an input was written to"
: >empty
refused 3 "empty: holds no rows" empty
echo '{"a": 1}' >unknown.json
refused 3 "unknown.json: a row of no known command" unknown.json
(head -n 3 train/metrics.jsonl && echo '{"step":') >cut.jsonl
refused 3 "cut.jsonl: malformed JSON" train cut.jsonl
refused 3 "(line 4, " train cut.jsonl
finish
