#include "moe/cli/bench_options.h"

#include <algorithm>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/strip.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/bench_flags.h"
#include "moe/cli/bench_settings.h"
#include "moe/cli/config_file.h"
#include "moe/cli/exit_code.h"
#include "moe/cli/launch.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/program.h"
#include "moe/cli/suggest.h"

namespace moe::cli {
namespace {

// More than any machine has, and far from where products overflow.
constexpr int64_t kMostBytes = int64_t{1} << 40;
// Of a table that somebody reads.
constexpr size_t kMostSizes = 10'000;

std::vector<std::string> Operations() {
  std::vector<std::string> names;
  for (const Operands::Word& operation : BenchOperations()) names.push_back(operation.name);
  return names;
}

absl::StatusOr<std::vector<int64_t>> SizesOf(const Settings& settings) {
  MOE_ASSIGN_OR_RETURN(const int64_t begin, ParseBytes("-b", settings.text("minbytes")));
  MOE_ASSIGN_OR_RETURN(const int64_t given_end, ParseBytes("-e", settings.text("maxbytes")));
  // -b alone beyond the default end is one size.
  const int64_t end = settings.given("maxbytes") ? given_end : std::max(begin, given_end);
  if (end < begin) {
    return WrongFlag("-e", settings.text("maxbytes"),
                     absl::StrCat("at least -b ", settings.text("minbytes")));
  }
  const int factor = settings.integer("stepfactor");
  if (factor < 2) return WrongFlag("-f", settings.text("stepfactor"), "at least 2");
  int64_t step = 0;
  if (!settings.empty("stepbytes")) {
    if (settings.given("stepfactor")) {
      return WrongFlag("-i", settings.text("stepbytes"), "either -i or -f, not both");
    }
    MOE_ASSIGN_OR_RETURN(step, ParseBytes("-i", settings.text("stepbytes")));
  }
  std::vector<int64_t> sizes;
  int64_t size = begin;
  while (size <= end) {
    if (sizes.size() == kMostSizes) {
      return WrongFlag("-i", settings.text("stepbytes"),
                       absl::StrCat("at most ", kMostSizes, " sizes"));
    }
    sizes.push_back(size);
    if (step == 0 && size > end / factor) break;  // the next may not fit 64 bits
    size = step > 0 ? size + step : size * factor;
  }
  return sizes;
}

absl::Status SetTraffic(const Settings& settings, int ranks, bench::CaseSpec& spec) {
  const bool skewed = spec.op == bench::Op::kAllToAllV;
  if (settings.given("routing") && !skewed) {
    return WrongFlag("--routing", settings.text("routing"),
                     "none: only alltoallv has unequal blocks");
  }
  MOE_ASSIGN_OR_RETURN(spec.routing, RoutingOf(settings, ranks));
  spec.num_experts = settings.integer("num-experts");
  if (spec.routing.kind == bench::RoutingSpec::kTrace && settings.given("num-experts")) {
    return WrongFlag("--num-experts", settings.text("num-experts"), "none: the trace says it");
  }
  if (spec.num_experts < 0) {
    return WrongFlag("--num-experts", settings.text("num-experts"), "at least 0");
  }
  spec.seed = settings.seed("seed");
  if (settings.given("dispatch") && !skewed && spec.op != bench::Op::kAllToAll) {
    return WrongFlag("--dispatch", settings.text("dispatch"), "none: it is of all-to-alls");
  }
  return SetDispatch(settings, ranks, spec);
}

absl::Status SetAllReduce(const Settings& settings, Backend backend, bench::CaseSpec& spec) {
  const std::string& name = settings.text("all-reduce");
  const bool ring_sums = spec.dtype == DType::kFloat32 || spec.dtype == DType::kInt64;
  const bool local = backend == Backend::kLocal;
  const char* const own = local ? "direct" : "library";
  if (name != "auto" && spec.op != bench::Op::kAllReduce) {
    return WrongFlag("--all-reduce", name, "none: it is of allreduce");
  }
  if (name == "ring" && !ring_sums) {
    return WrongFlag(
        "--all-reduce", name,
        absl::StrCat(own, " for -d ", settings.text("datatype"), ": the ring sums f32 and i64"));
  }
  MOE_RETURN_IF_ERROR(CheckAllReduce(settings, backend));
  spec.all_reduce = name == "ring" || (name == "auto" && ring_sums) ? AllReduceAlgorithm::kRing
                    : local                                         ? AllReduceAlgorithm::kDirect
                                                                    : AllReduceAlgorithm::kLibrary;
  return absl::OkStatus();
}

// What the trace has where flags say nothing: type, and the bytes that travelled.
void UseTrace(const Settings& settings, BenchOptions& options) {
  const bench::Replay& replay = *options.spec.routing.replay;
  if (!settings.given("datatype")) options.spec.dtype = replay.header().dtype;
  if (settings.given("minbytes") || settings.given("maxbytes")) return;
  options.sizes = {std::max<int64_t>(1, replay.largest()) * replay.header().hidden_size *
                   SizeOf(options.spec.dtype)};
}

}  // namespace

absl::StatusOr<int64_t> ParseBytes(absl::string_view flag, absl::string_view text) {
  absl::string_view digits = text;
  int64_t unit = 1;
  if (!absl::ConsumeSuffix(&digits, "iB")) absl::ConsumeSuffix(&digits, "B");
  if (absl::ConsumeSuffix(&digits, "K") || absl::ConsumeSuffix(&digits, "k")) {
    unit = int64_t{1} << 10;
  } else if (absl::ConsumeSuffix(&digits, "M") || absl::ConsumeSuffix(&digits, "m")) {
    unit = int64_t{1} << 20;
  } else if (absl::ConsumeSuffix(&digits, "G") || absl::ConsumeSuffix(&digits, "g")) {
    unit = int64_t{1} << 30;
  }
  int64_t number = 0;
  if (absl::SimpleAtoi(digits, &number) && number >= 1 && number <= kMostBytes / unit) {
    return number * unit;
  }
  return WrongFlag(flag, absl::StrCat("'", text, "'"),
                   "bytes from 1 to 1024G: a whole number, with K, M or G for powers of 1024");
}

absl::StatusOr<BenchCall> LoadBenchCall(absl::Span<const std::string> args,
                                        absl::Span<const std::string> environment,
                                        std::vector<std::string>& warnings) {
  BenchCall call{.operation = {}, .settings = Settings(BenchSettings())};
  std::vector<std::string> flags(args.begin(), args.end());
  if (!flags.empty() && flags[0][0] != '-') {
    call.operation = flags[0];
    flags.erase(flags.begin());
    const auto& known = Operations();
    if (std::find(known.begin(), known.end(), call.operation) == known.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown operation '", call.operation, "'",
                       DidYouMean(call.operation, known, "",
                                  absl::StrCat("; expected ", absl::StrJoin(known, ", ")))));
    }
  }
  MOE_RETURN_IF_ERROR(LoadSettings(flags, environment, call.settings, warnings));
  if (call.settings.on("help")) return call;
  MOE_RETURN_IF_ERROR(ApplyRouterPreset(call.settings));
  if (call.operation.empty() && !call.settings.on("print-config")) {
    return absl::InvalidArgumentError(absl::StrCat("no operation, expected moe bench ",
                                                   absl::StrJoin(Operations(), "|"),
                                                   "; see moe bench --help"));
  }
  return call;
}

