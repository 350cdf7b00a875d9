#include "moe/cli/report/page.h"

#include <cmath>

#include <absl/strings/escaping.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "moe/cli/report/format.h"
#include "moe/cli/report/page_resources.h"

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

std::string InputLine(const Run& run) {
  const bool trained = run.kind == RunKind::kTrain;
  const size_t rows = run.bench.size() + run.sweep.size() + run.plan.size() + run.steps.size();
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

// The Content-Security-Policy's name of a script: base64 of its SHA-256, which CMake provides in
// hexadecimal.
std::string PolicyHash(const PageResource& script) {
  return absl::StrCat("'sha256-", absl::Base64Escape(absl::HexStringToBytes(script.sha256)), "'");
}

std::string Head(absl::string_view title) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; script-src ",
      PolicyHash(kChartLibrary), " ", PolicyHash(kScript),
      "; base-uri 'none'; form-action 'none'\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>",
      Escape(title), "</title>\n<style>\n", kStyle.text, "</style>\n</head>\n");
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
      "</main>\n<noscript><p>Charts need JavaScript; the tables have all results.</p></noscript>\n"
      "<footer>Rest the pointer on a mark for its figures; click a heading "
      "of a table to sort by it.</footer>\n<script>",
      kChartLibrary.text, "</script>\n<script>", kScript.text, "</script>\n</body>\n</html>\n");
}

}  // namespace moe::report
