// Settings of a command: one table holds names, defaults and help; values come from flags, the
// environment, a file or the table.
#ifndef MOE_MOE_CLI_BASE_SETTINGS_H_
#define MOE_MOE_CLI_BASE_SETTINGS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "kernels/base/choice.h"
#include "moe/run/settings.h"

namespace moe::cli {

template <typename T, size_t N>
std::vector<std::string> WordsOf(const Choice<T> (&choices)[N]) {
  std::vector<std::string> words;
  for (const Choice<T>& choice : choices) words.emplace_back(choice.word);
  return words;
}

// The name with '-' for '_'.
std::string Dashed(absl::string_view name);

enum class Kind : uint8_t {
  kInteger,  // fits 32 bits
  kSeed,     // 0 .. 2^64 - 1
  kReal,     // finite, also as a float
  kWord,     // one of `words`
  kText,
  kPaths,   // may be given several times
  kSwitch,  // true or false; the flag alone is true
};

// "auto" and the orders.
inline std::vector<std::string> BFloat16OrderWords() {
  std::vector<std::string> words = WordsOf(kBFloat16OrderWords);
  words.insert(words.begin(), "auto");
  return words;
}

// Values that a flag takes, its default, and the field it sets. The field holds the default until
// then.
struct Form {
  // NOLINTBEGIN(google-explicit-constructor): rows name their fields, "&config.steps"
  Form(Kind form, std::string text = "", std::vector<std::string> all = {})
      : kind(form), fallback(std::move(text)), words(std::move(all)) {}
  Form(int* field);
  Form(int64_t* field);
  Form(uint64_t* field);
  Form(float* field);
  Form(double* field);
  Form(bool* field);
  Form(std::string* field);
  Form(std::string* field, std::vector<std::string> all);  // one of all
  Form(std::vector<std::string>* field);
  Form(absl::Duration* field);                // seconds
  Form(std::optional<double>* field);         // a number, or "none", the default
  Form(std::optional<int>* field);            // none without the flag
  Form(std::optional<int64_t>* field);        // likewise
  Form(std::optional<BFloat16Order>* field);  // a word, or "auto", the default
  template <typename T, size_t N>
  Form(T* field, const Choice<T> (&choices)[N])
      : kind(Kind::kWord), fallback(NameOf(*field, choices)), words(WordsOf(choices)) {
    store = [field, &choices](const std::vector<std::string>& texts) {
      *field = ValueOf(texts.front(), choices).value_or(*field);
    };
  }
  // NOLINTEND(google-explicit-constructor)

  Kind kind = Kind::kText;
  std::string fallback;
  std::vector<std::string> words;
  // Sets the field from texts of the kind.
  std::function<void(const std::vector<std::string>&)> store;
};

// The form of a row's field, whose type must be one that flags take.
Form FormOf(const Field& field);

// Roles of a setting in sweeps, in rows of results and among ranks, which compare its value unless
// it has one of the last three.
enum Role : uint32_t {
  kOfOneRun = 1 << 0,     // belongs to one run's files and screen
  kPlacement = 1 << 1,    // how a run is executed, without effect on results
  kOfLayer = 1 << 2,      // a layer alone has it, as training does
  kNotTrained = 1 << 3,   // a measured layer has it, training does not
  kAlwaysTold = 1 << 4,   // named even as a default, which a preset may change
  kGeneralGate = 1 << 5,  // only the general gate reads it
  kOfGate = 1 << 6,       // no effect where tokens are given their experts
  kInRow = 1 << 7,        // rows of `moe bench` have a key for it, or do not depend on it
  kInLayerRow = 1 << 8,   // rows of `moe bench layer` have a key for it
  kPerRank = 1 << 9,      // ranks may differ: one rank's files, screen or threads
  kByContent = 1 << 10,   // files that are read: ranks compare their contents, not their paths
  kOneFolder = 1 << 11,   // given on all ranks or on none; the ranks check that they see one folder
};

// A row of the table.
struct Setting {
  std::string group;  // heading in the help
  std::string name;   // "moe-router-topk": the flag without its dashes
  std::string alias;  // "topk", or empty
  char letter = 0;    // 'v' for -v
  Kind kind = Kind::kText;
  std::string value_name;  // in the help: "N", "SECONDS"
  std::string fallback;    // default; empty = none
  std::string help;
  // All values (kWord), values beside numbers, or some of the values (kText).
  std::vector<std::string> words = {};
  // Flags without a value that stand for a value: --bf16 for --dtype bf16.
  std::vector<std::pair<std::string, std::string>> shorthands = {};
  std::string alone;       // value of the flag if none follows it
  bool flag_only = false;  // not from the environment or a file
  int64_t most = 0;        // largest number; 0: the limit of its kind
  // Range of a number that Fill accepts, and its text in the message.
  double least = std::numeric_limits<double>::lowest();
  double greatest = std::numeric_limits<double>::max();
  std::string expected;
  bool by_letter = false;  // Fill's message names the setting by its letter
  std::string field;       // its name in messages of the library, if that differs
  uint32_t roles = 0;
  std::function<void(const std::vector<std::string>&)> store;  // sets its field; may be empty

