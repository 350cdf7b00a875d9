// The command line that gives a run again.
#ifndef MOE_MOE_CLI_TRAIN_REPRODUCING_COMMAND_H_
#define MOE_MOE_CLI_TRAIN_REPRODUCING_COMMAND_H_

#include <optional>
#include <string>

#include "kernels/grouped_gemm/gemm_options.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"

namespace moe::cli {

// The command line that gives the same run, from the beginning, in folders of its own, also on CPUs
// for which it would choose another order of bfloat16.
std::string ReproducingCommand(const Invocation& invocation, Settings settings,
                               const Launch& launch, const std::optional<BFloat16Order>& order);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_REPRODUCING_COMMAND_H_
