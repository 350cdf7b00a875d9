#include "moe/io/bounded_json.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

using Json = nlohmann::json;

// Python's names of numbers that JSON lacks, and the texts that the parser reads instead.
constexpr std::pair<absl::string_view, absl::string_view> kNonFinite[] = {
    {"NaN", R"("NaN")"}, {"Infinity", R"("Infinity")"}, {"-Infinity", R"("-Infinity")"}};

// What the lexer has consumed, and how much of it is in its buffer. The lexer clears its buffer at
// each string and number, and appends everything else.
struct Progress {
  static constexpr int64_t kControlBytes = 8;  // "<U+000A>"

  const char* begin = nullptr;
  const char* end = nullptr;
  const char* at = nullptr;
  int64_t run_bytes = 0;
  int64_t max_run_bytes = 0;
  bool in_string = false;
  bool escaped = false;
  bool in_number = false;
  bool non_finite_as_text = false;
  absl::string_view instead;  // what remains to be read in place of the name at `at`
  size_t name_bytes = 0;      // length of that name

  bool TooLong() const { return run_bytes > max_run_bytes; }
  const char& Here() const { return instead.empty() ? *at : instead.front(); }

  void Next() {
    if (instead.empty()) {
      Take(*at++);
    } else {
      instead.remove_prefix(1);
      if (instead.empty()) at += name_bytes;
    }
    LookForName();
  }

  void LookForName() {
    if (!non_finite_as_text || in_string || !instead.empty()) return;
    for (const auto& [name, text] : kNonFinite) {
      if (!absl::StartsWith(absl::string_view(at, end - at), name)) continue;
      instead = text;
      name_bytes = name.size();
      run_bytes = 0;
    }
  }

 private:
  void Take(char c) {
    // Messages of the lexer spell out control characters.
    run_bytes += c >= 0 && c < ' ' ? kControlBytes : 1;
    if (in_string) {
      if (!escaped && c == '"') in_string = false;
      escaped = !escaped && c == '\\';
      return;
    }
    const bool digit = c >= '0' && c <= '9';
    const bool starts_number = !in_number && (digit || c == '-');
    if (c == '"' || starts_number) run_bytes = 1;
    in_string = c == '"';
    escaped = false;
    in_number = digit || (c == '-' || c == '+' || c == '.' || c == 'e' || c == 'E');
  }
};

// The document for nlohmann's parser. A run that is too long ends it.
class Characters {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  explicit Characters(Progress* progress) : progress_(progress) {}  // nullptr: the end
  reference operator*() const { return progress_->Here(); }
  Characters& operator++() {
    progress_->Next();
    return *this;
  }
  Characters operator++(int) {
    const Characters before = *this;
    ++*this;
    return before;
  }
  bool operator==(const Characters& other) const { return AtEnd() == other.AtEnd(); }
  bool operator!=(const Characters& other) const { return !(*this == other); }

 private:
  bool AtEnd() const {
    return progress_ == nullptr || progress_->at == progress_->end || progress_->TooLong();
  }
  Progress* progress_;
};

// "[json.exception.parse_error.101] parse error at line 1, column 2: what": the last part.
std::string ReasonOf(const Json::exception& e) {
  const absl::string_view what = e.what();
  size_t from = what.find("column ");
  if (from != what.npos) from = what.find(": ", from);
  if (from == what.npos) from = what.find("] ");
  return absl::StrCat("malformed JSON, ", Shown(from == what.npos ? what : what.substr(from + 2)));
}

// Counts values and depth while it converts nlohmann's events to ours.
class Counter : public nlohmann::json_sax<Json> {
 public:
  Counter(const JsonLimits& limits, JsonEvents& events) : limits_(limits), events_(events) {}

