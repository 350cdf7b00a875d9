#include "moe/cli/report/format.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iterator>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_replace.h>

#include <nlohmann/json.hpp>

namespace moe::report {
namespace {

constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD
constexpr char kNothing[] = "–";

// "-1234567.8" -> "-1,234,567.8"
std::string WithThousands(const std::string& digits) {
  const size_t begin = digits.front() == '-' ? 1 : 0;
  const size_t end = std::min(digits.find('.'), digits.size());
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > begin && i < end && (end - i) % 3 == 0) grouped.push_back(',');
    grouped.push_back(digits[i]);
  }
  return grouped;
}

std::string WithoutTrailingZeros(std::string digits) {
  if (digits.find('.') == std::string::npos) return digits;
  digits.erase(digits.find_last_not_of('0') + 1);
  if (digits.back() == '.') digits.pop_back();
  return digits;
}

}  // namespace

std::string Escape(absl::string_view text) {
  using Json = nlohmann::json;
  const std::string quoted =
      Json(std::string(text)).dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string shown;
  for (const char c : Json::parse(quoted).get<std::string>()) {
    const bool control = (c >= 0 && c < ' ' && c != '\t' && c != '\n') || c == '\x7F';
    absl::StrAppend(&shown, control ? kReplacement : absl::string_view(&c, 1));
  }
  return absl::StrReplaceAll(
      shown, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string NumberText(double value, int digits) {
  if (!std::isfinite(value)) return kNothing;
  if (value == 0) return "0";
  const double size = std::abs(value);
  if (size < 1e-4 || size >= 1e15) return absl::StrFormat("%.*e", digits - 1, value);
  // Rounding may carry into a new digit (9.996 -> 10.0): count digits after it.
  const std::string rounded = absl::StrFormat("%.*e", digits - 1, value);
  const int exponent = std::atoi(rounded.c_str() + rounded.find('e') + 1);
  const int decimals = digits - 1 - exponent;
  if (decimals <= 0) return WithThousands(absl::StrFormat("%.0f", value));
  return WithThousands(WithoutTrailingZeros(absl::StrFormat("%.*f", decimals, value)));
}

std::string CountText(double value) {
  if (!std::isfinite(value)) return kNothing;
  return WithThousands(absl::StrFormat("%.0f", value));
}

std::string ExactText(double value) {
  if (!std::isfinite(value) || (value == std::floor(value) && std::abs(value) < 1e15)) {
    return CountText(value);
  }
  char digits[32];
  return std::string(digits, std::to_chars(std::begin(digits), std::end(digits), value).ptr);
}

std::string Plural(double count, absl::string_view thing) {
  return absl::StrCat(CountText(count), " ", thing, count == 1 ? "" : "s");
}

std::string BytesText(double bytes) {
  if (!std::isfinite(bytes)) return kNothing;
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  constexpr int kLast = 6;
  int unit = 0;
  for (; bytes >= 1024 && unit < kLast; ++unit) bytes /= 1024;
  return absl::StrCat(NumberText(bytes, bytes >= 1000 ? 4 : 3), " ", kUnits[unit]);
}

}  // namespace moe::report
