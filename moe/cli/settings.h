// Settings of a command: one table holds names, defaults and help; values come from flags, the
// environment, a file or the table.
#ifndef MOE_MOE_CLI_SETTINGS_H_
#define MOE_MOE_CLI_SETTINGS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe::cli {

enum class Kind : uint8_t {
  kInteger,  // fits 32 bits
  kSeed,     // 0 .. 2^64 - 1
  kReal,     // finite, also as a float
  kWord,     // one of `words`
  kText,
  kPaths,   // may be given several times
  kSwitch,  // true or false; the flag alone is true
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
  std::vector<std::string> words = {};  // all values (kWord), those beside numbers, some (kText)
  bool flag_only = false;               // not from the environment or a file
  int64_t most = 0;                     // of a number; 0: all that its kind holds
};

// Where a value came from, lowest precedence first.
enum class Origin : uint8_t { kDefault, kPreset, kFile, kEnvironment, kFlag };

struct Value {
  std::vector<std::string> texts;
  Origin origin = Origin::kDefault;
  std::string where;  // "--topk", "MOE_TOPK", "run.json: topk"; empty for defaults
};

class Settings {
 public:
  explicit Settings(std::vector<Setting> table);

  const std::vector<Setting>& table() const { return table_; }
  // By name or alias; '_' may stand for '-'. nullptr if there is none.
  const Setting* Find(absl::string_view name) const;
  std::vector<std::string> Names() const;  // with aliases

  // Gives a setting a value, unless it has one of higher precedence; the texts are checked in any
  // case. A flag given twice: the last wins, paths add up. Twice in the environment or the file:
  // kInvalidArgument, unless they agree. kInvalidArgument "<where> is 'x', expected ...".
  absl::Status Set(const Setting& setting, std::vector<std::string> texts, Origin origin,
                   std::string where);

  // By name (not alias), which must be in the table.
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

 private:
  std::vector<Setting> table_;
  std::map<std::string, Value, std::less<>> values_;  // by name
};

// How LoadFlags takes the setting, the long name first: "--output", "-o".
std::vector<std::string> Spellings(const Setting& setting);

// Flags. kInvalidArgument for unknown ones, missing values and stray arguments.
absl::Status LoadFlags(absl::Span<const std::string> args, Settings& settings);

// Variables "MOE_<NAME>=value" of `environment`: the name in capitals, '_' for '-', a leading
// "moe-" left out (MOE_ROUTER_TOPK). Paths are separated by ':'. Adds a line to `warnings` for an
// MOE_ variable that is near a setting's name but is none; others belong to someone else.
absl::Status LoadEnvironment(absl::Span<const std::string> environment, Settings& settings,
                             std::vector<std::string>& warnings);

// "flag --topk", "file run.json: topk", "default" ...
std::string DescribeOrigin(const Value& value);

// Every setting with its value and origin, one a line.
std::string PrintSettings(const Settings& settings);

// Flags that give the values that were given, quoted for a shell: " --topk 2 --data 'a b'"; those
// that equal a default too, since a preset may say otherwise. Leaves out settings that do not
// change results: `skip`.
std::string FlagsOf(const Settings& settings, const std::vector<std::string>& skip);

// `text` as one word of a POSIX shell.
std::string ShellQuote(absl::string_view text);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_SETTINGS_H_