  bool null() override { return Scalar(nullptr); }
  bool boolean(bool value) override { return Scalar(value); }
  bool number_integer(int64_t value) override { return Scalar(value); }
  bool number_unsigned(uint64_t value) override { return Scalar(value); }
  bool number_float(double value, const std::string&) override { return Scalar(value); }
  bool string(std::string& value) override { return Scalar(value); }
  bool binary(Json::binary_t&) override { return Refuse("binary data"); }
  bool start_object(size_t) override { return Begin() && Take(events_.BeginObject()); }
  bool start_array(size_t) override { return Begin() && Take(events_.BeginList()); }
  bool end_object() override { return End(); }
  bool end_array() override { return End(); }
  // Copied, not moved: the lexer's buffer is up to twice as large as its text.
  bool key(std::string& name) override { return Take(events_.Key(name)); }
  bool parse_error(size_t, const std::string&, const Json::exception& e) override {
    return Refuse(ReasonOf(e));
  }

  absl::Status status;

 private:
  bool Refuse(absl::string_view reason) { return Take(absl::DataLossError(reason)); }

  bool Take(absl::Status next) {
    status = std::move(next);
    return status.ok();
  }

  bool Count() {
    if (++num_values_ <= limits_.max_values) return true;
    return Refuse(absl::StrCat("more than ", limits_.max_values, " values"));
  }

  bool Scalar(Json value) { return Count() && Take(events_.Scalar(std::move(value))); }

  bool Begin() {
    if (++depth_ > limits_.max_depth) {
      return Refuse(absl::StrCat("nested more than ", limits_.max_depth, " deep"));
    }
    return Count();
  }

  bool End() {
    --depth_;
    return Take(events_.End());
  }

  const JsonLimits& limits_;
  JsonEvents& events_;
  int64_t num_values_ = 0;
  int depth_ = 0;
};

// Position of the last consumed character, counted from 1. An empty document, which may be null,
// has no such character.
std::string PlaceOf(const Progress& progress) {
  const char* const last = progress.at == progress.begin ? progress.begin : progress.at - 1;
  const int64_t lines = std::count(progress.begin, last, '\n');
  const char* line = last;
  while (line != progress.begin && line[-1] != '\n') --line;
  return absl::StrCat(" (line ", lines + 1, ", column ", last - line + 1, ")");
}

using OnValue = absl::FunctionRef<absl::Status(Json value)>;

// Builds values from events, and passes on each complete one: the document, or the elements of the
// list that it is.
class Builder : public JsonEvents {
 public:
  enum class Values : uint8_t { kDocument, kElements };
  Builder(Values values, OnValue on_value) : values_(values), on_value_(on_value) {}

  absl::Status BeginObject() override { return Open(Json::object()); }
  absl::Status BeginList() override {
    const bool rows = values_ == Values::kElements && !in_list_ && open_.empty();
    in_list_ = in_list_ || rows;
    return rows ? absl::OkStatus() : Open(Json::array());
  }
  absl::Status End() override {
    if (open_.empty()) return absl::OkStatus();  // end of the list of rows
    open_.pop_back();
    return open_.empty() ? on_value_(std::move(value_)) : absl::OkStatus();
  }
  absl::Status Key(std::string name) override {
    if (open_.back()->contains(name)) {
      return absl::DataLossError(absl::StrCat("key '", Shown(name), "' stands there twice"));
    }
    key_ = std::move(name);
    return absl::OkStatus();
  }
  absl::Status Scalar(Json value) override {
    if (open_.empty()) return on_value_(std::move(value));
    Add(std::move(value));
    return absl::OkStatus();
  }

 private:
  absl::Status Open(Json value) {
    open_.push_back(Add(std::move(value)));
    return absl::OkStatus();
  }

  // Address of the value. It is stable while the value is open, since siblings are only added
  // later.
  Json* Add(Json value) {
    if (open_.empty()) return &(value_ = std::move(value));
    Json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[key_] = std::move(value));
  }

  const Values values_;
  const OnValue on_value_;
  bool in_list_ = false;  // the list of rows
  Json value_;
  std::vector<Json*> open_;  // the objects and lists around the next value
  std::string key_;
};

// Positions inside one line name line 1; replaces it by the line of the file.
absl::Status AtLine(int64_t line, const absl::Status& status) {
  constexpr absl::string_view kFirst = "(line 1, ";
  const absl::string_view message = status.message();
  const size_t at = message.rfind(kFirst);
  if (at == message.npos) return status;
  return absl::Status(status.code(), absl::StrCat(message.substr(0, at), "(line ", line, ", ",
                                                  message.substr(at + kFirst.size())));
}

