#include "moe/run/settings.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <type_traits>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"

namespace moe {
namespace {

template <typename V>
std::string ValueText(const V& value) {
  if constexpr (std::is_floating_point_v<V>) {
    return absl::StrFormat("%a", static_cast<double>(value));
  } else {
    return absl::StrCat(static_cast<int64_t>(value));
  }
}
std::string ValueText(const std::string& value) {
  return value;
}
std::string ValueText(const DType& value) {
  return NameOf(value);
}
std::string ValueText(const BFloat16Order& value) {
  return NameOf(value, kBFloat16OrderWords);
}
std::string ValueText(const std::vector<int32_t>& value) {
  return absl::StrJoin(value, ",");
}
template <typename V>
std::string ValueText(const std::optional<V>& value) {
  if (value.has_value()) return ValueText(*value);
  return std::is_floating_point_v<V> ? ValueText(-1.0) : "-1";
}

template <typename V>
bool ParseValue(const std::string& text, V& value) {
  if constexpr (std::is_floating_point_v<V>) {
    char* end = nullptr;
    value = static_cast<V>(std::strtod(text.c_str(), &end));
    return end == text.c_str() + text.size() && !text.empty() && std::isfinite(value);
  } else {
    int64_t number = 0;
    if (!absl::SimpleAtoi(text, &number)) return false;
    value = static_cast<V>(number);
    return static_cast<int64_t>(value) == number;
  }
}
bool ParseValue(const std::string& text, std::string& value) {
  value = text;
  return true;
}
template <typename E, size_t N>
bool ParseWord(const std::string& text, const Choice<E> (&words)[N], E& value) {
  const std::optional<E> found = ValueOf(text, words);
  if (found.has_value()) value = *found;
  return found.has_value();
}
bool ParseValue(const std::string& text, DType& value) {
  return ParseWord(text, kStorageTypeWords, value);
}
bool ParseValue(const std::string& text, BFloat16Order& value) {
  return ParseWord(text, kBFloat16OrderWords, value);
}
bool ParseValue(const std::string& text, std::vector<int32_t>& value) {
  value.clear();
  if (text.empty()) return true;
  for (const absl::string_view number : absl::StrSplit(text, ',')) {
    if (!absl::SimpleAtoi(number, &value.emplace_back())) return false;
  }
  return true;
}
template <typename V>
bool ParseValue(const std::string& text, std::optional<V>& value) {
  if (text == ValueText(std::optional<V>())) {
    value.reset();
    return true;
  }
  return ParseValue(text, value.emplace());
}

struct ToText {
  std::string operator()(const EnumField& field) const { return ValueText(*field.at); }
  std::string operator()(const GivenField& field) const { return ValueText(!field.at->empty()); }
  template <typename V>
  std::string operator()(V* value) const {
    return ValueText(*value);
  }
};

struct FromText {
  bool operator()(const EnumField& field) const {
    const auto has = [&](const Choice<uint8_t>& choice) {
      return choice.value == *field.at;
    };
    return ParseValue(text, *field.at) && std::any_of(field.words.begin(), field.words.end(), has);
  }
  bool operator()(const GivenField&) const { return false; }  // a file does not hold the text
  bool operator()(const int* fixed) const {
    int other = *fixed;
    return ParseValue(text, other);
  }
  template <typename V>
  bool operator()(V* value) const {
    return ParseValue(text, *value);
  }
  const std::string& text;
};

}  // namespace

std::string FieldText(const Field& field) {
  return std::visit(ToText(), field);
}

bool SetField(const Field& field, const std::string& text) {
  return std::visit(FromText{text}, field);
}

const Field& SettingRows::operator[](absl::string_view name) const {
  const auto row = std::find_if(rows_.begin(), rows_.end(),
                                [&](const SettingRow& each) { return each.name == name; });
  MOE_CHECK(row != rows_.end());
  return row->field;
}

}  // namespace moe
