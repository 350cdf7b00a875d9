#include "moe/cli/report/page.h"

#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "moe/cli/report/drawing.h"
#include "moe/cli/report/format.h"

namespace moe::report {
namespace {

bool Empty(const TableCell& cell) {
  return cell.is_number ? std::isnan(cell.number) : cell.text.empty();
}

std::string CellElement(const TableCell& cell) {
  std::string classes = cell.css_class;
  std::string attributes;
  if (cell.is_number) {
    classes = classes.empty() ? "number" : absl::StrCat("number ", classes);
    const bool has_value = !std::isnan(cell.number);
    attributes = absl::StrCat(" data-value=\"",
                              has_value ? absl::StrFormat("%.17g", cell.number) : "", "\"");
  }
  if (!classes.empty()) absl::StrAppend(&attributes, " class=\"", classes, "\"");
  return absl::StrCat("<td", attributes, ">", Escape(cell.text), "</td>");
}

}  // namespace

TableCell TableCell::Number(double value, int digits) {
  return Number(value, NumberText(value, digits));
}

TableCell TableCell::Count(double value) {
  return Number(value, CountText(value));
}

std::string Render(const Table& table) {
  std::vector<size_t> columns;
  std::string constants;
  for (size_t c = 0; c < table.names.size(); ++c) {
    const TableCell* first = nullptr;
    bool same = true;
    for (const auto& row : table.rows) {
      const TableCell& cell = row[c];
      if (Empty(cell)) {
        same = same && row.back().css_class == kFailed;
      } else if (first == nullptr) {
        first = &cell;
      } else {
        same =
            same && cell.text == first->text && (!cell.is_number || cell.number == first->number);
      }
    }
    if (first == nullptr) continue;
    if (!same || table.rows.size() == 1) {
      columns.push_back(c);
    } else {
      absl::StrAppend(&constants, constants.empty() ? "" : " · ", table.names[c], " ", first->text);
    }
  }
  std::string html =
      absl::StrCat("<figure class=\"table\"><figcaption><h3>", Escape(table.title), "</h3>");
  if (!constants.empty()) {
    absl::StrAppend(&html, "<p>The same in all rows: ", Escape(constants), "</p>");
  }
  absl::StrAppend(&html, "</figcaption>\n<div class=\"scroll\" tabindex=\"0\"><table data-rows=\"",
                  table.rows.size(), "\"><thead><tr>");
  for (const size_t c : columns) {
    absl::StrAppend(&html, "<th scope=\"col\"><button type=\"button\">", Escape(table.names[c]),
                    "</button></th>");
  }
  absl::StrAppend(&html, "</tr></thead>\n<tbody>\n");
  for (const auto& row : table.rows) {
    absl::StrAppend(&html, "<tr>");
    for (const size_t c : columns) absl::StrAppend(&html, CellElement(row[c]));
    absl::StrAppend(&html, "</tr>\n");
  }
  return html + "</tbody></table></div></figure>\n";
}

namespace {

std::string InputLine(const Run& run) {
  const bool trained = run.kind == RunKind::kTrain;
  const size_t rows = run.bench.size() + run.sweep.size() + run.steps.size();
  std::string size = Plural(static_cast<double>(rows), trained ? "step" : "row");
  if (trained && !run.totals.has_value()) size += ", did not end";
  std::string origin;
  for (const Origin& o : run.origin) {
    absl::StrAppend(&origin, origin.empty() ? "" : " · ", o.key, " ", o.first,
                    o.first == o.last ? "" : " to " + o.last);
  }
  if (!origin.empty()) origin = absl::StrCat("<br><small>", Escape(origin), "</small>");
  return absl::StrCat(
      "<li><b>", Escape(run.name), "</b> moe ", NameOf(run.kind), ", ", size,
      run.name == run.path ? "" : absl::StrCat(" <code>", Escape(run.path), "</code>"), origin,
      "</li>\n");
}

constexpr char kStyle[] = R"css(
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1720px; padding: 12px; background: var(--ground);
  color: var(--text); font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans",
  sans-serif; }
h1 { font-size: 1.6rem; margin: .3em 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 1.4em 0 .5em; }
h3 { font-size: 1.05rem; margin: 0; overflow-wrap: anywhere; }
p, footer { color: var(--faint); margin: .3em 0; max-width: 75ch; overflow-wrap: anywhere; }
a { color: var(--s0); }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; }
nav a { padding: 6px 0; }
code, small { font-size: .85em; color: var(--faint); overflow-wrap: anywhere; }
.inputs { margin: .3em 0; padding-left: 1.2em; overflow-wrap: anywhere; }
.charts { display: grid; gap: 12px; align-items: start;
  grid-auto-flow: dense;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
figure { margin: 0; padding: 12px; background: var(--paper); border: 1px solid var(--line);
  border-radius: 8px; min-width: 0; }
.table { margin-top: 12px; }
figcaption p { font-size: .85rem; margin: .1em 0 .4em; }
.drawing { display: block; width: 100%; max-width: 450px; height: auto; margin: 8px auto 0;
  overflow: visible; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; list-style: none; margin: 8px 0 0;
  padding: 0; font-size: .85rem; }
.legend li { display: flex; align-items: center; gap: 6px; overflow-wrap: anywhere; min-width: 0; }
.key { width: 22px; height: 14px; flex: none; overflow: visible; }
svg text { fill: var(--text); font-size: 13px; font-variant-numeric: tabular-nums; }
svg .label { fill: var(--faint); }
svg .beside { font-size: 12px; }
svg .beside, svg .name { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
rect[fill] { shape-rendering: crispEdges; }
@media (max-width: 480px) { figure { padding: 10px 8px; } }
.axis { stroke: var(--faint); stroke-width: 1; }
.grid { stroke: var(--line); stroke-width: 1; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.dashes { stroke-dasharray: 7 5; }
.dash1 { stroke-dasharray: 9 3; }
.dash2 { stroke-dasharray: 3 3; }
.dash3 { stroke-dasharray: 10 3 2 3; }
.point { fill: var(--c); stroke: var(--paper); stroke-width: 1; }
.block { fill: var(--c); stroke: var(--paper); stroke-width: 1; }
.whisker { stroke: var(--c); stroke-width: 1.5; }
.front { fill: none; stroke: var(--faint); stroke-width: 1.5; stroke-dasharray: 2 3; }
.ring { fill: none; stroke: var(--text); stroke-width: 1.5; }
.interval { stroke: var(--c); stroke-width: 3; }
.better { --c: var(--s0); }
.worse { --c: var(--s1); }
.same, .unknown { --c: var(--faint); }
td.better, td.worse { color: var(--c); font-weight: 600; }
.mark:hover { stroke: var(--text); }
.scroll { overflow-x: auto; max-height: 70vh; margin-top: 8px; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--paper); padding: 0; }
th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0;
  padding: 8px 10px; cursor: pointer; white-space: nowrap; }
th[aria-sort="ascending"] button::after { content: " ▲"; }
th[aria-sort="descending"] button::after { content: " ▼"; }
.number { text-align: right; }
footer { margin-top: 2em; font-size: .85rem; }
@media print { .scroll { max-height: none; overflow: visible; } figure { break-inside: avoid; } }
)css";

