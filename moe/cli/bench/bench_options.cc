#include "moe/cli/bench/bench_options.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/strip.h>
#include <fmt/format.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/config_file.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/program.h"
#include "moe/io/file.h"
#include "moe/io/routing_trace.h"

namespace moe::cli {

namespace {

// More than any machine has, and far below where products overflow.
constexpr int64_t kMostBytes = int64_t{1} << 40;
// The most rows of a table for people.
constexpr size_t kMostSizes = 10'000;

std::vector<std::string> Operations() {
  std::vector<std::string> names;
  for (const Operands::Word& operation : BenchOperations()) names.push_back(operation.name);
  return names;
}

// "65536", "64K", "64KiB", "16M", "1G" (powers of 1024); kInvalidArgument names the flag.
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

absl::StatusOr<std::vector<int64_t>> SizesOf(const Settings& settings) {
  MOE_ASSIGN_OR_RETURN(const int64_t begin, ParseBytes("-b", settings.text("minbytes")));
  MOE_ASSIGN_OR_RETURN(const int64_t given_end, ParseBytes("-e", settings.text("maxbytes")));
  // -b alone beyond the default end selects one size.
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
    if (step == 0 && size > end / factor) break;  // the next size may not fit 64 bits
    size = step > 0 ? size + step : size * factor;
  }
  return sizes;
}

absl::Status SetTraffic(const Settings& settings, int ranks, measure::CaseSpec& spec) {
  MOE_ASSIGN_OR_RETURN(spec.routing, RoutingOf(settings, ranks));
  spec.num_experts = settings.integer("num-experts");
  if (spec.routing.kind == measure::RoutingSpec::kTrace && settings.given("num-experts")) {
    return WrongValue(settings, "num-experts", "none: the trace says it");
  }
  if (spec.num_experts < 0) {
    return WrongValue(settings, "num-experts", "at least 0");
  }
  spec.seed = settings.seed("seed");
  DispatcherOptions dispatcher;
  MOE_RETURN_IF_ERROR(SetDispatch(settings, ranks, dispatcher));
  spec.dispatch = dispatcher.algorithm;
  spec.node_size = dispatcher.node_size;
  return absl::OkStatus();
}

absl::Status SetAllReduce(const Settings& settings, Backend backend, measure::CaseSpec& spec) {
  const std::string& name = settings.text("all-reduce");
  const bool ring_sums = spec.dtype == DType::kFloat32 || spec.dtype == DType::kInt64;
  const bool local = backend == Backend::kLocal;
  const char* const own = local ? "direct" : "library";
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

// Takes values from the trace that flags do not set: the type, and the bytes that were exchanged.
void UseTrace(const Settings& settings, CollectiveOptions& options) {
  const measure::Replay& replay = *options.spec.routing.replay;
  if (!settings.given("datatype")) options.spec.dtype = replay.header().dtype;
  if (settings.given("minbytes") || settings.given("maxbytes")) return;
  options.sizes = {std::max<int64_t>(1, replay.largest()) * replay.header().hidden_size *
                   SizeOf(options.spec.dtype)};
}

absl::Status ReadMatrix(absl::string_view text, int ranks, measure::RoutingSpec& routing) {
  auto weights = measure::ParseTrafficMatrix(text, ranks);
  if (!weights.ok()) {
    return WithExitCode(absl::InvalidArgumentError(absl::StrCat("--routing: '", routing.path,
                                                                "': ", weights.status().message())),
                        ExitCode::kBadInput);
  }
  routing.weights = *std::move(weights);
  return absl::OkStatus();
}

absl::Status ReadTrace(absl::string_view text, int ranks, measure::RoutingSpec& routing) {
  const auto trace = ParseRoutingTrace(routing.path, text);
  MOE_RETURN_IF_ERROR(InputError("--routing", trace.status()));
  auto replay = measure::Replay::Create(*trace, ranks);
  if (!replay.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--routing is ", routing.text, ": ", replay.status().message()));
  }
  routing.replay = std::make_shared<const measure::Replay>(*std::move(replay));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BenchCall> LoadBenchCall(absl::Span<const std::string> args,
                                        absl::Span<const std::string> environment,
                                        std::vector<std::string>& warnings) {
  BenchOptions defaults;
  BenchCall call{.operation = {}, .settings = Settings(BenchSettings(defaults))};
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

absl::Status RefuseUnread(const BenchCall& call) {
  for (const Setting& setting : call.settings.table()) {
    const std::string& name = setting.name;
    if (name == "seed" || name == "backend" || name == "comm-timeout") continue;
    if (!call.settings.given(name) || Reads(call.operation, setting)) continue;
    if (name == "routing") {
      return absl::InvalidArgumentError(
          absl::StrCat(call.operation, " has equal blocks; use: moe bench alltoallv --routing ",
                       call.settings.text(name)));
    }
    return WrongValue(call.settings, name,
                      absl::StrCat("none: moe bench ", call.operation, " does not read it"));
  }
  return absl::OkStatus();
}

std::string TimeText(const BenchCall& call, const char* what) {
  const measure::MeasureOptions& measure = call.options.measure;
  const std::string busy = call.busy.empty() ? "" : absl::StrCat("# busy: ", call.busy, "\n");
  return fmt::format("# time: {} of at least {} calls, until i_cv% <= {} or {} s\n{}#\n", what,
                     measure.iterations, measure.max_noise_pct,
                     absl::ToDoubleSeconds(measure.budget), busy);
}

absl::Status FillBenchOptions(BenchCall& call) {
  return Fill(call.settings, BenchSettings(call.options));
}

absl::Status SetFailIf(const measure::Fields& row, BenchCall& call) {
  if (call.settings.empty("fail-if")) return absl::OkStatus();
  auto parsed = measure::FailIf::Parse(call.settings.text("fail-if"), measure::NumberNamesOf(row));
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--fail-if is ", parsed.status().message()));
  }
  call.fail_if = *std::move(parsed);
  return absl::OkStatus();
}

absl::StatusOr<CollectiveOptions> MakeCollectiveOptions(const BenchCall& call,
                                                        const Launch& launch) {
  const Settings& settings = call.settings;
  CollectiveOptions options;
  options.spec.op = *ValueOf(call.operation, measure::kOpWords);
  options.spec.dtype = settings.choice("datatype", kDataTypes);
  MOE_RETURN_IF_ERROR(SetTraffic(settings, launch.world.ranks, options.spec));
  MOE_ASSIGN_OR_RETURN(options.sizes, SizesOf(settings));
  if (options.spec.routing.kind == measure::RoutingSpec::kTrace) UseTrace(settings, options);
  MOE_RETURN_IF_ERROR(SetAllReduce(settings, launch.world.backend, options.spec));
  options.format = settings.is("format", "nccl") ? BenchFormat::kNccl : BenchFormat::kTable;
  return options;
}

absl::StatusOr<measure::RoutingSpec> RoutingOf(const Settings& settings, int ranks) {
  auto parsed = measure::ParseRouting(settings.text("routing"));
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--", parsed.status().message()));
  }
  measure::RoutingSpec routing = *std::move(parsed);
  if (routing.path.empty()) return routing;
  const auto file = MappedFile::Open(routing.path);
  MOE_RETURN_IF_ERROR(InputError("--routing", file.status()));
  MOE_RETURN_IF_ERROR(routing.kind == measure::RoutingSpec::kMatrix
                          ? ReadMatrix(file->text(), ranks, routing)
                          : ReadTrace(file->text(), ranks, routing));
  return routing;
}

absl::Status SetDispatch(const Settings& settings, int ranks, DispatcherOptions& dispatcher) {
  dispatcher = {.algorithm = settings.choice("dispatch", kDispatchWords),
                .node_size = settings.integer("node-size")};
  const int node = dispatcher.node_size;
  if (node < 0 || node > ranks) {
    return WrongValue(settings, "node-size", absl::StrCat("0 to the ", ranks, " ranks"));
  }
  if (dispatcher.algorithm == DispatchAlgorithm::kHierarchical && node > 0 && ranks % node != 0) {
    return WrongValue(settings, "node-size",
                      absl::StrCat("a divisor of the ", ranks, " ranks for hierarchical dispatch"));
  }
  return absl::OkStatus();
}

absl::Status CheckOutputs(const Settings& settings, const measure::RoutingSpec& routing) {
  const std::vector<FlagPath> outputs = {{"-J", settings.text("json-file")},
                                         {"--trace", settings.text("trace")}};
  MOE_RETURN_IF_ERROR(CheckOutputPaths(
      {{"--config", settings.text("config")}, {"--routing", routing.path}}, outputs));
  for (const FlagPath& output : outputs) {
    if (!output.path.empty()) MOE_RETURN_IF_ERROR(CheckWritable(output.flag, output.path));
  }
  return absl::OkStatus();
}

}  // namespace moe::cli
