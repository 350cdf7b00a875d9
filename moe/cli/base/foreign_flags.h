// Flags of other trainers, Megatron-LM's, DeepSpeed's and their launchers', that this program has
// not as settings: what a line written for them means here.
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
  kNeedless,  // its values say what is done anyway
  kMemory,    // of memory and speed alone
  kRenamed,   // sets other flags
  kRefused,
};

// A row of the table, which docs/coming_from.md shows.
struct ForeignFlag {
  const char* name;  // without its dashes, as its program spells it
  ForeignUse use;
  // Values that are taken, between '|', numbers by value: "" of a flag that has none, "*" for any.
  const char* values;
  // What is done here; of a renamed flag the flags that it sets, "--a, --b"; of a refused one what
  // to do instead.
  const char* text;
  // Needless only beside this setting, else refused; empty: always.
  const char* beside = "";
};

// By use, then subject.
absl::Span<const ForeignFlag> ForeignFlags();

// By name, '_' as '-'; nullptr if there is none.
const ForeignFlag* FindForeignFlag(absl::string_view name);

// Begins the warning that lists what is of memory and speed alone.
inline constexpr char kMemoryAlone[] = "not done here, as it changes memory and speed alone: ";
// What stands in the place of writers of metrics.
inline constexpr char kInMetrics[] = "--out DIR has the metrics of every step";

// A flag as a command line has it, with the words behind it.
struct GivenFlag {
  std::string flag;  // "--split"
  const ForeignFlag* row = nullptr;
  std::vector<std::string> values;
};

// Takes flags of the table, once all flags of `settings` itself are set, which win over renamed
// ones. `refused` gets what each should be instead that is not taken, `warnings` one line that
// lists those that are needless and one for those of memory alone.
void TakeForeignFlags(absl::Span<const GivenFlag> flags, Settings& settings,
                      std::vector<std::string>& refused, std::vector<std::string>& warnings);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_FOREIGN_FLAGS_H_