// A document with a row on each line: the first line that is not blank is a whole object, and more
// follows.
bool IsLines(absl::string_view document) {
  document = absl::StripAsciiWhitespace(document);
  const size_t end = document.find('\n');
  if (end == document.npos || document.front() != '{') return false;
  return absl::StripTrailingAsciiWhitespace(document.substr(0, end)).back() == '}';
}

absl::Status ReadRows(absl::string_view file, absl::string_view document, const JsonLimits& limits,
                      OnValue on_row) {
  Builder builder(Builder::Values::kElements, on_row);
  return ReadJsonEvents(file, document, limits, builder);
}

}  // namespace

absl::Status ReadJsonEvents(absl::string_view file, absl::string_view document,
                            const JsonLimits& limits, JsonEvents& events) try {
  const auto size = static_cast<int64_t>(document.size());
  if (size > limits.max_bytes) {
    return absl::DataLossError(
        absl::StrCat(file, ": JSON of ", size, " bytes, expected at most ", limits.max_bytes));
  }
  Progress progress = {.begin = document.data(),
                       .end = document.data() + size,
                       .at = document.data(),
                       .max_run_bytes = limits.max_token_bytes,
                       .non_finite_as_text = limits.non_finite_as_text};
  progress.LookForName();
  Counter counter(limits, events);
  const bool ok = Json::sax_parse(Characters(&progress), Characters(nullptr), &counter);
  if (ok && !progress.TooLong()) return absl::OkStatus();
  const std::string reason =
      progress.TooLong()
          ? absl::StrCat("a string, number or gap of more than ", limits.max_token_bytes, " bytes")
          : std::string(counter.status.message());
  return absl::DataLossError(absl::StrCat(file, ": ", reason, PlaceOf(progress)));
} catch (const std::bad_alloc&) {
  return absl::ResourceExhaustedError(absl::StrCat(file, ": no memory to read its JSON"));
} catch (const std::exception& e) {
  return absl::DataLossError(absl::StrCat(file, ": malformed JSON, ", Shown(e.what())));
}

absl::StatusOr<Json> ParseBoundedJson(absl::string_view file, absl::string_view document,
                                      const JsonLimits& limits) {
  Json root;
  const auto keep = [&](Json value) {
    root = std::move(value);
    return absl::OkStatus();
  };
  Builder builder(Builder::Values::kDocument, keep);
  MOE_RETURN_IF_ERROR(ReadJsonEvents(file, document, limits, builder));
  return root;
}

absl::Status ReadJsonRows(absl::string_view file, absl::string_view document,
                          const JsonLimits& limits, OnValue on_row) {
  if (!IsLines(document)) return ReadRows(file, document, limits, on_row);
  int64_t number = 0;
  for (const absl::string_view line : absl::StrSplit(document, '\n')) {
    ++number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    const absl::Status status = ReadRows(file, line, limits, on_row);
    if (!status.ok()) return AtLine(number, status);
  }
  return absl::OkStatus();
}

std::optional<int64_t> IntegerWithin(const Json& value, int64_t least, int64_t most) {
  if (!value.is_number_integer()) return std::nullopt;
  // Numbers above int64 are unsigned.
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(most)) {
    return std::nullopt;
  }
  const auto number = value.get<int64_t>();
  if (number < least || number > most) return std::nullopt;
  return number;
}

absl::StatusOr<std::string> JsonString(const std::string& text) try {
  return Json(text).dump();
} catch (const Json::exception&) {
  return absl::InvalidArgumentError(absl::StrCat("'", Shown(text), "' is no text, expected UTF-8"));
}

std::string Shown(absl::string_view text, int64_t max_bytes) {
  std::string shown;
  for (const char c : text.substr(0, static_cast<size_t>(max_bytes))) {
    if (c >= ' ' && c <= '~') {
      shown.push_back(c);
    } else {
      absl::StrAppend(&shown, "\\x", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    }
  }
  if (text.size() > static_cast<size_t>(max_bytes)) absl::StrAppend(&shown, "...");
  return shown;
}

}  // namespace moe