  bool is(uint32_t any_of) const { return (roles & any_of) != 0; }

  // Setters of a new row's rarer properties.
  Setting& FlagOnly();
  Setting& Shorthand(std::string flag, std::string value);  // also in the help
  Setting& Alone(std::string value);                        // likewise
  Setting& Most(int64_t number);
  // Fill returns kInvalidArgument: "--name is 0, expected at least 1", for reals "0 or more".
  Setting& Least(double number, std::string text = "");
  Setting& Above(double number);  // "more than 0"
  Setting& Within(double first, double last, std::string text);
  Setting& ByLetter();
  Setting& Field(std::string library_name);
  Setting& Roles(uint32_t more);
};

// Rows in the order of the help.
class Table {
 public:
  // Heading and roles of the rows that follow.
  void Group(std::string heading, uint32_t roles = 0);
  // `flags` as the help shows them: "--moe-router-topk, --topk K", "-q, --quiet".
  Setting& Add(absl::string_view flags, Form form, std::string help);
  // Sets the field of the row that has the flag's name.
  Setting& Add(absl::string_view flags, const SettingRows& rows, std::string help);
  void Add(const Setting& row) { rows_.push_back(row); }
  const std::vector<Setting>& rows() const& { return rows_; }
  std::vector<Setting> rows() && { return std::move(rows_); }
  // A copy whose rows set no fields, which may then end.
  Table Unbound() const;

 private:
  std::string group_;
  uint32_t roles_ = 0;
  std::vector<Setting> rows_;
};

// Origin of a value, lowest precedence first.
enum class Origin : uint8_t { kDefault, kPreset, kFile, kEnvironment, kFlag };

struct Value {
  std::vector<std::string> texts;
  Origin origin = Origin::kDefault;
  std::string where;  // "--topk", "MOE_TOPK", "run.json: topk"; empty for defaults
};

class Settings {
 public:
  // Copies the rows of `table` without their fields; Fill takes rows that have theirs.
  explicit Settings(const Table& table);

  const std::vector<Setting>& table() const { return table_; }
  // Row by name or alias; '_' may stand for '-'. nullptr if there is none.
  const Setting* Find(absl::string_view name) const;
  std::vector<std::string> Names() const;  // with aliases and shorthands

  // Gives a setting a value, unless it has one of higher precedence; the texts are checked in any
  // case. A flag given twice: the last wins, paths add up. Twice in the environment or the file:
  // kInvalidArgument, unless they agree. kInvalidArgument "<where> is 'x', expected ...".
  absl::Status Set(const Setting& setting, std::vector<std::string> texts, Origin origin,
                   std::string where);

