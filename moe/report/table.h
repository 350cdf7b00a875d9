// Tables of the page. A click on a heading sorts by its column.
#ifndef MOE_MOE_REPORT_TABLE_H_
#define MOE_MOE_REPORT_TABLE_H_

#include <string>
#include <utility>
#include <vector>

#include <absl/strings/string_view.h>

namespace moe::report {

// What a cell shows and what it is sorted by.
struct TableCell {
  std::string text;
  double number = 0;
  bool is_number = false;  // NaN: sorted last, either way
  std::string css_class;   // of this program

  static TableCell Text(std::string text) { return {.text = std::move(text)}; }
  // NumberText.
  static TableCell Number(double value, int digits = 3);
  // `text` instead.
  static TableCell Number(double value, std::string text) {
    return {.text = std::move(text), .number = value, .is_number = true};
  }
};

struct Table {
  std::string title;
  std::vector<std::string> names;  // of columns, with units
  std::vector<std::vector<TableCell>> rows;
};

// A figure with the table; columns in which no row has anything are left out.
std::string Render(const Table& table);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_TABLE_H_
