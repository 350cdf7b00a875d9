// Flags that several operations of `moe bench` read. Errors are kInvalidArgument with flag, value
// and what was expected.
#ifndef MOE_MOE_CLI_BENCH_FLAGS_H_
#define MOE_MOE_CLI_BENCH_FLAGS_H_

#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "kernels/base/dtype.h"
#include "moe/bench/collective_case.h"
#include "moe/bench/collectives.h"
#include "moe/bench/routing_spec.h"
#include "moe/cli/bench_options.h"
#include "moe/cli/settings.h"

namespace moe::cli {

// -d, with nccl-tests' names too.
DType TypeOf(absl::string_view name);

// --routing, its file read: a matrix of `ranks` ranks, or a trace replayed on them. Malformed files
// carry exit code 3.
absl::StatusOr<bench::RoutingSpec> RoutingOf(const Settings& settings, int ranks);

// How all-to-alls travel: --dispatch, --node-size.
absl::Status SetDispatch(const Settings& settings, int ranks, bench::CaseSpec& spec);

// -n, -w, -T, --max-noise, -c.
absl::Status SetMeasure(const Settings& settings, bench::MeasureOptions& measure);

// --pin, --quiet, --comm-timeout.
absl::Status SetRun(const Settings& settings, BenchRunOptions& run);

// -o, -oe, -J, --fail-if over `columns`.
absl::Status SetOutput(const Settings& settings, const std::vector<std::string>& columns,
                       BenchOutputOptions& options);

// Before anything runs, on the rank that speaks: -J, --trace and --svg can be written, and are
// other files than what --routing reads and than each other.
absl::Status CheckOutputs(const Settings& settings, const bench::RoutingSpec& routing);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_FLAGS_H_
