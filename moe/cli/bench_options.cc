#include "moe/cli/bench_options.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/strip.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/bench_settings.h"
#include "moe/cli/exit_code.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/program.h"
#include "moe/cli/suggest.h"
#include "moe/io/file.h"

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

DType TypeOf(absl::string_view name) {
  if (name == "f64" || name == "double") return DType::kFloat64;
  if (name == "bf16" || name == "bfloat16") return DType::kBFloat16;
  if (name == "i32" || name == "int32") return DType::kInt32;
  if (name == "i64" || name == "int64") return DType::kInt64;
  return DType::kFloat32;
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
  for (int64_t size = begin; size <= end; size = step > 0 ? size + step : size * factor) {
    if (sizes.size() == kMostSizes) {
      return WrongFlag("-i", settings.text("stepbytes"),
                       absl::StrCat("at most ", kMostSizes, " sizes"));
    }
    sizes.push_back(size);
  }
  return sizes;
}

absl::Status ReadMatrix(int ranks, bench::RoutingSpec& routing) {
  const auto file = MappedFile::Open(routing.path);
  MOE_RETURN_IF_ERROR(InputError("--routing", file.status()));
  const absl::string_view text(reinterpret_cast<const char*>(file->bytes().data()),
                               file->bytes().size());
  auto weights = bench::ParseTrafficMatrix(text, ranks);
  if (!weights.ok()) {
    return WithExitCode(absl::InvalidArgumentError(absl::StrCat("--routing: '", routing.path,
                                                                "': ", weights.status().message())),
                        ExitCode::kBadInput);
  }
  routing.weights = *std::move(weights);
  return absl::OkStatus();
}

// How all-to-alls travel.
absl::Status SetDispatch(const Settings& settings, int ranks, bench::CaseSpec& spec) {
  spec.dispatch = settings.is("dispatch", "direct")         ? DispatchAlgorithm::kDirect
                  : settings.is("dispatch", "hierarchical") ? DispatchAlgorithm::kHierarchical
                                                            : DispatchAlgorithm::kStaged;
  spec.node_size = settings.integer("node-size");
  if (spec.node_size < 0 || spec.node_size > ranks) {
    return WrongFlag("--node-size", settings.text("node-size"),
                     absl::StrCat("0 to the ", ranks, " ranks"));
  }
  if (spec.dispatch == DispatchAlgorithm::kHierarchical && spec.node_size > 0 &&
      ranks % spec.node_size != 0) {
    return WrongFlag("--node-size", settings.text("node-size"),
                     absl::StrCat("a divisor of the ", ranks, " ranks for hierarchical dispatch"));
  }
  return absl::OkStatus();
}

absl::Status SetTraffic(const Settings& settings, int ranks, bench::CaseSpec& spec) {
  const bool skewed = spec.op == bench::Op::kAllToAllV;
  if (settings.given("routing") && !skewed) {
    return WrongFlag("--routing", settings.text("routing"),
                     "none: only alltoallv has unequal blocks");
  }
  auto routing = bench::ParseRouting(settings.text("routing"));
  if (!routing.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--", routing.status().message()));
  }
  spec.routing = *std::move(routing);
  if (spec.routing.kind == bench::RoutingSpec::kMatrix) {
    MOE_RETURN_IF_ERROR(ReadMatrix(ranks, spec.routing));
  }
  spec.num_experts = settings.integer("num-experts");
  if (spec.num_experts < 0) {
    return WrongFlag("--num-experts", settings.text("num-experts"), "at least 0");
  }
  spec.seed = settings.seed("seed");
  if (settings.given("dispatch") && !skewed && spec.op != bench::Op::kAllToAll) {
    return WrongFlag("--dispatch", settings.text("dispatch"), "none: it is of all-to-alls");
  }
  return SetDispatch(settings, ranks, spec);
}

absl::Status SetAllReduce(const Settings& settings, bool threads, bench::CaseSpec& spec) {
  const std::string& name = settings.text("all-reduce");
  const bool ring_sums = spec.dtype == DType::kFloat32 || spec.dtype == DType::kInt64;
  const char* const own = threads ? "direct" : "library";
  if (name != "auto" && spec.op != bench::Op::kAllReduce) {
    return WrongFlag("--all-reduce", name, "none: it is of allreduce");
  }
  if (name == "ring" && !ring_sums) {
    return WrongFlag(
        "--all-reduce", name,
        absl::StrCat(own, " for -d ", settings.text("datatype"), ": the ring sums f32 and i64"));
  }
  if ((threads && name == "library") || (!threads && name == "direct")) {
    return WrongFlag("--all-reduce", name,
                     absl::StrCat("ring or ", own, " on ",
                                  threads ? "threads, which have no library"
                                          : "processes, which have no peer memory"));
  }
  spec.all_reduce = name == "ring" || (name == "auto" && ring_sums) ? AllReduceAlgorithm::kRing
                    : threads                                       ? AllReduceAlgorithm::kDirect
                                                                    : AllReduceAlgorithm::kLibrary;
  return absl::OkStatus();
}

