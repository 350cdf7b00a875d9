// The options of `moe verify`, and the ranks that run it.
#ifndef MOE_MOE_CLI_VERIFY_VERIFY_OPTIONS_H_
#define MOE_MOE_CLI_VERIFY_VERIFY_OPTIONS_H_

#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/cli/base/command.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/verify/verify.h"

namespace moe::cli {

// Flags over environment over presets over defaults. kInvalidArgument.
absl::StatusOr<Settings> LoadVerifySettings(absl::Span<const std::string> args,
                                            absl::Span<const std::string> environment,
                                            std::vector<std::string>& warnings);

// The names of --inject.
std::vector<std::string> FaultNames();

struct VerifyOptions {
  std::vector<verify::ProblemSpec> problems;  // one per gate and capacity
  bool of_model = false;                      // the problems are models, of this shape
  lm::TrainConfig model;
  std::vector<verify::Case> cases;
  verify::Fault fault = verify::Fault::kNone;
  DeviceKind device = DeviceKind::kCpu;
  std::optional<BFloat16Order> bfloat16_order;  // SessionOptions::bfloat16_order
  std::string output, output_stderr;  // "table", "csv", "json", "jsonl", "md"; the second may be ""
  bool verbose = false;
  bool quiet = false;
};

// The rows of `moe verify`. Rows that set fields set those of `options`, its model's included, and,
// for one gate, `spec`.
Table VerifySettings(VerifyOptions& options, verify::ProblemSpec& spec);

// The launch: processes that a launcher started, or threads of this process, as many as layouts
// have.
// Errors: those of PlanLaunch.
absl::StatusOr<Launch> PlanVerifyLaunch(const Settings& settings,
                                        absl::Span<const std::string> environment);

// Depends on settings and launch alone: processes make the same problems from the same flags.
// kInvalidArgument with flag, value and what was expected.
absl::StatusOr<VerifyOptions> MakeVerifyOptions(const Settings& settings, const Launch& launch);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_VERIFY_VERIFY_OPTIONS_H_