// Sorts tables; then checks the page and says so in attributes of <html>: data-charts, data-marks
// and data-tables count what is there, and data-check is "ok", or what is wrong: a script error, or
// a chart without the marks it was drawn with. Sorting is stable; cells without a value stay last.
// Numbers sort by data-value, texts as words.
constexpr char kScript[] = R"js(
"use strict";
const problems = [];
addEventListener("error", (event) => problems.push("script error: " + event.message));
function keyOf(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? cell.dataset.value : cell.textContent;
}
function sortTable(table, column, descending) {
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const numeric = rows.length > 0 && "value" in rows[0].cells[column].dataset;
  rows.sort((a, b) => {
    const x = keyOf(a, column), y = keyOf(b, column);
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = numeric ? x - y : x.localeCompare(y, "en", {numeric: true});
    return descending ? -order : order;
  });
  body.append(...rows);
}
for (const table of document.querySelectorAll("table")) {
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const descending = head.ariaSort === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    sortTable(table, column, descending);
  }));
}
addEventListener("load", () => {
  const charts = Array.from(document.querySelectorAll(".drawing"));
  let marks = 0;
  for (const chart of charts) {
    const drawn = Array.from(chart.querySelectorAll(".mark")).filter((mark) => {
      const box = mark.getBBox();
      return box.width > 0 || box.height > 0;
    }).length;
    marks += drawn;
    if (drawn === 0 || drawn !== Number(chart.dataset.marks)) {
      problems.push(chart.parentNode.id + ": " + drawn + " of " + chart.dataset.marks + " marks");
    }
  }
  const said = document.documentElement.dataset;
  said.charts = charts.length;
  said.marks = marks;
  said.tables = document.querySelectorAll("table").length;
  said.check = problems.length === 0 ? "ok" : problems.join("; ");
});
)js";

