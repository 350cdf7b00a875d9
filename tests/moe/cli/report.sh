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
  expect 0 "$*" "$moe" report "$@" --out out.html
  grep -qE '^wrote out.html, [0-9.]+ KiB$' stdout || fail "$*: said: $(cat stdout)"
  python3 check.py out.html >charts 2>problem || fail "$*: $(tail -n 1 problem)"
}
page train bench.json pairs.json layer.json "$data/sweep.jsonl" \
  --compare "$data/bench_before.json" "$data/bench_after.json"
cp out.html page.html
for chart in "Loss" "Learning rate" "Gradient norm" "Speed" "Dropped slots" \
  "MaxVio: load of the busiest expert" "Time of a step by phase" \
  "Expert load, MoE layer 1: train" "Capacity factor against dropped slots" \
  "Capacity factor against loss" "Speed against loss" "alltoall: bus bandwidth over size" \
  "p2p: GB/s between ranks, 64 KiB" \
  "alltoallv: skew against bus bandwidth" "Change from bench_before to bench_after"; do
  grep -qxF "$chart" charts || fail "no chart '$chart'"
done
for times in once twice; do
  page --compare "$data/bench_before.json" "$data/bench_after.json"
  [[ $times == twice ]] || cp out.html again.html
done
cmp -s out.html again.html || fail "the same inputs gave other bytes"

# Names and texts from outside stay texts.
evil='<script>alert(1)</script>"&'
mkdir evil
sed "s|zipf:1|<img onerror='x'>|" "$data/bench_before.json" >'evil/<b onclick=x>&.json'
page 'evil/<b onclick=x>&.json' --title "$evil"
page ./train/../train/metrics.jsonl train --title "$(printf '\xff\xfe')"

# A bound.
expect 0 "a bound that is kept" "$moe" report bench.json --out out.html --fail-if 'busbw < 1e-9 || wrong > 0' -q
[[ ! -s stdout ]] || fail "--quiet is not"
expect 2 "a base without a comparison" "$moe" report bench.json --out out.html --fail-if 'busbw < 0.9*base'
says "moe report --compare A B" stderr
expect 0 "a run beside itself" "$moe" report --compare bench.json bench.json --out out.html --fail-if 'busbw < 0.9*base'
expect 1 "a base that is broken" "$moe" report --compare "$data/bench_before.json" "$data/bench_after.json" --out out.html \
  --fail-if 'busbw < 0.99*base'
rm out.html
expect 1 "a bound that is broken" "$moe" report --compare "$data/bench_before.json" "$data/bench_after.json" --out out.html \
  --fail-if 'worse_pct > 5'
[[ -s out.html ]] || fail "a broken bound: no page"
(($(wc -l <stderr) == 1)) && grep -qF "holds for" stderr || fail "a broken bound: $(cat stderr)"

rm out.html
outputs=(out.html)
refused 2 "no input, expected moe report RUN..." report --out out.html
refused 2 "'none'" report --out out.html none
refused 2 "metrics.jsonl" report --out out.html evil
refused 2 "unknown flag '--titel'; did you mean '--title'?" report --out out.html bench.json --titel x
refused 2 "--compare expects two inputs" report --out out.html --compare bench.json
refused 2 "--compare expects two inputs" report --out out.html --compare=bench.json bench.json
refused 4 "--out: cannot write '/proc/out'" report --out out.html bench.json --out /proc/out
refused 2 "--out" report --out out.html bench.json --out none/out.html
cp bench.json kept.json
refused 2 "expected another file than RUN" report --out out.html train bench.json --out ./bench.json
cmp -s bench.json kept.json || fail "an input was written to"
cp train/metrics.jsonl kept.jsonl
refused 2 "expected another file than RUN" report --out out.html train --out train/metrics.jsonl
cmp -s train/metrics.jsonl kept.jsonl || fail "an input was written to"
(head -n 3 train/metrics.jsonl && echo '{"step":') >cut.jsonl
refused 3 "(line 4, " report --out out.html train cut.jsonl
[[ -z ${ASAN_OPTIONS-} ]] || finish # it looks at the program; the page is that of other builds
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

# The page's own check: no script error, every chart has its marks.
dom page.html 1280
[[ $(attribute check) == ok ]] || fail "the page says: $(attribute check)"
drawings=$(grep -c '<svg class="drawing"' page.html)
(($(attribute charts) == drawings && drawings >= 20)) ||
  fail "$(attribute charts) charts of $drawings"
marks=$(grep -oE 'data-marks="[0-9]+"' page.html | grep -oE '[0-9]+' |
  awk '{ sum += $1 } END { print sum }')
[[ $(attribute marks) == "$marks" ]] || fail "$(attribute marks) marks of $marks"

# And can say no: a mark is missing, and a script that is not the page's own does not run.
sed '0,/class="mark /s//class="/' page.html >broken.html
dom broken.html 1280
[[ $(attribute check) == *" marks"* ]] || fail "a missing mark: $(attribute check)"
sed 's|</h1>|</h1><script>document.documentElement.dataset.check = "ran"; throw 1</script>|' \
  page.html >injected.html
dom injected.html 1280
[[ $(attribute check) == ok ]] || fail "a foreign script: $(attribute check)"

# Layout, by a script of the test's own: texts stay on the page and on their drawing and do not
# touch each other, letters are not tiny but smaller than the headings, and a click sorts.
cat >layout.js <<'JS'
addEventListener("load", () => {
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page scrolls sideways");
  for (const chart of document.querySelectorAll(".drawing")) {
    const frame = chart.getBoundingClientRect(), id = chart.parentNode.id;
    const texts = Array.from(chart.querySelectorAll("text"));
    const boxes = texts.map((text) => text.getBoundingClientRect());
    boxes.forEach((a, i) => {
      const name = id + " '" + texts[i].textContent + "'";
      if (a.left < frame.left - 2 || a.right > frame.right + 2 || a.top < frame.top - 2 ||
          a.bottom > frame.bottom + 2) found.push(name + " is cut off");
      // Boxes of letters are higher than what is inked: a fifth above and below is air.
      const air = a.height / 5;
      if (a.height < 11) found.push(name + " is tiny");
      const letters = (e) => parseFloat(getComputedStyle(e).fontSize);
      if (letters(texts[i]) * frame.width / chart.viewBox.baseVal.width >=
          letters(chart.parentNode.querySelector("h3"))) found.push(name + " is as large as titles");
      boxes.slice(i + 1).forEach((b, j) => {
        if (a.left < b.right && b.left < a.right && a.top + air < b.bottom - air &&
            b.top + air < a.bottom - air) {
          found.push(name + " touches '" + texts[i + 1 + j].textContent + "'");
        }
      });
    });
  }
  const table = Array.from(document.querySelectorAll("table")).pop();
  const column = Array.from(table.tHead.rows[0].cells).findIndex((h) => h.textContent === "size");
  const sizes = () => Array.from(table.tBodies[0].rows, (r) => Number(r.cells[column].dataset.value));
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
for width in 390 800 1280 1920; do
  dom layout.html "$width"
  [[ $(attribute layout) == ok ]] || fail "layout, $width wide: $(attribute layout)"
done
finish
