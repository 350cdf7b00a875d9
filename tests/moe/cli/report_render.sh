#!/usr/bin/env bash
# Pages of `moe report` in a browser: bash report_render.sh <moe> <tests/moe/cli/report/data>
# Exit code 77, skipped, where there is no Chromium.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
data=$2
cd "$work" || exit 1
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
  echo "SKIPPED: no chromium here (Debian: chromium)"
  exit 77
}

run "$moe" train "${model[@]}" --ranks 2 --steps 12 --capacity-factor 1 --quiet --out train
expect 0 "a training run"
run "$moe" bench p2p --ranks 3 -b 64K -e 64K -T 0.05 -J p2p.json
expect 0 "pairs"
for op in gate permute combine gemm layer; do
  run "$moe" bench $op --tokens 32 -n 2 -T 0 -J $op.json
  expect 0 "$op"
done
run "$moe" report train "$data/sweep.jsonl" {p2p,gate,permute,combine,gemm,layer}.json \
  --compare "$data/bench_before.json" "$data/bench_after.json" --out page.html
expect 0 "the page"

# dom <page> <width>: the document after its scripts, in dom.html.
dom() {
  run "$browser" --headless --no-sandbox --disable-gpu --user-data-dir="$work/profile" \
    --window-size="$2,900" --virtual-time-budget=5000 --dump-dom "file://$work/$1"
  expect 0 "chromium on $1"
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
