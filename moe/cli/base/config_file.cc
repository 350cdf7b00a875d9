#include "moe/cli/base/config_file.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/terminal.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"

namespace moe::cli {
namespace {

// Limits of a file from an untrusted source: each leaf has its path, with a key for each object.
constexpr size_t kMaxBytes = size_t{1} << 20;
constexpr size_t kMaxDepth = 32;
constexpr size_t kMaxKeyBytes = 200;
constexpr size_t kMaxLeaves = 10'000;
// Most refused keys that one message names.
constexpr size_t kMostRefused = 20;

// Collects scalars as the parser meets them; returning false ends the parse.
class Flattener : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return Scalar(JsonType::kNull, "null"); }
  bool boolean(bool value) override { return Scalar(JsonType::kBool, value ? "true" : "false"); }
  bool number_integer(int64_t value) override {
    return Scalar(JsonType::kNumber, absl::StrCat(value));
  }
  bool number_unsigned(uint64_t value) override {
    return Scalar(JsonType::kNumber, absl::StrCat(value));
  }
  bool number_float(double, const std::string& text) override {
    return Scalar(JsonType::kNumber, text);
  }
  bool string(std::string& value) override { return Scalar(JsonType::kString, value); }
  bool binary(nlohmann::json::binary_t&) override { return Fail("binary data"); }
  bool start_object(size_t) override { return Start(/*list=*/false); }
  bool start_array(size_t) override { return Start(/*list=*/true); }
  bool end_object() override { return End(JsonType::kEmptyObject); }
  bool end_array() override { return End(JsonType::kEmptyList); }

  bool key(std::string& name) override {
    if (name.size() > kMaxKeyBytes) {
      return Fail(
          absl::StrCat("a key of ", name.size(), " bytes, expected at most ", kMaxKeyBytes));
    }
    frames_.back().key = name;
    if (!frames_.back().keys.insert(name).second) {
      return Fail(absl::StrCat("key '", Shown(Path()), "' stands there twice"));
    }
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& e) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    const absl::string_view what = e.what();
    const size_t at = what.find("line ");
    return Fail(absl::StrCat("malformed JSON, ", Shown(at == what.npos ? what : what.substr(at))));
  }

  std::vector<JsonLeaf> leaves;
  std::string error;

 private:
  struct Frame {
    bool list = false;
    int64_t index = 0;
    std::string key;
    std::set<std::string> keys;
    bool empty = true;
  };

  bool Fail(std::string what) {
    if (error.empty()) error = std::move(what);
    return false;
  }

  std::string Path() const {
    std::string path;
    for (const Frame& frame : frames_) {
      absl::StrAppend(&path, path.empty() ? "" : ".",
                      frame.list ? absl::StrCat(frame.index) : frame.key);
    }
    return path;
  }

  bool Scalar(JsonType type, const std::string& text) {
    if (frames_.empty()) return Fail("the document is no object, expected { ... }");
    return Add(type, text);
  }

  bool Add(JsonType type, const std::string& text) {
    if (leaves.size() == kMaxLeaves) return Fail("too many values");
    leaves.push_back({Path(), type, text});
    Next();
    return true;
  }

  void Next() {
    frames_.back().empty = false;
    ++frames_.back().index;
  }

  bool Start(bool list) {
    if (frames_.empty() && list) return Fail("the document is a list, expected { ... }");
    if (frames_.size() >= kMaxDepth) return Fail("nested too deeply");
    frames_.push_back({.list = list});
    return true;
  }

  bool End(JsonType empty_type) {
    const bool empty = frames_.back().empty;
    frames_.pop_back();
    if (frames_.empty()) return true;
    if (empty) return Add(empty_type, "");
    Next();
    return true;
  }

  std::vector<Frame> frames_;
};

// "data.3" -> "data"; other paths unchanged.
std::string WithoutIndex(const std::string& path) {
  const size_t dot = path.rfind('.');
  int64_t index = 0;
  if (dot == std::string::npos || !absl::SimpleAtoi(path.substr(dot + 1), &index)) return path;
  return path.substr(0, dot);
}

std::string Underscored(absl::string_view name) {
  return absl::StrReplaceAll(name, {{"-", "_"}});
}

std::string UnknownKey(const std::string& path, const Settings& settings) {
  std::vector<std::string> known = DeepSpeedKeys();
  for (const Setting& s : settings.table()) {
    if (s.flag_only) continue;
    known.push_back(Underscored(s.name));
    if (!s.alias.empty()) known.push_back(Underscored(s.alias));
  }
  return absl::StrCat(
      "unknown key '", Shown(path), "'",
      DidYouMean(Underscored(path), known, "", ", expected names of flags or DeepSpeed's keys"));
}

