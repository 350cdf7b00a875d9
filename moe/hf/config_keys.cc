#include "moe/hf/config_keys.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include <nlohmann/json.hpp>

#include "moe/io/bounded_json.h"

namespace moe::hf {
namespace {

using Json = nlohmann::json;

std::string TextOf(IntegerRange range) {
  return absl::StrCat("a whole number from ", range.least, " to ", range.most);
}

// Shortened, since an object or list of a hostile file may be long.
std::string ShortTextOf(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return absl::StrCat("a list of ", value.size());
  return Shown(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

const Json* ConfigKeys::Find(const char* key) const {
  asked_.insert(key);
  const auto at = object_.find(key);
  return at == object_.end() ? nullptr : &*at;
}

const char* ConfigKeys::Spelling(Key key) const {
  return key.alias != nullptr && Find(key.alias) != nullptr ? key.alias : key.name;
}

void ConfigKeys::Fail(absl::Status status) {
  if (status_.ok()) status_ = std::move(status);
}

void ConfigKeys::Wrong(const char* key, const Json& value, absl::string_view expected) {
  Fail(absl::DataLossError(
      absl::StrCat(file_, ": ", path_, key, " is ", ShortTextOf(value), ", expected ", expected)));
}

void ConfigKeys::Unsupported(const char* key, absl::string_view value, absl::string_view expected) {
  Fail(absl::UnimplementedError(absl::StrCat(file_, ": ", path_, key, " is ", Shown(value),
                                             ", which is not supported, expected ", expected)));
}

void ConfigKeys::RefuseIfSet(const char* key, absl::string_view expected) {
  const Json* const value = Find(key);
  if (value == nullptr || value->is_null() || *value == false) return;
  Unsupported(key, ShortTextOf(*value), expected);
}

bool ConfigKeys::empty() const {
  return object_.empty();
}

std::vector<std::string> ConfigKeys::Unread() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : object_.items()) {
    if (!asked_.contains(name)) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool ConfigKeys::IsNull(const char* key) const {
  const Json* const value = Find(key);
  return value == nullptr || value->is_null();
}

ConfigKeys ConfigKeys::Object(const char* key) {
  static const Json* const kEmpty = new Json(Json::object());
  const Json* const value = Find(key);
  const bool is_object = value != nullptr && value->is_object();
  if (!is_object) Wrong(key, value == nullptr ? Json() : *value, "an object");
  return {file_, absl::StrCat(path_, key, "."), is_object ? *value : *kEmpty};
}

const Json* ConfigKeys::OneOf(const char* key, const Json& list) {
  if (list.empty()) return &list;
  const bool same = std::all_of(list.begin(), list.end(),
                                [&](const Json& element) { return element == list.front(); });
  if (!same) Unsupported(key, "a list of different numbers", "one number for all layers");
  return &list.front();
}

int64_t ConfigKeys::Integer(Key spellings, std::optional<int64_t> fallback, IntegerRange range) {
  const char* const key = Spelling(spellings);
  const Json* value = Find(key);
  if (value == nullptr) {
    if (!fallback.has_value()) {
      Fail(absl::DataLossError(
          absl::StrCat(file_, ": ", path_, key, " is missing, expected ", TextOf(range))));
    }
    return fallback.value_or(range.least);
  }
  if (spellings.per_layer && value->is_array()) value = OneOf(key, *value);
  if (const auto number = IntegerWithin(*value, range.least, range.most); number.has_value())
    return *number;
  Wrong(key, *value, TextOf(range));
  return range.least;
}

bool ConfigKeys::Bool(Key spellings, bool fallback) {
  const char* const key = Spelling(spellings);
  const Json* const value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  Wrong(key, *value, "true or false");
  return fallback;
}

double ConfigKeys::Real(Key spellings, double fallback) {
  const char* const key = Spelling(spellings);
  const Json* const value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_number() && std::isfinite(value->get<double>())) return value->get<double>();
  Wrong(key, *value, "a finite number");
  return fallback;
}

std::string ConfigKeys::Text(const char* key, absl::string_view fallback) {
  const Json* const value = Find(key);
  if (value == nullptr) return std::string(fallback);
  if (value->is_string()) return value->get<std::string>();
  Wrong(key, *value, "a text");
  return std::string(fallback);
}

std::optional<std::vector<int64_t>> ConfigKeys::Integers(const char* key, IntegerRange range) {
  if (IsNull(key)) return std::nullopt;
  const Json& value = *Find(key);
  const std::string expected =
      absl::StrCat("a list of whole numbers from ", range.least, " to ", range.most);
  if (!value.is_array()) {
    Wrong(key, value, expected);
    return std::nullopt;
  }
  std::vector<int64_t> numbers;
  for (const Json& element : value) {
    const auto number = IntegerWithin(element, range.least, range.most);
    if (!number.has_value()) {
      Wrong(key, value, absl::StrCat(expected, ", not ", ShortTextOf(element), " in it"));
      return std::nullopt;
    }
    numbers.push_back(*number);
  }
  return numbers;
}

std::vector<int32_t> ConfigKeys::OneOrMore(const char* key, std::vector<int32_t> fallback) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const Json* const value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_null()) return {};
  std::vector<int32_t> numbers;
  for (const Json& element : value->is_array() ? *value : Json::array({*value})) {
    const auto number = IntegerWithin(element, -kMost, kMost);
    if (!number.has_value()) {
      Wrong(key, *value, "null, a whole number of 32 bits or a list of them");
      return fallback;
    }
    numbers.push_back(static_cast<int32_t>(*number));
  }
  return numbers;
}

std::optional<std::vector<std::string>> ConfigKeys::Texts(
    const char* key, absl::Span<const absl::string_view> words) {
  if (IsNull(key)) return std::nullopt;
  const Json& value = *Find(key);
  std::vector<std::string> texts;
  for (const Json& element : value.is_array() ? value : Json::array({nullptr})) {
    const bool known = element.is_string() && std::find(words.begin(), words.end(),
                                                        element.get<std::string>()) != words.end();
    if (!known) {
      Wrong(key, value, absl::StrCat("a list of ", absl::StrJoin(words, " and ")));
      return std::nullopt;
    }
    texts.push_back(element);
  }
  return texts;
}

}  // namespace moe::hf
