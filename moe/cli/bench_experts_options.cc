// What moe bench gate, permute, combine, gemm and layer were asked to do.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "gating/router_config.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/cli/bench_flags.h"
#include "moe/cli/bench_options.h"
#include "moe/cli/bench_settings.h"
#include "moe/cli/layer_settings.h"

namespace moe::cli {
namespace {

constexpr const char* kOneRank[] = {"minbytes",   "maxbytes", "stepfactor", "stepbytes",
                                    "all-reduce", "dispatch", "node-size",  "ranks",
                                    "pin",        "format",   "svg"};

absl::Status RefuseGiven(const Settings& settings, absl::Span<const char* const> names,
                         absl::string_view expected) {
  for (const char* name : names) {
    if (!settings.given(name)) continue;
    return WrongFlag(absl::StrCat("--", name), settings.text(name), expected);
  }
  return absl::OkStatus();
}

// Flags of the layer that parts of it do not read; `read` are those that they do.
absl::Status RefuseLayerFlags(const BenchCall& call, absl::Span<const char* const> read) {
  for (const Setting& setting : BenchSettings()) {
    if (setting.group != kLayerGroup && setting.group != kRouterGroup) continue;
    if (!call.settings.given(setting.name)) continue;
    if (std::find(read.begin(), read.end(), setting.name) != read.end()) continue;
    return WrongFlag(absl::StrCat("--", setting.name), call.settings.text(setting.name),
                     absl::StrCat("none: moe bench ", call.operation, " does not read it"));
  }
  return absl::OkStatus();
}

template <typename Field>
absl::Status SetAtLeast(const Settings& settings, int least, const char* name, Field& field) {
  field = settings.integer(name);
  if (settings.integer(name) >= least) return absl::OkStatus();
  return WrongFlag(absl::StrCat("--", name), settings.text(name), absl::StrCat("at least ", least));
}

// Sizes that no machine holds, and whose products would not fit 64 bits. Of one rank; a width
// that an operation does not have is 0.
struct PartSizes {
  int64_t tokens = 0, top_k = 0, num_experts = 0, hidden = 0, ffn = 0;
};
absl::Status CheckSizes(const PartSizes& sizes) {
  constexpr double kMostRows = std::numeric_limits<int32_t>::max();  // rows are numbered by int32
  const auto tokens = static_cast<double>(sizes.tokens);
  const auto experts = static_cast<double>(sizes.num_experts);
  const auto hidden = static_cast<double>(sizes.hidden);
  const auto ffn = static_cast<double>(sizes.ffn);
  const double rows = tokens * static_cast<double>(sizes.top_k);
  if (rows > kMostRows) {
    return WrongFlag("--tokens x --moe-router-topk", absl::StrCat("about ", rows),
                     absl::StrCat("at most ", std::numeric_limits<int32_t>::max(), " rows"));
  }
  // Rows on either side of the experts, logits or drawn preferences, weights.
  const double widest =
      std::max({rows * std::max(hidden, ffn), tokens * experts, 3 * experts * hidden * ffn});
  if (widest <= kMostElements) return absl::OkStatus();
  return WrongFlag("the largest array", absl::StrCat("about ", widest, " elements"),
                   "at most 1e12: fewer tokens or experts, or smaller widths");
}

absl::StatusOr<DType> ExpertType(const Settings& settings) {
  const DType type = TypeOf(settings.text("datatype"));
  if (IsStorageType(type)) return type;
  return WrongFlag("-d", settings.text("datatype"), "f32, bf16 or f16");
}

absl::StatusOr<DType> LogitType(const Settings& settings, Device device) {
  if (!settings.given("datatype")) return DType::kFloat32;
  const DType type = TypeOf(settings.text("datatype"));
  if (type == DType::kFloat32) return type;
  if (device.kind == DeviceKind::kCpu) {
    return WrongFlag("-d", settings.text("datatype"), "f32 for a gate");
  }
  if (Is16BitFloat(type)) return type;
  return WrongFlag("-d", settings.text("datatype"), "f32, bf16 or f16 for a gate");
}

absl::Status RefuseLauncher(const BenchCall& call, const Launch& launch) {
  MOE_RETURN_IF_ERROR(RefuseGiven(
      call.settings, kOneRank,
      absl::StrCat("none: ", call.operation, " runs on one rank; its threads are --threads")));
  if (!launch.plan.processes()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(call.operation, " runs on one rank, expected no launcher"));
}

// What a trace says in the place of flags.
struct ShapeOfTrace {
  DType& dtype;
  int64_t& tokens;
  int64_t& hidden;
  int& top_k;
  int& num_experts;
};
absl::Status UseTrace(const Settings& settings, const bench::Replay& replay,
                      const ShapeOfTrace& shape) {
  constexpr const char* kOfTrace[] = {"tokens", "moe-router-topk", "num-experts",
                                      "expert-model-parallel-size"};
  MOE_RETURN_IF_ERROR(RefuseGiven(settings, kOfTrace, "none: the trace says it"));
  const RoutingTraceHeader& header = replay.header();
  shape.tokens = replay.most_tokens();
  shape.top_k = header.top_k;
  shape.num_experts = header.num_experts;
  if (!settings.given("hidden-size")) shape.hidden = header.hidden_size;
  if (!settings.given("datatype")) shape.dtype = header.dtype;
  return absl::OkStatus();
}

// What a part of the layer on one rank is given: how many rows, grouped how.
struct PartShape {
  DType dtype = DType::kFloat32;
  int64_t tokens = 0, hidden = 0;
  int top_k = 0, num_experts = 0, threads = 1;
  bench::RoutingSpec routing;
};

absl::StatusOr<PartShape> PartShapeOf(const Settings& settings) {
  PartShape shape;
  MOE_ASSIGN_OR_RETURN(shape.dtype, ExpertType(settings));
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 1, "tokens", shape.tokens));
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 1, "moe-router-topk", shape.top_k));
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 1, "hidden-size", shape.hidden));
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 0, "num-experts", shape.num_experts));
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 1, "threads", shape.threads));
  MOE_ASSIGN_OR_RETURN(shape.routing, RoutingOf(settings, 1));
  using Kind = bench::RoutingSpec::Kind;
  const Kind kind = shape.routing.kind;
  if (kind != Kind::kUniform && kind != Kind::kZipf && kind != Kind::kHotExpert &&
      kind != Kind::kTrace) {
    return WrongFlag("--routing", shape.routing.text,
                     "uniform, zipf:S or hot_expert:P, which are of experts, or trace:FILE");
  }
  if (kind == Kind::kTrace) {
    MOE_RETURN_IF_ERROR(UseTrace(settings, *shape.routing.replay,
                                 {.dtype = shape.dtype,
                                  .tokens = shape.tokens,
                                  .hidden = shape.hidden,
                                  .top_k = shape.top_k,
                                  .num_experts = shape.num_experts}));
  }
  if (shape.num_experts == 0) shape.num_experts = 8;
  return shape;
}

