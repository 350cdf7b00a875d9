// The help of a table of settings.
#ifndef MOE_MOE_CLI_TABLE_HELP_H_
#define MOE_MOE_CLI_TABLE_HELP_H_

#include <string>

#include <absl/types/span.h>

#include "moe/cli/settings.h"

namespace moe::cli {

// Every setting below its group's heading: flags, help, words and default, 100 columns wide.
std::string TableHelp(absl::Span<const Setting> table);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TABLE_HELP_H_