absl::Status RefuseGiven(const Settings& settings, std::initializer_list<const char*> names,
                         absl::string_view expected) {
  for (const char* name : names) {
    if (!settings.given(name)) continue;
    return WrongFlag(absl::StrCat("--", name), settings.text(name), expected);
  }
  return absl::OkStatus();
}

// Type, shape and threads; num_experts 0 = not given.
absl::Status SetExperts(const Settings& settings, bench::GemmSpec& spec, int& threads) {
  spec.dtype = TypeOf(settings.text("datatype"));
  if (spec.dtype != DType::kFloat32 && spec.dtype != DType::kBFloat16) {
    return WrongFlag("-d", settings.text("datatype"), "f32 or bf16");
  }
  const auto at_least = [&](int least, const char* name, auto& field) -> absl::Status {
    field = settings.integer(name);
    if (field >= least) return absl::OkStatus();
    return WrongFlag(absl::StrCat("--", name), settings.text(name),
                     absl::StrCat("at least ", least));
  };
  MOE_RETURN_IF_ERROR(at_least(1, "tokens", spec.tokens));
  MOE_RETURN_IF_ERROR(at_least(1, "moe-router-topk", spec.top_k));
  MOE_RETURN_IF_ERROR(at_least(1, "hidden-size", spec.hidden));
  MOE_RETURN_IF_ERROR(at_least(1, "moe-ffn-hidden-size", spec.ffn));
  MOE_RETURN_IF_ERROR(at_least(0, "num-experts", spec.num_experts));
  MOE_RETURN_IF_ERROR(at_least(1, "threads", threads));
  spec.seed = settings.seed("seed");
  return absl::OkStatus();
}

absl::Status SetRun(const Settings& settings, BenchRunOptions& run) {
  run.pin = settings.on("pin");
  run.quiet = settings.on("quiet");
  if (settings.real("comm-timeout") <= 0) {
    return WrongFlag("--comm-timeout", settings.text("comm-timeout"), "more than 0");
  }
  run.comm_timeout = absl::Seconds(settings.real("comm-timeout"));
  return absl::OkStatus();
}

absl::Status SetMeasure(const Settings& settings, bench::MeasureOptions& measure) {
  measure.iterations = settings.integer("iters");
  measure.warmup = settings.integer("warmup-iters");
  measure.max_noise_pct = settings.real("max-noise");
  measure.budget = absl::Seconds(settings.real("timeout"));
  measure.check = settings.is("check", "1") ? bench::Check::kYes : bench::Check::kNo;
  if (measure.iterations < 1 || measure.iterations > 1'000'000) {
    return WrongFlag("-n", settings.text("iters"), "1 to 1000000");
  }
  if (measure.warmup < 0) return WrongFlag("-w", settings.text("warmup-iters"), "at least 0");
  if (measure.max_noise_pct < 0) {
    return WrongFlag("--max-noise", settings.text("max-noise"), "0 or more");
  }
  if (settings.real("timeout") < 0) return WrongFlag("-T", settings.text("timeout"), "0 or more");
  return absl::OkStatus();
}