absl::StatusOr<int> ExpertParallelSize(const Settings& settings, int ranks) {
  constexpr char kName[] = "expert-model-parallel-size";
  if (settings.empty(kName)) return ranks;
  const int size = settings.integer(kName);
  if (size >= 1 && ranks % size == 0) return size;
  return WrongFlag("--ep", settings.text(kName),
                   absl::StrCat("a divisor of the ", ranks, " ranks"));
}

absl::Status CheckRouter(RouterConfig router, int64_t tokens, const Settings& settings) {
  router.micro_batch_tokens = tokens;
  const absl::Status status = ValidateRouterConfig(router);
  if (status.ok()) return status;
  return absl::InvalidArgumentError(InFlags(status.message(), settings));
}

absl::Status SetLayerRouting(const Settings& settings, int ranks, bench::LayerSpec& spec) {
  MOE_ASSIGN_OR_RETURN(bench::RoutingSpec routing, RoutingOf(settings, ranks));
  if (routing.kind == bench::RoutingSpec::kMatrix) {
    return WrongFlag("--routing", routing.text, "one of experts, tokens or a trace for a layer");
  }
  if (settings.given("router")) {
    return WrongFlag("--router", settings.text("router"),
                     "none with --routing, which says what experts the tokens are given");
  }
  if (routing.kind == bench::RoutingSpec::kTrace) {
    MOE_RETURN_IF_ERROR(UseTrace(settings, *routing.replay,
                                 {.dtype = spec.dtype,
                                  .tokens = spec.tokens,
                                  .hidden = spec.layer.router.hidden_size,
                                  .top_k = spec.layer.router.top_k,
                                  .num_experts = spec.layer.router.num_experts}));
  }
  spec.routing = std::move(routing);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GemmBenchOptions> MakeGemmBenchOptions(const BenchCall& call, const Launch& launch) {
  const Settings& settings = call.settings;
  MOE_RETURN_IF_ERROR(RefuseLauncher(call, launch));
  constexpr const char* kRead[] = {"tokens",      "moe-router-topk",     "num-experts",
                                   "hidden-size", "moe-ffn-hidden-size", "threads"};
  MOE_RETURN_IF_ERROR(RefuseLayerFlags(call, kRead));
  MOE_ASSIGN_OR_RETURN(const PartShape shape, PartShapeOf(settings));
  GemmBenchOptions options;
  options.spec = {.dtype = shape.dtype,
                  .tokens = shape.tokens,
                  .top_k = shape.top_k,
                  .num_experts = shape.num_experts,
                  .hidden = shape.hidden,
                  .routing = shape.routing,
                  .seed = settings.seed("seed")};
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 1, "moe-ffn-hidden-size", options.spec.ffn));
  if (shape.top_k > shape.num_experts) {
    return WrongFlag("--moe-router-topk", absl::StrCat(shape.top_k),
                     absl::StrCat("1 to the ", shape.num_experts, " experts"));
  }
  MOE_RETURN_IF_ERROR(CheckSizes({.tokens = shape.tokens,
                                  .top_k = shape.top_k,
                                  .num_experts = shape.num_experts,
                                  .hidden = shape.hidden,
                                  .ffn = options.spec.ffn}));
  options.threads = shape.threads;
  MOE_RETURN_IF_ERROR(SetMeasure(settings, options.measure));
  MOE_RETURN_IF_ERROR(
      SetOutput(settings, bench::NumberNamesOf(bench::GemmFields({})), options.output));
  return options;
}

