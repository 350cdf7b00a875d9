// What `moe bench` was asked to do.
#ifndef MOE_MOE_CLI_BENCH_OPTIONS_H_
#define MOE_MOE_CLI_BENCH_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "moe/bench/collectives.h"
#include "moe/bench/fail_if.h"
#include "moe/bench/gemm_bench.h"
#include "moe/bench/kernel_bench.h"
#include "moe/bench/layer_bench.h"
#include "moe/bench/tables.h"
#include "moe/cli/launch.h"
#include "moe/cli/settings.h"

namespace moe::cli {

enum class BenchFormat : uint8_t { kTable, kNccl };

// Where results go, the same for every operation.
struct BenchOutputOptions {
  std::optional<bench::TableForm> form, form_err;  // -o, -oe
  std::string json_path;
  std::optional<bench::FailIf> fail_if;
};

// How ranks run, the same for every operation that has some.
struct BenchRunOptions {
  bool pin = false;
  bool quiet = false;
  absl::Duration comm_timeout;
};

// Collectives.
struct BenchOptions {
  bench::CaseSpec spec;  // all but its size
  bench::MeasureOptions measure;
  std::vector<int64_t> sizes;  // bytes, ascending
  BenchFormat format = BenchFormat::kTable;
  std::string svg_path;
  BenchOutputOptions output;
  BenchRunOptions run;
};

// Flags over environment over defaults. `args`: the operation, then flags; alone --help and
// --print-config come without one. kInvalidArgument.
struct BenchCall {
  std::string operation;  // empty with --help or --print-config alone
  Settings settings;
};
absl::StatusOr<BenchCall> LoadBenchCall(absl::Span<const std::string> args,
                                        absl::Span<const std::string> environment,
                                        std::vector<std::string>& warnings);

// Everything that can be wrong before ranks start; reads the traffic matrix. kInvalidArgument with
// flag, value and what was expected; a malformed matrix carries exit code 3.
absl::StatusOr<BenchOptions> MakeBenchOptions(const BenchCall& call, const Launch& launch);

// The parts of a layer, and a layer. As MakeBenchOptions; flags that an operation does not read
// are refused.
struct GemmBenchOptions {
  bench::GemmSpec spec;
  bench::MeasureOptions measure;
  int threads = 1;
  BenchOutputOptions output;
};
absl::StatusOr<GemmBenchOptions> MakeGemmBenchOptions(const BenchCall& call, const Launch& launch);

struct KernelBenchOptions {
  bench::KernelSpec spec;
  bench::MeasureOptions measure;
  int threads = 1;
  BenchOutputOptions output;
};
absl::StatusOr<KernelBenchOptions> MakeKernelBenchOptions(const BenchCall& call,
                                                          const Launch& launch);

struct LayerBenchOptions {
  bench::LayerSpec spec;
  bench::MeasureOptions measure;
  BenchOutputOptions output;
  BenchRunOptions run;
};
absl::StatusOr<LayerBenchOptions> MakeLayerBenchOptions(const BenchCall& call,
                                                        const Launch& launch);

// "65536", "64K", "64KiB", "16M", "1G" (powers of 1024); kInvalidArgument names the flag.
absl::StatusOr<int64_t> ParseBytes(absl::string_view flag, absl::string_view text);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_OPTIONS_H_