// base64 of the script's SHA-256:
// python3 -c 'import base64, hashlib, sys;
//   print(base64.b64encode(hashlib.sha256(sys.stdin.buffer.read()).digest()).decode())'
constexpr char kScriptHash[] = "YBTIFUiAZ0m+esxdk4leT51swiMo9EEh/PzOQpOKmSI=";

std::string Inks(int Ink::*which) {
  const auto ink = [&](const Ink& i) {
    return absl::StrFormat("#%06x", i.*which);
  };
  std::string css = absl::StrCat("--paper: ", ink(kPaperInk), "; --ground: ", ink(kGroundInk),
                                 "; --line: ", ink(kLineInk), "; --text: ", ink(kTextInk),
                                 "; --faint: ", ink(kFaintInk), ";");
  for (int i = 0; i < kNumInks; ++i) {
    absl::StrAppend(&css, " --s", i, ": ", ink(kSeriesInk[i]), ";");
  }
  return css;
}

std::string PageStyle() {
  std::string css =
      absl::StrCat(":root { color-scheme: light dark; ", Inks(&Ink::light), " }\n",
                   "@media (prefers-color-scheme: dark) { :root { ", Inks(&Ink::dark), " } }\n");
  for (int i = 0; i < kNumInks; ++i) {
    absl::StrAppend(&css, ".s", i, " { --c: var(--s", i, "); }\n");
  }
  return css + kStyle;
}

std::string Head(absl::string_view title) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; script-src 'sha256-",
      kScriptHash,
      "'; base-uri 'none'; form-action 'none'\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>",
      Escape(title), "</title>\n<style>\n", PageStyle(), "</style>\n</head>\n");
}

}  // namespace

std::string Page(absl::string_view title, absl::Span<const Run> runs,
                 absl::Span<const Section> sections) {
  std::string html = absl::StrCat(Head(title), "<body>\n<header>\n<h1>", Escape(title),
                                  "</h1>\n<ul class=\"inputs\">\n");
  for (const Run& run : runs) absl::StrAppend(&html, InputLine(run));
  absl::StrAppend(&html, "</ul>\n");
  std::string links, body;
  int count = 0;
  for (const Section& s : sections) {
    if (s.empty()) continue;
    ++count;
    absl::StrAppend(&links, "<a href=\"#", s.id, "\">", Escape(s.heading), "</a>\n");
    absl::StrAppend(&body, "<section id=\"", s.id, "\">\n<h2>", Escape(s.heading), "</h2>\n",
                    s.body, "</section>\n");
  }
  if (count > 1) absl::StrAppend(&html, "<nav>\n", links, "</nav>\n");
  return absl::StrCat(
      html, "</header>\n<main>\n", body,
      "</main>\n<footer>Rest the pointer on a mark for its figures; click a heading "
      "of a table to sort by it.</footer>\n<script>",
      kScript, "</script>\n</body>\n</html>\n");
}

}  // namespace moe::report