absl::Status SetOutput(const Settings& settings, const std::vector<std::string>& columns,
                       BenchOutputOptions& options) {
  options.form = bench::TableFormOf(settings.text("output"));  // "table": none of them
  options.form_err = bench::TableFormOf(settings.text("output-stderr"));
  options.json_path = settings.text("json-file");
  if (settings.empty("fail-if")) return absl::OkStatus();
  auto parsed = bench::FailIf::Parse(settings.text("fail-if"), columns);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--fail-if is ", parsed.status().message()));
  }
  options.fail_if = *std::move(parsed);
  return absl::OkStatus();
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
  MOE_RETURN_IF_ERROR(LoadFlags(flags, call.settings));
  if (call.settings.on("help")) return call;
  MOE_RETURN_IF_ERROR(LoadEnvironment(environment, call.settings, warnings));
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
  MOE_ASSIGN_OR_RETURN(options.sizes, SizesOf(settings));
  MOE_RETURN_IF_ERROR(SetTraffic(settings, launch.world.ranks, options.spec));
  MOE_RETURN_IF_ERROR(SetAllReduce(settings, launch.world.threads, options.spec));
  MOE_RETURN_IF_ERROR(SetMeasure(settings, options.measure));
  MOE_RETURN_IF_ERROR(SetOutput(settings, bench::BenchNumberNames(), options.output));
  options.format = settings.is("format", "nccl") ? BenchFormat::kNccl : BenchFormat::kTable;
  options.svg_path = settings.text("svg");
  if (!options.svg_path.empty() && options.spec.op != bench::Op::kPointToPoint) {
    return WrongFlag("--svg", options.svg_path, "none: only p2p has a picture");
  }
  MOE_RETURN_IF_ERROR(SetRun(settings, options.run));
  return options;
}

absl::StatusOr<GemmBenchOptions> MakeGemmBenchOptions(const BenchCall& call, const Launch& launch) {
  const Settings& settings = call.settings;
  MOE_RETURN_IF_ERROR(RefuseGiven(settings,
                                  {"minbytes", "maxbytes", "stepfactor", "stepbytes", "dispatch",
                                   "node-size", "all-reduce", "ranks", "pin"},
                                  "none: gemm runs on one rank; its threads are --threads"));
  if (launch.plan.backend != Backend::kLocal) {
    return absl::InvalidArgumentError("gemm runs on one rank, expected no launcher");
  }
  GemmBenchOptions options;
  bench::GemmSpec& spec = options.spec;
  MOE_RETURN_IF_ERROR(SetExperts(settings, spec, options.threads));
  if (spec.num_experts == 0) spec.num_experts = 8;
  auto routing = bench::ParseRouting(settings.text("routing"));
  if (!routing.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--", routing.status().message()));
  }
  spec.routing = *std::move(routing);
  if (const auto rows = bench::ExpertRows(spec); !rows.ok()) {
    return WrongFlag("--routing", spec.routing.text,
                     "uniform, zipf:S or hot_expert:P, which are of experts");
  }
  bench::MeasureOptions measure;
  MOE_RETURN_IF_ERROR(SetMeasure(settings, measure));
  options.measure = {.iterations = measure.iterations,
                     .warmup = measure.warmup,
                     .budget = measure.budget,
                     .max_noise_pct = measure.max_noise_pct};
  MOE_RETURN_IF_ERROR(SetOutput(settings, bench::GemmKeys(), options.output));
  return options;
}

absl::StatusOr<LayerBenchOptions> MakeLayerBenchOptions(const BenchCall& call,
                                                        const Launch& launch) {
  const Settings& settings = call.settings;
  const int ranks = launch.world.ranks;
  MOE_RETURN_IF_ERROR(RefuseGiven(
      settings, {"minbytes", "maxbytes", "stepfactor", "stepbytes", "all-reduce", "routing"},
      "none: the layer's own router decides what travels"));
  LayerBenchOptions options;
  bench::GemmSpec shape;
  MOE_RETURN_IF_ERROR(SetExperts(settings, shape, options.spec.threads));
  bench::CaseSpec exchange;
  MOE_RETURN_IF_ERROR(SetDispatch(settings, ranks, exchange));
  options.spec.dtype = shape.dtype;
  options.spec.tokens = shape.tokens;
  options.spec.top_k = shape.top_k;
  options.spec.num_experts = shape.num_experts > 0 ? shape.num_experts : 8 * ranks;
  options.spec.hidden = shape.hidden;
  options.spec.ffn = shape.ffn;
  options.spec.seed = shape.seed;
  options.spec.dispatcher = {.algorithm = exchange.dispatch, .node_size = exchange.node_size};
  if (options.spec.top_k > options.spec.num_experts) {
    return WrongFlag("--topk", settings.text("moe-router-topk"),
                     absl::StrCat("at most the ", options.spec.num_experts, " experts"));
  }
  MOE_RETURN_IF_ERROR(SetMeasure(settings, options.measure));
  MOE_RETURN_IF_ERROR(SetOutput(settings, bench::LayerKeys(), options.output));
  MOE_RETURN_IF_ERROR(SetRun(settings, options.run));
  return options;
}

}  // namespace moe::cli