absl::StatusOr<std::string> TextOf(const JsonLeaf& leaf, const Setting& setting) {
  const bool wants_string = setting.kind == Kind::kText || setting.kind == Kind::kPaths;
  if (leaf.type == JsonType::kString || (leaf.type == JsonType::kNumber && !wants_string) ||
      (leaf.type == JsonType::kBool && setting.kind == Kind::kSwitch)) {
    return leaf.type == JsonType::kNumber ? WholeText(leaf.text, setting) : leaf.text;
  }
  const bool has_none =
      std::find(setting.words.begin(), setting.words.end(), "none") != setting.words.end();
  if (leaf.type == JsonType::kNull && has_none) return "none";
  return absl::InvalidArgumentError(
      absl::StrCat(leaf.path, " is ", leaf.text.empty() ? "empty" : Shown(leaf.text), ", expected ",
                   wants_string                    ? "a string"
                   : setting.kind == Kind::kSwitch ? "true or false"
                                                   : "a number or string"));
}

// The scalars of a document whose top is an object, in order. kInvalidArgument: malformed JSON,
// keys that occur twice in one object, and more than any settings need (the limits above).
absl::StatusOr<std::vector<JsonLeaf>> FlattenJson(absl::string_view document) {
  if (document.size() > kMaxBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("JSON of ", document.size(), " bytes, expected at most ", kMaxBytes));
  }
  Flattener flattener;
  const bool ok = nlohmann::json::sax_parse(document.begin(), document.end(), &flattener);
  if (!ok) return absl::InvalidArgumentError(flattener.error);
  return std::move(flattener.leaves);
}

// Sets the file's values, with Origin::kFile.
absl::Status LoadConfigFile(const std::string& file, Settings& settings,
                            std::vector<std::string>& warnings) {
  const auto mapped = MappedFile::Open(file);
  MOE_RETURN_IF_ERROR(Prefixed("--config", mapped.status()));
  auto parsed = FlattenJson(mapped->text());
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": ", parsed.status().message()));
  }
  std::vector<JsonLeaf>& leaves = *parsed;
  std::vector<std::string> refused;
  TakeDeepSpeedKeys(file, leaves, settings, refused, warnings);
  std::vector<std::pair<std::string, std::vector<std::string>>> lists;  // paths, in order
  for (const JsonLeaf& leaf : leaves) {
    if (refused.size() >= kMostRefused) break;
    const std::string name = WithoutIndex(leaf.path);
    const Setting* const setting = settings.Find(name);
    if (setting == nullptr || setting->flag_only) {
      refused.push_back(UnknownKey(leaf.path, settings));
      continue;
    }
    if (name != leaf.path && setting->kind != Kind::kPaths) {
      refused.push_back(absl::StrCat(name, " is a list, expected one value"));
      continue;
    }
    absl::StatusOr<std::string> text = TextOf(leaf, *setting);
    if (!text.ok()) {
      refused.emplace_back(text.status().message());
      continue;
    }
    if (lists.empty() || lists.back().first != name) lists.push_back({name, {}});
    lists.back().second.push_back(*std::move(text));
  }
  if (!refused.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": ", absl::StrJoin(refused, "; ")));
  }
  for (auto& [name, texts] : lists) {
    MOE_RETURN_IF_ERROR(settings.Set(*settings.Find(name), std::move(texts), Origin::kFile,
                                     absl::StrCat(file, ": ", name)));
  }
  return absl::OkStatus();
}

}  // namespace

std::string WholeText(std::string text, const Setting& setting) {
  constexpr double kMostExact = 0x1p53;
  double value = 0;
  const bool whole = setting.kind == Kind::kInteger || setting.kind == Kind::kSeed;
  if (!whole || text.find_first_of(".eE") == std::string::npos || !absl::SimpleAtod(text, &value) ||
      std::fabs(value) > kMostExact || value != std::floor(value)) {
    return text;
  }
  return absl::StrCat(static_cast<int64_t>(value));
}

absl::Status LoadSettings(absl::Span<const std::string> args,
                          absl::Span<const std::string> environment, Settings& settings,
                          std::vector<std::string>& warnings) {
  MOE_RETURN_IF_ERROR(LoadFlags(args, settings, &warnings));
  if (settings.on("help")) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(LoadEnvironment(environment, settings, warnings));
  if (settings.Find("config") != nullptr && !settings.empty("config")) {
    MOE_RETURN_IF_ERROR(LoadConfigFile(settings.text("config"), settings, warnings));
  }
  SetColor(settings.text("color"));
  return absl::OkStatus();
}

}  // namespace moe::cli
