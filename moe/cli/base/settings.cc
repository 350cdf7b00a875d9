#include "moe/cli/base/settings.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include <absl/algorithm/container.h>
#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/io/bounded_json.h"

namespace moe::cli {
namespace {

constexpr double kLargestFloat = std::numeric_limits<float>::max();

bool HasForm(const Setting& setting, const std::string& text) {
  const auto& words = setting.words;
  if (std::find(words.begin(), words.end(), text) != words.end()) return true;
  switch (setting.kind) {
    case Kind::kInteger: {
      int value = 0;
      return absl::SimpleAtoi(text, &value) && (setting.most == 0 || value <= setting.most);
    }
    case Kind::kSeed: {
      uint64_t value = 0;
      return absl::SimpleAtoi(text, &value);
    }
    case Kind::kReal: {
      double value = 0;
      const double most = setting.most == 0 ? kLargestFloat : static_cast<double>(setting.most);
      return absl::SimpleAtod(text, &value) && value >= -kLargestFloat && value <= most;
    }
    case Kind::kWord:
      return false;
    case Kind::kSwitch:
      return text == "true" || text == "false";
    case Kind::kText:
    case Kind::kPaths:
      return !text.empty();
  }
  return false;
}

std::string ExpectedForm(const Setting& setting, const std::string& text) {
  const std::string words = absl::StrJoin(setting.words, ", ");
  const std::string or_words = words.empty() ? "" : absl::StrCat(" or ", words);
  const std::string at_most = setting.most == 0 ? "" : absl::StrCat(" of at most ", setting.most);
  switch (setting.kind) {
    case Kind::kInteger:
      return absl::StrCat("a whole number", at_most.empty() ? " below 2^31" : at_most, or_words);
    case Kind::kSeed:
      return "a whole number from 0 to 2^64 - 1";
    case Kind::kReal: {
      double value = 0;
      const bool finite = absl::SimpleAtod(text, &value) && std::isfinite(value);
      const char* const large = finite ? " below 2^128" : "";
      return absl::StrCat("a finite number", at_most.empty() ? large : at_most, or_words);
    }
    case Kind::kWord:
      return absl::StrCat("one of ", words, DidYouMean(text, setting.words, "", ""));
    case Kind::kSwitch:
      return "true or false";
    case Kind::kText:
    case Kind::kPaths:
      break;
  }
  return "some text";
}

absl::Status CheckForm(const Setting& setting, const std::vector<std::string>& texts,
                       const std::string& where) {
  for (const std::string& text : texts) {
    if (HasForm(setting, text)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(where, " is '", Shown(text), "', expected ", ExpectedForm(setting, text)));
  }
  return absl::OkStatus();
}

template <typename T>
void Read(const std::string& text, T& field) {
  if constexpr (std::is_same_v<T, float>) {
    double value = 0;
    MOE_CHECK(absl::SimpleAtod(text, &value));
    field = static_cast<float>(value);
  } else if constexpr (std::is_same_v<T, double>) {
    MOE_CHECK(absl::SimpleAtod(text, &field));
  } else {
    MOE_CHECK(absl::SimpleAtoi(text, &field));
  }
}

template <typename T>
Form NumberForm(Kind kind, T* field) {
  Form form(kind, absl::StrCat(*field));
  form.store = [field](const std::vector<std::string>& texts) {
    Read(texts.front(), *field);
  };
  return form;
}

template <typename T>
Form OptionalForm(Kind kind, std::optional<T>* field, std::string without,
                  std::vector<std::string> words) {
  Form form(kind, field->has_value() ? absl::StrCat(**field) : std::move(without),
            std::move(words));
  form.store = [field](const std::vector<std::string>& texts) {
    if (texts.front() == "none") {
      field->reset();
    } else {
      Read(texts.front(), field->emplace());
    }
  };
  return form;
}

struct FieldForm {
  Form operator()(const EnumField& field) const {
    const auto now = std::find_if(field.words.begin(), field.words.end(),
                                  [&](const Choice<uint8_t>& c) { return c.value == *field.at; });
    Form form(Kind::kWord, now->word);
    for (const Choice<uint8_t>& choice : field.words) form.words.emplace_back(choice.word);
    form.store = [field](const std::vector<std::string>& texts) {
      *field.at = ValueOf(texts.front(), field.words).value_or(*field.at);
    };
    return form;
  }
  Form operator()(const GivenField& field) const { return Form(field.at); }
  Form operator()(DType* field) const { return Form(field, kStorageTypeWords); }
  template <typename T>
  Form operator()(T* field) const {
    if constexpr (std::is_constructible_v<Form, T*>) {
      return Form(field);
    } else {
      MOE_CHECK(false);  // no flag takes such a value
      return Form(Kind::kText);
    }
  }
};

const Setting* FindRow(absl::Span<const Setting> rows, absl::string_view name) {
  const std::string wanted = Dashed(name);
  for (const Setting& s : rows) {
    if (s.name == wanted || (!s.alias.empty() && s.alias == wanted)) return &s;
  }
  return nullptr;
}

// Variables of this project that are no settings: of launches, benchmarks/ and tests/.
bool IsNoSetting(absl::string_view variable) {
  return variable == "MOE_NCCL_SECRET" || variable == "MOE_BENCH_PYTHON" ||
         absl::StartsWith(variable, "MOE_TEST_");
}

// "; did you mean 'MOE_STEPS'?", or nothing.
std::string NearestVariable(absl::string_view variable, absl::Span<const Setting> rows) {
  std::vector<std::string> known;
  for (const Setting& s : rows) {
    if (s.flag_only) continue;
    for (const std::string& name : {s.name, s.alias}) {
      if (name.empty()) continue;
      const absl::string_view rest = absl::StripPrefix(name, "moe-");
      known.push_back(absl::StrReplaceAll(absl::AsciiStrToUpper(rest), {{"-", "_"}}));
    }
  }
  return DidYouMean(absl::StripPrefix(variable, "MOE_"), known, "MOE_", "");
}

}  // namespace

std::string Dashed(absl::string_view name) {
  return absl::StrReplaceAll(name, {{"_", "-"}});
}

Form::Form(int* field) : Form(NumberForm(Kind::kInteger, field)) {}
Form::Form(int64_t* field) : Form(NumberForm(Kind::kInteger, field)) {}
Form::Form(uint64_t* field) : Form(NumberForm(Kind::kSeed, field)) {}
Form::Form(float* field) : Form(NumberForm(Kind::kReal, field)) {}
Form::Form(double* field) : Form(NumberForm(Kind::kReal, field)) {}
Form::Form(std::optional<double>* field)
    : Form(OptionalForm(Kind::kReal, field, "none", {"none"})) {}
Form::Form(std::optional<int>* field) : Form(OptionalForm(Kind::kInteger, field, "", {})) {}
Form::Form(std::optional<int64_t>* field) : Form(OptionalForm(Kind::kInteger, field, "", {})) {}
Form::Form(std::optional<BFloat16Order>* field) : Form(Kind::kWord, "auto", BFloat16OrderWords()) {
  store = [field](const std::vector<std::string>& texts) {
    *field = ValueOf(texts.front(), kBFloat16OrderWords);
  };
}
Form::Form(bool* field) : Form(Kind::kSwitch) {
  store = [field](const std::vector<std::string>& texts) {
    *field = texts.front() == "true";
  };
}
Form::Form(std::string* field) : Form(Kind::kText, *field) {
  store = [field](const std::vector<std::string>& texts) {
    *field = texts.front();
  };
}
Form::Form(std::string* field, std::vector<std::string> all) : Form(field) {
  kind = Kind::kWord;
  words = std::move(all);
}
Form::Form(std::vector<std::string>* field) : Form(Kind::kPaths) {
  store = [field](const std::vector<std::string>& texts) {
    *field = texts;
  };
}
Form::Form(absl::Duration* field) : Form(Kind::kReal, absl::StrCat(absl::ToDoubleSeconds(*field))) {
  store = [field](const std::vector<std::string>& texts) {
    double seconds = 0;
    Read(texts.front(), seconds);
    *field = absl::Seconds(seconds);
  };
}

Form FormOf(const Field& field) {
  return std::visit(FieldForm(), field);
}

Setting& Setting::FlagOnly() {
  flag_only = true;
  return *this;
}
Setting& Setting::Shorthand(std::string flag, std::string value) {
  absl::StrAppend(&help, "; --", flag, " = ", value);
  shorthands.emplace_back(std::move(flag), std::move(value));
  return *this;
}
Setting& Setting::Alone(std::string value) {
  absl::StrAppend(&help, "; without a value ", value);
  alone = std::move(value);
  return *this;
}
Setting& Setting::Most(int64_t number) {
  most = number;
  return *this;
}
Setting& Setting::Least(double number, std::string text) {
  const bool whole = kind == Kind::kInteger;
  if (text.empty())
    text = whole ? absl::StrCat("at least ", number) : absl::StrCat(number, " or more");
  return Within(number, greatest, std::move(text));
}
Setting& Setting::Above(double number) {
  return Within(std::nextafter(number, greatest), greatest, absl::StrCat("more than ", number));
}
Setting& Setting::Within(double first, double last, std::string text) {
  least = first;
  greatest = last;
  expected = std::move(text);
  return *this;
}
Setting& Setting::ByLetter() {
  by_letter = true;
  return *this;
}
Setting& Setting::Field(std::string library_name) {
  field = std::move(library_name);
  return *this;
}
Setting& Setting::Roles(uint32_t more) {
  roles |= more;
  return *this;
}

void Table::Group(std::string heading, uint32_t roles) {
  group_ = std::move(heading);
  roles_ = roles;
}

Setting& Table::Add(absl::string_view flags, Form form, std::string help) {
  Setting row = {.group = group_,
                 .kind = form.kind,
                 .fallback = std::move(form.fallback),
                 .help = std::move(help),
                 .words = std::move(form.words),
                 .roles = roles_,
                 .store = std::move(form.store)};
  for (bool more = true; more;) {
    absl::string_view flag = flags.substr(0, flags.find(' '));
    flags.remove_prefix(std::min(flags.size(), flag.size() + 1));
    more = absl::ConsumeSuffix(&flag, ",");
    if (!absl::ConsumePrefix(&flag, "--")) {
      row.letter = flag[1];
    } else if (row.name.empty()) {
      row.name = std::string(flag);
    } else {
      row.alias = std::string(flag);
    }
  }
  row.value_name = std::string(flags);
  rows_.push_back(std::move(row));
  return rows_.back();
}

Setting& Table::Add(absl::string_view flags, const SettingRows& rows, std::string help) {
  const absl::string_view name = flags.substr(flags.find("--"));
  return Add(flags, FormOf(rows[name.substr(0, name.find_first_of(" ,"))]), std::move(help));
}

Table Table::Unbound() const {
  Table table = *this;
  for (Setting& row : table.rows_) row.store = nullptr;
  return table;
}

absl::Status WrongFlag(absl::string_view flag, absl::string_view value,
                       absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat(flag, " is ", value, ", expected ", expected));
}