absl::StatusOr<KernelBenchOptions> MakeKernelBenchOptions(const BenchCall& call,
                                                          const Launch& launch) {
  const Settings& settings = call.settings;
  MOE_RETURN_IF_ERROR(RefuseLauncher(call, launch));
  const bool gate = call.operation == "gate";
  std::vector<const char*> read = {"tokens", "moe-router-topk", "num-experts", "threads"};
  if (!gate) read.push_back("hidden-size");
  if (gate) {
    read.insert(read.end(), {"router", "moe-router-score-function", "moe-router-pre-softmax",
                             "moe-router-num-groups", "moe-router-group-topk",
                             "moe-router-topk-scaling-factor", "moe-router-enable-expert-bias",
                             "moe-router-random-second", "moe-expert-capacity-factor"});
  }
  MOE_RETURN_IF_ERROR(RefuseLayerFlags(call, read));
  MOE_ASSIGN_OR_RETURN(const PartShape shape, PartShapeOf(settings));
  KernelBenchOptions options;
  bench::KernelSpec& spec = options.spec;
  MOE_ASSIGN_OR_RETURN(const MoeLayerConfig layer, LayerConfigOf(settings));
  spec = {.op = gate                          ? bench::KernelOp::kGate
                : call.operation == "permute" ? bench::KernelOp::kPermute
                                              : bench::KernelOp::kCombine,
          .dtype = shape.dtype,
          .tokens = shape.tokens,
          .hidden = shape.hidden,
          .router = layer.router,
          .routing = shape.routing,
          .seed = settings.seed("seed")};
  spec.router.num_experts = shape.num_experts;
  spec.router.top_k = shape.top_k;
  // A gate's logits and weights are float32 whatever the rows are.
  if (gate) {
    MOE_ASSIGN_OR_RETURN(spec.dtype, LogitType(settings, launch.device));
  }
  MOE_RETURN_IF_ERROR(CheckRouter(spec.router, spec.tokens, settings));
  MOE_RETURN_IF_ERROR(CheckSizes({.tokens = shape.tokens,
                                  .top_k = shape.top_k,
                                  .num_experts = shape.num_experts,
                                  .hidden = gate ? 0 : shape.hidden}));
  options.threads = shape.threads;
  MOE_RETURN_IF_ERROR(SetMeasure(settings, options.measure));
  MOE_RETURN_IF_ERROR(
      SetOutput(settings, bench::NumberNamesOf(bench::KernelFields({})), options.output));
  return options;
}

