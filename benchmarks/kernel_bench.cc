// kernel_bench: the kernels of a layer, each alone on one process, by Google Benchmark.
//   kernel_bench gate|permute|combine|gemm [flags] [--benchmark_...]
// docs/bench.md has the kernels and the columns.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <benchmark/benchmark.h>

#include <boost/program_options.hpp>

#include "benchmarks/kernel_group.h"
#include "gating/gate.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/base/tree_cut.h"
#include "kernels/grouped_gemm/simd_targets.h"

namespace moe::measure {
namespace {

struct Options {
  std::string operation, dtype = "f32", routing = "uniform", device = "cpu", order = "auto";
  KernelShape shape;
  int threads = 1;
  bool cpu_clock = false;
};

constexpr struct {
  const char* name;
  MadeKernels (*make)(const KernelShape& shape, KernelDevice& device);
} kOperations[] = {{"gate", MakeGateKernels},
                   {"permute", MakePermuteKernels},
                   {"combine", MakeCombineKernels},
                   {"gemm", MakeGemmKernels}};

boost::program_options::options_description Flags(Options& options) {
  namespace po = boost::program_options;
  const auto value = [](auto& field) {
    return po::value(&field)->default_value(field);
  };
  KernelShape& shape = options.shape;
  po::options_description flags(
      "usage: kernel_bench gate|permute|combine|gemm [flags] [--benchmark_...]");
  flags.add_options()("operation", value(options.operation), "gate, permute, combine or gemm")   //
      ("tokens", value(shape.tokens), "T")                                                       //
      ("num-experts", value(shape.router.num_experts), "E")                                      //
      ("topk", value(shape.router.top_k), "slots of a token (K)")                                //
      ("hidden-size", value(shape.hidden), "H")                                                  //
      ("moe-ffn-hidden-size", value(shape.ffn), "F")                                             //
      ("dtype,d", value(options.dtype), "f32, bf16 or f16")                                      //
      ("router", value(shape.router.gate), "gate: by its name, with its defaults")               //
      ("routing", value(options.routing), "uniform, zipf:S or hot_expert:P")                     //
      ("leaves", value(shape.leaves), "gemm: of trees, 1, 2, 4, 8 or 16, beside one chain")      //
      ("bf16-order", value(options.order), "gemm: auto, dot or tile; auto is the fastest here")  //
      ("seed", value(shape.seed), "of everything that is drawn")                                 //
      ("device", value(options.device), "cpu, or cuda: the first one")                           //
      ("threads", value(options.threads), "of the CPU")                                          //
      ("cpu-clock", po::bool_switch(&options.cpu_clock),
       "time by the CPU clock of the process: for one thread on a shared machine");
  return flags;
}

absl::Status ParseFlags(int argc, char** argv, Options& options) {
  namespace po = boost::program_options;
  const po::options_description flags = Flags(options);
  po::positional_options_description first;
  first.add("operation", 1);
  try {  // Boost throws; our code does not.
    po::variables_map values;
    po::store(po::command_line_parser(argc, argv).options(flags).positional(first).run(), values);
    po::notify(values);
  } catch (const po::error& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return absl::OkStatus();
}

void PrintHelp() {
  Options defaults;
  std::ostringstream text;
  text << Flags(defaults) << "\nFlags of Google Benchmark:\n";
  std::fputs(text.str().c_str(), stdout);
  benchmark::PrintDefaultHelp();
}

absl::Status Expected(const char* flag, absl::string_view is, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat(flag, " is ", is, ", expected ", expected));
}

// Sets the options that depend on flags.
absl::Status CompleteShape(const Options& options, KernelShape& shape) {
  const std::optional<DType> dtype = ValueOf(options.dtype, kStorageTypeWords);
  if (!dtype.has_value()) return Expected("--dtype", options.dtype, "f32, bf16 or f16");
  shape.dtype = *dtype;
  MOE_ASSIGN_OR_RETURN(shape.routing, ParseRouting(options.routing));
  using Kind = RoutingSpec::Kind;
  if (const Kind kind = shape.routing.kind;
      kind != Kind::kUniform && kind != Kind::kZipf && kind != Kind::kHotExpert) {
    return Expected("--routing", options.routing, "uniform, zipf:S or hot_expert:P");
  }
  const RouterConfig& router = shape.router;
  if (FindGate(router.gate) == nullptr) return Expected("--router", router.gate, "a gate's name");
  if (router.top_k < 1 || router.top_k > router.num_experts) {
    return Expected("--topk", absl::StrCat(router.top_k), "1 to the experts");
  }
  if (std::min({shape.tokens, shape.hidden, shape.ffn, int64_t{options.threads}}) < 1) {
    return absl::InvalidArgumentError("sizes and threads are expected to be positive");
  }
  if (!IsTreeLeaves(shape.leaves)) {
    return Expected("--leaves", absl::StrCat(shape.leaves), "1, 2, 4, 8 or 16");
  }
  const auto order = options.order == "auto" ? std::optional(gemm::FastestBFloat16Order())
                                             : ValueOf(options.order, kBFloat16OrderWords);
  if (!order.has_value()) return Expected("--bf16-order", options.order, "auto, dot or tile");
  shape.order = *order;
  if (options.device != "cpu" && options.device != "cuda") {
    return Expected("--device", options.device, "cpu or cuda");
  }
  if (options.cpu_clock && (options.threads > 1 || options.device != "cpu")) {
    return absl::InvalidArgumentError("--cpu-clock is given, expected one thread of a CPU");
  }
  return absl::OkStatus();
}

// Runs one repetition: the limits, each the fastest of some measurements, then as many calls as
// Google Benchmark requests.
absl::Status Repetition(const Kernel& kernel, KernelDevice& device, benchmark::State& state) {
  constexpr int kLooks = 3;
  std::vector<double> most(kernel.limits.size(), 0);
  for (size_t look = 0; look < kLooks * most.size(); ++look) {
    const size_t i = look / kLooks;
    MOE_ASSIGN_OR_RETURN(const double measured, kernel.limits[i].measure());
    most[i] = std::max(most[i], measured);
  }
  double all_ns = 0;
  while (state.KeepRunning()) {
    MOE_ASSIGN_OR_RETURN(const double ns, device.Time(kernel.run));
    state.SetIterationTime(1e-9 * ns);
    all_ns += ns;
  }
  const double mean_ns = all_ns / static_cast<double>(state.iterations());
  state.counters[kernel.limits[0].unit] = kernel.limits[0].work / mean_ns;
  state.counters["work"] = kernel.limits[0].work;
  for (size_t i = 0; i < most.size(); ++i) {
    const KernelLimit& limit = kernel.limits[i];
    if (most[i] <= 0) continue;  // unknown
    state.counters[absl::StrCat(limit.name, "_", limit.unit)] = most[i];
    state.counters[absl::StrCat(limit.name, "_pct")] = 100 * limit.work / mean_ns / most[i];
  }
  return absl::OkStatus();
}

void AddContext(const Options& options, const KernelDevice& device) {
  const KernelShape& shape = options.shape;
  const auto add = [](const char* name, const auto& value) {
    benchmark::AddCustomContext(name, absl::StrCat(value));
  };
  add("op", options.operation);
  add("dtype", options.dtype);
  add("tokens", shape.tokens);
  add("topk", shape.router.top_k);
  add("experts", shape.router.num_experts);
  if (options.operation == "gate") add("router", shape.router.gate);
  if (options.operation != "gate") add("hidden", shape.hidden);
  if (options.operation == "gemm") add("ffn", shape.ffn);
  add("routing", options.routing);
  add("seed", shape.seed);
  add("device", device.is_cpu() ? "cpu" : CudaDevices()->front().name);
  add("threads", options.threads);
}

absl::Status Run(Options& options) {
  MOE_RETURN_IF_ERROR(CompleteShape(options, options.shape));
  const auto* const operation =
      std::find_if(std::begin(kOperations), std::end(kOperations),
                   [&](const auto& one) { return options.operation == one.name; });
  if (operation == std::end(kOperations)) {
    return Expected("the operation", options.operation, "gate, permute, combine or gemm");
  }
  ThreadPool threads(options.threads);
  MOE_ASSIGN_OR_RETURN(
      const auto device,
      KernelDevice::Create(options.device == "cpu" ? Device() : Device{DeviceKind::kCuda, 0},
                           threads, options.cpu_clock ? Clock::kProcess : Clock::kWall));
  MOE_ASSIGN_OR_RETURN(const auto group, operation->make(options.shape, *device));
  AddContext(options, *device);
  absl::Status failed;
  for (const Kernel& kernel : group->kernels()) {
    MOE_RETURN_IF_ERROR(kernel.run());  // touches pages, and grows the workspace
    const auto body = [&](benchmark::State& state) {
      const absl::Status status = Repetition(kernel, *device, state);
      if (status.ok()) return;
      state.SkipWithError(std::string(status.message()).c_str());
      failed.Update(status);
    };
    benchmark::RegisterBenchmark(absl::StrCat(operation->name, "/", kernel.name).c_str(), body)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond)
        ->ComputeStatistics("min", [](const std::vector<double>& values) {
          return *std::min_element(values.begin(), values.end());
        });
  }
  benchmark::RunSpecifiedBenchmarks();
  return failed;
}

// Defaults, which flags of Google Benchmark override because they come later.
absl::Status Main(int argc, char** argv) {
  constexpr const char* kDefaults[] = {"--benchmark_repetitions=11", "--benchmark_min_time=0.05",
                                       "--benchmark_min_warmup_time=0.05",
                                       "--benchmark_report_aggregates_only=true"};
  std::vector<char*> args = {argv[0]};
  for (const char* flag : kDefaults) args.push_back(const_cast<char*>(flag));
  args.insert(args.end(), argv + 1, argv + argc);
  int left = static_cast<int>(args.size());
  benchmark::Initialize(&left, args.data(), PrintHelp);
  MOE_RETURN_IF_ERROR(gemm::UseSimdTargetOfEnvironment());
  Options options;
  MOE_RETURN_IF_ERROR(ParseFlags(left, args.data(), options));
  return Run(options);
}

}  // namespace
}  // namespace moe::measure

int main(int argc, char** argv) {
  const absl::Status status = moe::measure::Main(argc, argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "kernel_bench: %s\n", std::string(status.message()).c_str());
  return status.code() == absl::StatusCode::kInvalidArgument ? 2 : 1;
}
