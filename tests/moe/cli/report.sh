#!/usr/bin/env bash
# `moe report` end to end, in a browser too where there is one (Debian: chromium):
#   bash report.sh <moe> <tests/moe/cli/report/data>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
data=$2
cd "$work" || exit 1

expect 0 "a training run" "$moe" train "${model[@]}" --ranks 2 --steps 12 --capacity-factor 1 --quiet --out train
expect 0 "a benchmark" "$moe" bench alltoall --ranks 2 -b 4K -e 64K -T 0.1 -J bench.json
expect 0 "pairs" "$moe" bench p2p --ranks 3 -b 64K -e 64K -T 0.05 -J pairs.json
expect 0 "layer" "$moe" bench layer --hidden-size 64 --moe-ffn-hidden-size 64 --tokens 32 -n 2 -T 0 -J layer.json

# The page: strict HTML, nothing to load, only the scripts that its policy names, visible colours.
cat >check.py <<'PYTHON'
import base64, hashlib, html.parser, json, re, sys

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
library, script = re.findall(r"<script>(.*?)</script>", page, re.S)
digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in (library, script)]
assert "script-src " + " ".join(f"'sha256-{d}'" for d in digests) + ";" in page
assert "Released under the MIT License" in library
own = page.replace(library, "")
assert not re.search(r"url\(|@import|https?://|<!--", own)

# WCAG 2.1: relative luminance, and the contrast of two colours of the style.
def contrast(inks, *names):
    def luminance(ink):
        channels = [int(ink[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear))
    low, high = sorted(luminance(inks[name]) for name in names)
    return (high + 0.05) / (low + 0.05)

light, dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part)) for part in own.split("@media (prefers", 1))
assert len(light) == len(dark) == 13
for inks in (light, dark):
    for series in range(8):
        assert contrast(inks, f"s{series}", "paper") >= 3, series  # 1.4.11: graphics
    for text in ("text", "faint"):
        assert min(contrast(inks, text, "paper"), contrast(inks, text, "ground")) >= 4.5, text  # 1.4.3: text

figures = re.findall(r'<figure class="chart" id="([^"]*)">.*?aria-label="([^"]*)".*?'
                     r'<script type="application/json">(.*?)</script>', own, re.S)
charts = {name: json.loads(data) for name, _, data in figures}
json.dump(charts, open("charts.json", "w"))
print("\n".join(html.unescape(title) for _, title, _ in figures))
PYTHON

# page <flags...>: writes out.html and leaves the titles of its charts in `charts`.
page() {
  expect 0 "$*" "$moe" report "$@" --out out.html
  grep -qE '^wrote out.html, [0-9.]+ KiB$' stdout || fail "$*: said: $(cat stdout)"
  python3 check.py out.html >charts 2>problem || fail "$*: $(tail -n 1 problem)"
}
page train bench.json pairs.json layer.json "$data/sweep.jsonl" \
  --compare "$data/bench_before.json" "$data/bench_after.json"
cp out.html page.html

# The data of charts equals the rows of their runs.
cat >rows.py <<'PYTHON'
import json, math, sys

charts = json.load(open("charts.json"))
def points(chart, name, x="x", y="y"):
    series = next(s for s in charts[chart]["series"] if s["name"] == name)
    return [(p[x], p[y]) for p in series["points"]]
def equal(got, expected):
    got, expected = list(got), list(expected)
    assert len(got) == len(expected), (got, expected)
    assert all(math.isclose(a, b, rel_tol=1e-12) for g, e in zip(got, expected) for a, b in zip(g, e)), (got, expected)

lines = [json.loads(line) for line in open("train/metrics.jsonl")]
steps, last = [line for line in lines if "step" in line], lines[-1]
equal(points("train-loss", "train"), [(s["step"], s["loss"]) for s in steps])
equal(points("train-drops", "train"), [(s["step"], 100 * s["drop_fraction"]) for s in steps])
equal(points("train-loss", "train, validation")[-1:], [(last["steps"], last["val_loss"])])
load = charts["train-load-0-1"]
experts, columns = len(load["y"]["names"]), len(load["x"]["names"])
assert columns == len(steps)
for c, step in enumerate(steps):
    slots = step["expert_load"][1]
    equal([(load["values"][e * columns + c],) for e in range(experts)],
          [(n * experts / sum(slots),) for n in slots])
phases = {s["name"]: s["values"][0] for s in charts["train-phases"]["series"]}
assert math.isclose(sum(phases.values()), sum(s["step_ms"] for s in steps[1:]) / (len(steps) - 1), rel_tol=1e-9)

pairs = json.load(open("pairs.json"))
cells = charts["bench-pairs-0"]["values"]
for row in pairs:
    cell = cells[3 * row["source"] + row["destination"]]
    assert cell == (None if row["source"] == row["destination"] else row["algbw_gbytes_per_s"]), row

sweep = [json.loads(line) for line in open(sys.argv[1])]
expected = sorted((r["tok_s"], r["val_loss"], r["tok_s_sd"]) for r in sweep if r["status"] == "ok")
drawn = [s for s in charts["sweep-speed-loss"]["series"] if s["style"] == "points"]
equal(sorted((p["x"], p["y"], p["dx"]) for s in drawn for p in s["points"]), expected)
PYTHON
python3 rows.py "$data/sweep.jsonl" 2>problem || fail "rows: $(tail -n 1 problem)"
for chart in "Loss" "Learning rate" "Gradient norm" "Speed" "Dropped slots" \
  "MaxVio: load of the busiest expert" "Time of a step by phase" \
  "Expert load, MoE layer 1: train" "Capacity factor against dropped slots" \
  "Capacity factor against loss" "Experts against loss" "Speed against loss" "Parameters against loss" "alltoall: bus bandwidth over size" \
  "p2p: GB/s between ranks, 64 KiB" \
  "alltoallv: skew against bus bandwidth" "Change from bench_before to bench_after"; do
  grep -qxF "$chart" charts || fail "no chart '$chart'"