absl::StatusOr<LayerBenchOptions> MakeLayerBenchOptions(const BenchCall& call,
                                                        const Launch& launch) {
  const Settings& settings = call.settings;
  const int ranks = launch.world.ranks;
  constexpr const char* kUnread[] = {"minbytes",   "maxbytes", "stepfactor", "stepbytes",
                                     "all-reduce", "check",    "format",     "svg"};
  MOE_RETURN_IF_ERROR(RefuseGiven(settings, kUnread, "none: moe bench layer does not read it"));
  LayerBenchOptions options;
  bench::LayerSpec& spec = options.spec;
  MOE_ASSIGN_OR_RETURN(spec.layer, LayerConfigOf(settings));
  MOE_ASSIGN_OR_RETURN(spec.dtype, ExpertType(settings));
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 1, "tokens", spec.tokens));
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 1, "hidden-size", spec.layer.router.hidden_size));
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 1, "moe-ffn-hidden-size", spec.layer.ffn_hidden_size));
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 1, "threads", spec.threads));
  MOE_RETURN_IF_ERROR(SetAtLeast(settings, 1, "moe-overlap-degree", spec.layer.overlap_degree));
  spec.layer.pack_weights = settings.on("pack-weights");
  if (spec.layer.pack_weights && launch.device.kind == DeviceKind::kCuda) {
    return WrongFlag("--pack-weights", "given", "none with --device cuda");
  }
  MOE_ASSIGN_OR_RETURN(spec.expert_parallel_size, ExpertParallelSize(settings, ranks));
  if (spec.layer.router.num_experts == 0) spec.layer.router.num_experts = 8 * ranks;
  if (settings.given("routing")) MOE_RETURN_IF_ERROR(SetLayerRouting(settings, ranks, spec));
  bench::CaseSpec exchange;
  MOE_RETURN_IF_ERROR(SetDispatch(settings, spec.expert_parallel_size, exchange));
  spec.layer.dispatcher = {.algorithm = exchange.dispatch, .node_size = exchange.node_size};
  spec.device = launch.device.kind;
  spec.seed = settings.seed("seed");
  MOE_RETURN_IF_ERROR(CheckRouter(spec.layer.router, spec.tokens, settings));
  MOE_RETURN_IF_ERROR(CheckSizes({.tokens = spec.tokens,
                                  .top_k = spec.layer.router.top_k,
                                  .num_experts = spec.layer.router.num_outputs(),
                                  .hidden = spec.layer.router.hidden_size,
                                  .ffn = spec.layer.ffn_hidden_size}));
  MOE_RETURN_IF_ERROR(SetMeasure(settings, options.measure));
  MOE_RETURN_IF_ERROR(
      SetOutput(settings, bench::NumberNamesOf(bench::LayerFields({}, {})), options.output));
  MOE_RETURN_IF_ERROR(SetRun(settings, options.run));
  return options;
}

}  // namespace moe::cli
