// The settings of `moe bench`, and the options that they make.
#ifndef MOE_MOE_CLI_BENCH_BENCH_OPTIONS_H_
#define MOE_MOE_CLI_BENCH_BENCH_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "dispatch/dispatcher.h"
#include "kernels/base/dtype.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/measure/collective_case.h"
#include "moe/cli/measure/collectives.h"
#include "moe/cli/measure/fail_if.h"
#include "moe/cli/measure/layer_bench.h"
#include "moe/cli/measure/routing_spec.h"
#include "moe/cli/measure/tables.h"

namespace moe::cli {

// -d, with nccl-tests' names too.
inline constexpr Choice<DType> kDataTypes[] = {
    {"f32", DType::kFloat32},   {"f64", DType::kFloat64},     {"bf16", DType::kBFloat16},
    {"f16", DType::kFloat16},   {"i32", DType::kInt32},       {"i64", DType::kInt64},
    {"float", DType::kFloat32}, {"double", DType::kFloat64},  {"bfloat16", DType::kBFloat16},
    {"half", DType::kFloat16},  {"float16", DType::kFloat16}, {"int32", DType::kInt32},
    {"int64", DType::kInt64}};

// Flags as FlagsOf has them of what was given and changes results, but for what every row of
// `operation` has a key for: rows that differ in it are of different things.
std::string BenchIdentity(const Settings& settings, const std::string& operation);

// With their names, in the order of the help.
std::vector<Operands::Word> BenchOperations();

// Whether `operation` reads the flag: what its help lists.
bool Reads(absl::string_view operation, const Setting& setting);

// Of one operation; of all where it is empty.
CommandHelp BenchHelp(absl::string_view operation);

// What every operation reads of its flags, if it has them.
struct BenchOptions {
  measure::MeasureOptions measure;
  measure::LayerSpec layer;  // as the flags say it
  bool pin = false;
  absl::Duration comm_timeout;
  std::string json_path;
};

// Rows in the order of the help: those of sizes and calls, of traffic, of a layer, of ranks
// and of output. Those with a field set `options`.
Table BenchSettings(BenchOptions& options);

// Flags over environment over defaults. `args`: the operation, then flags; alone --help and
// --print-config come without one. kInvalidArgument.
struct BenchCall {
  std::string operation;  // empty with --help or --print-config alone
  Settings settings;
  BenchOptions options = {};                    // by FillBenchOptions
  std::optional<measure::FailIf> fail_if = {};  // by SetFailIf
  std::string busy = {};                        // BusyText before anything ran
  measure::Facts provenance = {};
};
absl::StatusOr<BenchCall> LoadBenchCall(absl::Span<const std::string> args,
                                        absl::Span<const std::string> environment,
                                        std::vector<std::string>& warnings);

// Lines above a table: when calls end, and whether others use the machine.
//   "# time: <what> of at least 20 calls, until ..."
std::string TimeText(const BenchCall& call, const char* what);

// kInvalidArgument for flags that the operation does not read. Seeds, backends and deadlines pass:
// they may be of a whole script.
absl::Status RefuseUnread(const BenchCall& call);

// The following find everything that can be wrong before ranks start, and read the traffic matrix.
// kInvalidArgument with flag, value and what was expected; a malformed matrix carries exit code 3.

// Sets call.options.
absl::Status FillBenchOptions(BenchCall& call);

// Collectives.
enum class BenchFormat : uint8_t { kTable, kNccl };
struct CollectiveOptions {
  measure::CaseSpec spec;      // all but its size
  std::vector<int64_t> sizes;  // bytes, ascending
  BenchFormat format = BenchFormat::kTable;
};
absl::StatusOr<CollectiveOptions> MakeCollectiveOptions(const BenchCall& call,
                                                        const Launch& launch);

// A layer.
absl::StatusOr<measure::LayerSpec> MakeLayerSpec(const BenchCall& call, const Launch& launch);

// Sets call.fail_if, of --fail-if, whose columns are the numbers of `row`.
absl::Status SetFailIf(const measure::Fields& row, BenchCall& call);

// --routing, its file read: a matrix of `ranks` ranks, or a trace replayed on them. Malformed files
// carry exit code 3.
absl::StatusOr<measure::RoutingSpec> RoutingOf(const Settings& settings, int ranks);

// How all-to-alls travel: --dispatch, --node-size.
absl::Status SetDispatch(const Settings& settings, int ranks, DispatcherOptions& dispatcher);

// Before anything runs, on the rank that speaks: -J, --trace and --svg can be written, and are
// other files than what --routing reads and than each other.
absl::Status CheckOutputs(const Settings& settings, const measure::RoutingSpec& routing);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_BENCH_OPTIONS_H_
