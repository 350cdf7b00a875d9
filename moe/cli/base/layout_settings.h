// Layouts of moe/plan as settings of moe train.
#ifndef MOE_MOE_CLI_BASE_LAYOUT_SETTINGS_H_
#define MOE_MOE_CLI_BASE_LAYOUT_SETTINGS_H_

#include "moe/cli/base/settings.h"
#include "moe/plan/mesh_search.h"

namespace moe::cli {

// These settings with a layout.
Settings WithLayout(Settings train, const plan::Candidate& candidate);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_LAYOUT_SETTINGS_H_