absl::Status WrongValue(const Settings& settings, absl::string_view name,
                        absl::string_view expected) {
  return WrongFlag(absl::StrCat("--", name), settings.text(name), expected);
}

absl::Status Fill(const Settings& settings, const Table& rows) {
  for (const Setting& row : rows.rows()) {
    const Setting* const own = settings.Find(row.name);
    if (own == nullptr || own->kind != row.kind) continue;  // another command's word
    const std::vector<std::string>& texts = settings.value(row.name).texts;
    if (texts.empty()) continue;
    double number = 0;
    if (!row.expected.empty() && absl::SimpleAtod(texts.front(), &number) &&
        (number < row.least || number > row.greatest)) {
      const std::string flag = row.by_letter ? std::string{'-', row.letter} : "--" + row.name;
      return WrongFlag(flag, texts.front(), row.expected);
    }
    // A word beside whole numbers leaves the field to the command.
    if (row.kind == Kind::kInteger && absl::c_linear_search(row.words, texts.front())) continue;
    if (row.store != nullptr) row.store(texts);
  }
  return absl::OkStatus();
}

Settings::Settings(const Table& table) : table_(table.Unbound().rows()) {
  for (const Setting& s : table_) {
    Value& value = values_[s.name];
    if (!s.fallback.empty()) value.texts = {s.fallback};
    if (s.kind == Kind::kSwitch && s.fallback.empty()) value.texts = {"false"};
  }
}