absl::StatusOr<BenchOptions> MakeBenchOptions(const BenchCall& call, const Launch& launch) {
  const Settings& settings = call.settings;
  BenchOptions options;
  options.spec.op = *bench::OpOf(call.operation);
  options.spec.dtype = TypeOf(settings.text("datatype"));
  MOE_RETURN_IF_ERROR(SetTraffic(settings, launch.world.ranks, options.spec));
  MOE_ASSIGN_OR_RETURN(options.sizes, SizesOf(settings));
  if (options.spec.routing.kind == bench::RoutingSpec::kTrace) UseTrace(settings, options);
  MOE_RETURN_IF_ERROR(SetAllReduce(settings, launch.world.backend, options.spec));
  MOE_RETURN_IF_ERROR(SetMeasure(settings, options.measure));
  MOE_RETURN_IF_ERROR(
      SetOutput(settings, bench::NumberNamesOf(bench::BenchFields({})), options.output));
  options.format = settings.is("format", "nccl") ? BenchFormat::kNccl : BenchFormat::kTable;
  options.svg_path = settings.text("svg");
  if (!options.svg_path.empty() && options.spec.op != bench::Op::kPointToPoint) {
    return WrongFlag("--svg", options.svg_path, "none: only p2p has a picture");
  }
  MOE_RETURN_IF_ERROR(SetRun(settings, options.run));
  return options;
}

}  // namespace moe::cli
