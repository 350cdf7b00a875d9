// The settings of `moe bench`, and the options that follow from them.
#ifndef MOE_MOE_CLI_BENCH_BENCH_OPTIONS_H_
#define MOE_MOE_CLI_BENCH_BENCH_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
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

// Values of -d, including nccl-tests' names.
inline constexpr Choice<DType> kDataTypes[] = {
    {"f32", DType::kFloat32},   {"f64", DType::kFloat64},     {"bf16", DType::kBFloat16},
    {"f16", DType::kFloat16},   {"i32", DType::kInt32},       {"i64", DType::kInt64},
    {"float", DType::kFloat32}, {"double", DType::kFloat64},  {"bfloat16", DType::kBFloat16},
    {"half", DType::kFloat16},  {"float16", DType::kFloat16}, {"int32", DType::kInt32},
    {"int64", DType::kInt64}};

// The given flags that change results, in the form of FlagsOf, except those that every row of
// `operation` has a key for: rows with different identities are not comparable.
std::string BenchIdentity(const Settings& settings, const std::string& operation);

// The operations with their names, in the order of the help.
std::vector<Operands::Word> BenchOperations();

// Whether `operation` reads the flag, and so lists it in its help.
bool Reads(absl::string_view operation, const Setting& setting);

// The help of one operation; of all if it is empty.
CommandHelp BenchHelp(absl::string_view operation);

// Options that every operation reads if it has the flags.
struct BenchOptions {
  measure::MeasureOptions measure;
  measure::LayerSpec layer;  // as set by flags
  bool pin = false;
  std::string json_path;
};

// The settings' table, in the order of the help: sizes and calls, traffic, a layer, ranks and
// output. Settings with a field set `options`.
Table BenchSettings(BenchOptions& options);

// A call: flags override the environment, which overrides defaults. `args`: the operation, then
// flags; --help and --print-config may come without an operation. kInvalidArgument.
struct BenchCall {
  std::string operation;  // empty with --help or --print-config alone
  Settings settings;
  BenchOptions options = {};                    // set by FillBenchOptions
  std::optional<measure::FailIf> fail_if = {};  // set by SetFailIf
  std::string busy = {};                        // BusyText before the measurement
  measure::Facts provenance = {};
};
absl::StatusOr<BenchCall> LoadBenchCall(absl::Span<const std::string> args,
                                        absl::Span<const std::string> environment,
                                        std::vector<std::string>& warnings);

// Lines above a table: when calls end, and whether other programs use the machine.
//   "# time: <what> of at least 20 calls, until ..."
std::string TimeText(const BenchCall& call, const char* what);

// kInvalidArgument for flags that the operation does not read. Seeds, backends and deadlines are
// accepted, since a script may pass them to every operation.
absl::Status RefuseUnread(const BenchCall& call);

// The functions below detect everything that can be wrong before ranks start, and read the traffic
// matrix. kInvalidArgument with flag, value and what was expected; a malformed matrix has exit code
// 3.

// Sets call.options.
absl::Status FillBenchOptions(BenchCall& call);

// For collectives.
enum class BenchFormat : uint8_t { kTable, kNccl };
struct CollectiveOptions {
  measure::CaseSpec spec;      // without its size
  std::vector<int64_t> sizes;  // bytes, ascending
  BenchFormat format = BenchFormat::kTable;
};
absl::StatusOr<CollectiveOptions> MakeCollectiveOptions(const BenchCall& call,
                                                        const Launch& launch);

// For a layer.
absl::StatusOr<measure::LayerSpec> MakeLayerSpec(const BenchCall& call, const Launch& launch);

// Sets call.fail_if from --fail-if, whose columns are the numbers of `row`.
absl::Status SetFailIf(const measure::Fields& row, BenchCall& call);

// The routing of --routing, with its file read: a matrix of `ranks` ranks, or a trace replayed on
// them. Malformed files have exit code 3.
absl::StatusOr<measure::RoutingSpec> RoutingOf(const Settings& settings, int ranks);

// The algorithm of all-to-alls: --dispatch, --node-size.
absl::Status SetDispatch(const Settings& settings, int ranks, DispatcherOptions& dispatcher);

// Called on the rank that prints before anything runs: checks that -J and --trace can be written,
// and name different files from each other and from those that --routing reads.
absl::Status CheckOutputs(const Settings& settings, const measure::RoutingSpec& routing);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_BENCH_OPTIONS_H_
