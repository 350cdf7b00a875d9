#include "moe/report/table.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "moe/report/format.h"

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

std::string Render(const Table& table) {
  std::vector<size_t> columns;
  for (size_t c = 0; c < table.names.size(); ++c) {
    const bool used = std::any_of(table.rows.begin(), table.rows.end(),
                                  [&](const auto& row) { return !Empty(row[c]); });
    if (used) columns.push_back(c);
  }
  std::string html =
      absl::StrCat("<figure class=\"table\"><figcaption><h3>", Escape(table.title),
                   "</h3></figcaption>\n<div class=\"scroll\" tabindex=\"0\"><table data-rows=\"",
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

}  // namespace moe::report
