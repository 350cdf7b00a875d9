// Flags of other trainers (Megatron-LM, DeepSpeed and their launchers) that are no settings of this
// program, and what they mean here.
#ifndef MOE_MOE_CLI_BASE_FOREIGN_FLAGS_H_
#define MOE_MOE_CLI_BASE_FOREIGN_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/cli/base/settings.h"

namespace moe::cli {

enum class ForeignUse : uint8_t {
  kNeedless,  // its values name what is done anyway
  kMemory,    // changes memory and speed alone
  kRenamed,   // sets other flags
  kRefused,
};

// A row of the table, which docs/coming_from.md shows.
struct ForeignFlag {
  std::string name;  // without its dashes, as its program spells it
  ForeignUse use;
  // Accepted values, separated by '|', numbers by value: "" for a flag without a value, "*" for
  // any.
  std::string values;
  // What is done here; for a renamed flag the flags that it sets, "--a, --b"; for a refused one
  // what to use instead.
  const char* text;
  // Setting beside which the flag is needless; without it the flag is refused. Empty: always
  // needless.
  const char* beside = "";
};

// Rows by use, then subject.
absl::Span<const ForeignFlag> ForeignFlags();

// Row by name, '_' as '-'; nullptr if there is none.
const ForeignFlag* FindForeignFlag(absl::string_view name);

// Start of the warning that lists flags that change memory and speed alone.
inline constexpr char kMemoryAlone[] = "not done here, as it changes memory and speed alone: ";
// Text for flags of writers of metrics: what replaces them.
inline constexpr char kInMetrics[] = "--out DIR has the metrics of every step";

// A flag as given on a command line, with the words that follow it.
struct GivenFlag {
  std::string flag;  // "--split"
  const ForeignFlag* row = nullptr;
  std::vector<std::string> values;
};

// Takes flags of the table once all flags of `settings` itself are set, which take precedence over
// renamed ones. Adds to `refused` what to use instead of each flag that is not accepted, and to
// `warnings` one line that lists the needless flags and one for those of kMemory.
void TakeForeignFlags(absl::Span<const GivenFlag> flags, Settings& settings,
                      std::vector<std::string>& refused, std::vector<std::string>& warnings);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_FOREIGN_FLAGS_H_