const Setting* Settings::Find(absl::string_view name) const {
  return FindRow(table_, name);
}

std::vector<std::string> Settings::Names() const {
  std::vector<std::string> names;
  for (const Setting& s : table_) {
    names.push_back(s.name);
    if (!s.alias.empty()) names.push_back(s.alias);
    for (const auto& [flag, value] : s.shorthands) names.push_back(flag);
  }
  return names;
}

absl::Status Settings::Set(const Setting& setting, std::vector<std::string> texts, Origin origin,
                           std::string where) {
  MOE_RETURN_IF_ERROR(CheckForm(setting, texts, where));
  Value& value = values_[setting.name];
  if (value.origin > origin) return absl::OkStatus();
  const bool again = value.origin == origin;
  if (again && (origin == Origin::kFile || origin == Origin::kEnvironment) &&
      value.texts != texts) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, " is ", absl::StrJoin(texts, " "), ", but ", value.where, " already says ",
        absl::StrJoin(value.texts, " "), " for the same setting; expected one of them"));
  }
  if (again && setting.kind == Kind::kPaths && origin == Origin::kFlag) {
    value.texts.insert(value.texts.end(), texts.begin(), texts.end());
    return absl::OkStatus();
  }
  value = {.texts = std::move(texts), .origin = origin, .where = std::move(where)};
  return absl::OkStatus();
}