  // Value by name (not alias), which must be in the table.
  const Value& value(absl::string_view name) const;
  bool given(absl::string_view name) const { return value(name).origin > Origin::kPreset; }
  bool empty(absl::string_view name) const { return value(name).texts.empty(); }
  const std::string& text(absl::string_view name) const;
  bool is(absl::string_view name, absl::string_view word) const { return text(name) == word; }
  // The value must be a number, not one of the words beside it.
  int integer(absl::string_view name) const;
  uint64_t seed(absl::string_view name) const;
  double real(absl::string_view name) const;
  bool on(absl::string_view name) const { return is(name, "true"); }
  template <typename T, size_t N>
  T choice(absl::string_view name, const Choice<T> (&choices)[N]) const {
    return ValueOf(text(name), choices).value_or(choices[0].value);
  }

 private:
  std::vector<Setting> table_;
  std::map<std::string, Value, std::less<>> values_;  // by name
};

// Sets the fields of `rows`, all of which are rows of `settings`, to its values. kInvalidArgument:
// a number that its row does not accept.
absl::Status Fill(const Settings& settings, const Table& rows);

// kInvalidArgument "<flag> is <value>, expected <expected>".
absl::Status WrongFlag(absl::string_view flag, absl::string_view value, absl::string_view expected);
// The same for a setting, by its name and value.
absl::Status WrongValue(const Settings& settings, absl::string_view name,
                        absl::string_view expected);

// How LoadFlags accepts the setting, the long name first: "--output", "-o".
std::vector<std::string> Spellings(const Setting& setting);

struct Arguments {
  std::vector<std::string> flags;  // with their values
  std::vector<std::string> operands;
};
// For commands with operands, which LoadFlags does not handle.
Arguments SplitOperands(absl::Span<const std::string> args, const Settings& settings);

// Loads flags; for commands that train also those of other trainers (foreign_flags.h), which add
// lines to `warnings`. kInvalidArgument names all that are unknown or have a wrong value, each with
// the nearest; a missing value is reported alone.
absl::Status LoadFlags(absl::Span<const std::string> args, Settings& settings,
                       std::vector<std::string>* warnings = nullptr);

// Variables "MOE_<NAME>=value" of `environment`: the name in capitals, '_' for '-', a leading
// "moe-" left out (MOE_ROUTER_TOPK). Paths are separated by ':'. Adds a line to `warnings` for any
// other MOE_ variable, with the nearest, but for those that this project reads elsewhere.
absl::Status LoadEnvironment(absl::Span<const std::string> environment, Settings& settings,
                             std::vector<std::string>& warnings);

// The row that a variable of this name sets; nullptr if there is none.
const Setting* FindVariable(absl::Span<const Setting> rows, absl::string_view variable);

// Every setting with its value and origin, one a line.
std::string PrintSettings(const Settings& settings);

// Flags that set the values that were given, quoted for a shell: " --topk 2 --data 'a b'"; those
// that equal a default too, since a preset may set another value. Settings for which `skip` is true
// are left out.
std::string FlagsOf(const Settings& settings, const std::function<bool(const Setting&)>& skip);

// `text` as one word of a POSIX shell.
std::string ShellQuote(absl::string_view text);

// Edits that turn `a` into `b`: insert, delete, replace, swap neighbours.
int EditDistance(absl::string_view a, absl::string_view b);

// The nearest of `known`, or "" if none is near: at most a third of the letters wrong (two in short
// words), else a name of which `word` is a part. Ties: the first.
std::string Nearest(absl::string_view word, const std::vector<std::string>& known);

// "; did you mean '<prefix><nearest>'?", or `otherwise` if nothing is near.
std::string DidYouMean(absl::string_view word, const std::vector<std::string>& known,
                       absl::string_view prefix, absl::string_view otherwise);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_SETTINGS_H_