done
for times in once twice; do
  page --compare "$data/bench_before.json" "$data/bench_after.json"
  [[ $times == twice ]] || cp out.html again.html
done
cmp -s out.html again.html || fail "the same inputs gave other bytes"

# Names and texts from outside remain texts.
evil='<script>alert(1)</script>"&'
mkdir evil
sed "s|zipf:1|<img onerror='x'>|" "$data/bench_before.json" >'evil/<b onclick=x>&.json'
page 'evil/<b onclick=x>&.json' --title "$evil"
page ./train/../train/metrics.jsonl train --title "$(printf '\xff\xfe')"

# A bound.
expect 0 "a bound that is kept" "$moe" report bench.json --out out.html --fail-if 'busbw < 1e-9 || wrong > 0' -q
[[ ! -s stdout ]] || fail "--quiet is not"
expect 0 "a run beside itself" "$moe" report --compare bench.json bench.json --out out.html --fail-if 'busbw < 0.9*base'
expect 1 "a base that is broken" "$moe" report --compare "$data/bench_before.json" "$data/bench_after.json" --out out.html \
  --fail-if 'busbw < 0.99*base'
rm out.html
expect 1 "a bound that is broken" "$moe" report --compare "$data/bench_before.json" "$data/bench_after.json" --out out.html \
  --fail-if 'worse_pct > 5'
[[ -s out.html ]] || fail "a broken bound: no page"
(($(wc -l <stderr) == 1)) && grep -qF "holds for" stderr || fail "a broken bound: $(cat stderr)"

[[ -z ${ASAN_OPTIONS-} ]] || finish # this stage tests the program; other builds test the page
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
  echo "left out: no browser"
  finish
}

# dom <page> <width>: the document after its scripts, in dom.html.
dom() {
  expect 0 "chromium on $1" "$browser" --headless --no-sandbox --disable-gpu --user-data-dir="$work/profile" \
    --window-size="$2,900" --virtual-time-budget=5000 --dump-dom "file://$work/$1"
  mv stdout dom.html
}
attribute() { grep -m1 '<html' dom.html | sed -n "s/.*data-$1=\"\([^\"]*\)\".*/\1/p"; }

# The page's own check: no script error, and every chart has its marks.
dom page.html 1280
[[ $(attribute check) == ok ]] || fail "the page says: $(attribute check)"
drawings=$(grep -c '<canvas' page.html)
(($(attribute charts) == drawings && drawings >= 20)) ||
  fail "$(attribute charts) charts of $drawings"

# It can fail, too: a value without a position is reported, and a script other than the page's does
# not run.
sed '0,/"x":1.0,"y":[^}]*/s//"x":1.0,"y":"none"/' page.html >broken.html
dom broken.html 1280
[[ $(attribute check) == *" marks of "* ]] || fail "a missing mark: $(attribute check)"
sed 's|</h1>|</h1><script>document.documentElement.dataset.check = "ran"; throw 1</script>|' \
  page.html >injected.html
dom injected.html 1280
[[ $(attribute check) == ok ]] || fail "a foreign script: $(attribute check)"

# With a script of the test's own: the page does not scroll sideways, no chart is blank, every mark
# under the pointer shows its name and value, and a click sorts.
cat >layout.js <<'JS'
addEventListener("load", () => {
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page scrolls sideways");
  for (const figure of document.querySelectorAll(".chart")) {
    const chart = Chart.getChart(figure.querySelector(".drawing canvas"));
    if (!chart.ctx.getImageData(0, 0, chart.canvas.width, chart.canvas.height).data.some((v) => v > 0)) {
      found.push(figure.id + " is blank");
    }
    chart.data.datasets.forEach((dataset, index) => {
      const element = chart.getDatasetMeta(index).data[0], at = element.getCenterPoint();
      const {mode, ...how} = chart.options.interaction;
      const near = chart.getElementsAtEventForMode({native: {}, ...at}, mode, how, true);
      chart.tooltip.setActiveElements(near.map((e) => ({datasetIndex: e.datasetIndex, index: e.index})), at);
      const lines = chart.tooltip.body.flatMap((part) => part.lines);
      if (!(chart.tooltip.title.join("") !== "" && lines.every((line) => /[^:]: [-0-9.,]+/.test(line)) && lines.length > 0)) {
        found.push(`${figure.id}: ${chart.tooltip.title}, ${lines}`);
      }
    });
  }
  const table = Array.from(document.querySelectorAll("table")).pop();
  const column = Array.from(table.tHead.rows[0].cells).findIndex((h) => h.textContent === "size");
  const sizes = () => Array.from(table.tBodies[0].rows, (r) => r.cells[column].dataset.value).filter((v) => v !== "").map(Number);
  for (const sign of [1, -1]) {
    table.tHead.rows[0].cells[column].firstChild.click();
    if (sizes().some((v, i, all) => i > 0 && sign * (v - all[i - 1]) < 0)) found.push("not sorted");
  }
  document.documentElement.dataset.layout = found.length === 0 ? "ok" : found.join("; ");
});
JS
{
  sed 's|<meta http-equiv=[^>]*>||; s|</body>||; s|</html>||' page.html
  echo "<script>$(cat layout.js)</script></body></html>"
} >layout.html
for width in 390 1280; do
  dom layout.html "$width"
  [[ $(attribute layout) == ok ]] || fail "layout, $width wide: $(attribute layout)"
done
finish