const Value& Settings::value(absl::string_view name) const {
  const auto it = values_.find(name);
  MOE_CHECK(it != values_.end());
  return it->second;
}

const std::string& Settings::text(absl::string_view name) const {
  static const std::string empty_text;
  const Value& v = value(name);
  return v.texts.empty() ? empty_text : v.texts.front();
}

int Settings::integer(absl::string_view name) const {
  int result = 0;
  MOE_CHECK(absl::SimpleAtoi(text(name), &result));
  return result;
}

uint64_t Settings::seed(absl::string_view name) const {
  uint64_t result = 0;
  MOE_CHECK(absl::SimpleAtoi(text(name), &result));
  return result;
}

double Settings::real(absl::string_view name) const {
  double result = 0;
  MOE_CHECK(absl::SimpleAtod(text(name), &result));
  return result;
}

absl::Status LoadEnvironment(absl::Span<const std::string> environment, Settings& settings,
                             std::vector<std::string>& warnings) {
  std::vector<std::string> sorted(environment.begin(), environment.end());
  std::sort(sorted.begin(), sorted.end());
  for (const std::string& entry : sorted) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    const std::string variable(parts.first);
    if (!absl::StartsWith(variable, "MOE_")) continue;
    const Setting* const setting = FindVariable(settings.table(), variable);
    if (setting == nullptr) {
      if (IsNoSetting(variable)) continue;
      warnings.push_back(absl::StrCat("environment variable ", variable, " sets nothing",
                                      NearestVariable(variable, settings.table())));
      continue;
    }
    std::vector<std::string> texts = {std::string(parts.second)};
    if (setting->kind == Kind::kPaths) texts = absl::StrSplit(parts.second, ':');
    MOE_RETURN_IF_ERROR(settings.Set(*setting, std::move(texts), Origin::kEnvironment, variable));
  }
  return absl::OkStatus();
}

const Setting* FindVariable(absl::Span<const Setting> rows, absl::string_view variable) {
  if (!absl::ConsumePrefix(&variable, "MOE_")) return nullptr;
  const std::string name = absl::AsciiStrToLower(variable);
  const Setting* setting = FindRow(rows, name);
  if (setting == nullptr) setting = FindRow(rows, absl::StrCat("moe-", name));
  return setting != nullptr && !setting->flag_only ? setting : nullptr;
}

std::string PrintSettings(const Settings& settings) {
  constexpr const char* kOrigins[] = {"default", "preset ", "file ", "env ", "flag "};
  size_t name_width = 0;
  size_t text_width = 0;
  const auto text_of = [&](const Setting& s) {
    const Value& value = settings.value(s.name);
    return value.texts.empty() ? std::string("-") : absl::StrJoin(value.texts, " ");
  };
  for (const Setting& s : settings.table()) {
    if (s.flag_only) continue;
    name_width = std::max(name_width, s.name.size());
    text_width = std::max(text_width, std::min<size_t>(text_of(s).size(), 40));
  }
  std::string out;
  for (const Setting& s : settings.table()) {
    if (s.flag_only) continue;
    const std::string text = text_of(s);
    const std::string name_pad(name_width + 2 - s.name.size(), ' ');
    const std::string text_pad(std::max(text_width, text.size()) + 2 - text.size(), ' ');
    const Value& value = settings.value(s.name);
    absl::StrAppend(&out, s.name, name_pad, text, text_pad,
                    kOrigins[static_cast<int>(value.origin)], value.where, "\n");
  }
  return out;
}

std::string FlagsOf(const Settings& settings, const std::function<bool(const Setting&)>& skip) {
  std::string out;
  for (const Setting& s : settings.table()) {
    const Value& value = settings.value(s.name);
    if (s.flag_only || value.origin <= Origin::kPreset || skip(s)) continue;
    if (s.kind == Kind::kSwitch) {
      absl::StrAppend(&out, " --", s.name, value.texts.front() == "true" ? "" : "=false");
      continue;
    }
    for (const std::string& text : value.texts) {
      absl::StrAppend(&out, " --", s.name, " ", ShellQuote(text));
    }
  }
  return out;
}

std::string ShellQuote(absl::string_view text) {
  const auto plain = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || absl::StrContains("_-./:=,+@%", c);
  };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return std::string(text);
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

}  // namespace moe::cli
