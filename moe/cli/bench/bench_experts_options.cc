// What moe bench gate, permute, combine, gemm and layer were asked to do.
#include <algorithm>
#include <limits>
#include <utility>

#include <absl/strings/str_cat.h>

#include "gating/router_config.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/bench/bench_options.h"

namespace moe::cli {
namespace {

// Sizes that no machine holds, and whose products would not fit 64 bits. Of one rank; a width
// that an operation does not have is 0.
absl::Status CheckSizes(const bench::LayerSpec& spec, int64_t hidden_size,
                        int64_t ffn_hidden_size) {
  constexpr double kMostRows = std::numeric_limits<int32_t>::max();  // rows are numbered by int32
  const auto tokens = static_cast<double>(spec.tokens);
  const auto experts = static_cast<double>(spec.layer.router.num_outputs());
  const auto hidden = static_cast<double>(hidden_size);
  const auto ffn = static_cast<double>(ffn_hidden_size);
  const double rows = tokens * static_cast<double>(spec.layer.router.top_k);
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
  const DType type = settings.choice("datatype", kDataTypes);
  if (IsStorageType(type)) return type;
  return WrongFlag("-d", settings.text("datatype"), "f32, bf16 or f16");
}

absl::StatusOr<DType> LogitType(const Settings& settings, Device device) {
  if (!settings.given("datatype")) return DType::kFloat32;
  const DType type = settings.choice("datatype", kDataTypes);
  if (type == DType::kFloat32) return type;
  if (device.kind == DeviceKind::kCpu) {
    return WrongFlag("-d", settings.text("datatype"), "f32 for a gate");
  }
  if (Is16BitFloat(type)) return type;
  return WrongFlag("-d", settings.text("datatype"), "f32, bf16 or f16 for a gate");
}

absl::Status RefuseLauncher(const BenchCall& call, const Launch& launch) {
  if (!launch.plan.processes()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(call.operation, " runs on one rank, expected no launcher"));
}

// The flags of a layer, which its parts read too.
absl::StatusOr<bench::LayerSpec> LayerSpecOf(const BenchCall& call) {
  const Settings& settings = call.settings;
  bench::LayerSpec spec = call.options.part;
  if (spec.layer.router.hidden_size < 1) return WrongValue(settings, "hidden-size", "at least 1");
  MOE_RETURN_IF_ERROR(CompleteLayer(settings, spec.layer));
  MOE_ASSIGN_OR_RETURN(spec.dtype, ExpertType(settings));
  spec.seed = settings.seed("seed");
  return spec;
}

// What a trace says in the place of flags.
absl::Status UseTrace(const Settings& settings, const bench::Replay& replay,
                      bench::LayerSpec& spec) {
  constexpr const char* kOfTrace[] = {"tokens", "moe-router-topk", "num-experts",
                                      "expert-model-parallel-size"};
  for (const char* name : kOfTrace) {
    if (settings.given(name)) return WrongValue(settings, name, "none: the trace says it");
  }
  const RoutingTraceHeader& header = replay.header();
  RouterConfig& router = spec.layer.router;
  spec.tokens = replay.most_tokens();
  router.top_k = header.top_k;
  router.num_experts = header.num_experts;
  if (!settings.given("hidden-size")) router.hidden_size = header.hidden_size;
  if (!settings.given("datatype")) spec.dtype = header.dtype;
  return absl::OkStatus();
}

// What a part of the layer on one rank is given: how many rows, grouped how.
absl::StatusOr<bench::LayerSpec> PartOf(const BenchCall& call) {
  const Settings& settings = call.settings;
  MOE_ASSIGN_OR_RETURN(bench::LayerSpec part, LayerSpecOf(call));
  RouterConfig& router = part.layer.router;
  if (router.top_k < 1) return WrongValue(settings, "moe-router-topk", "at least 1");
  if (router.num_experts < 0) return WrongValue(settings, "num-experts", "at least 0");
  MOE_ASSIGN_OR_RETURN(part.routing, RoutingOf(settings, 1));
  using Kind = bench::RoutingSpec::Kind;
  const Kind kind = part.routing->kind;
  if (kind != Kind::kUniform && kind != Kind::kZipf && kind != Kind::kHotExpert &&
      kind != Kind::kTrace) {
    return WrongFlag("--routing", part.routing->text,
                     "uniform, zipf:S or hot_expert:P, which are of experts, or trace:FILE");
  }
  if (kind == Kind::kTrace) {
    MOE_RETURN_IF_ERROR(UseTrace(settings, *part.routing->replay, part));
  }
  if (router.num_experts == 0) router.num_experts = 8;
  return part;
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
  return InFlags(ValidateRouterConfig(router), settings);
}

absl::Status SetLayerRouting(const Settings& settings, int ranks, bench::LayerSpec& spec) {
  MOE_ASSIGN_OR_RETURN(bench::RoutingSpec routing, RoutingOf(settings, ranks));
  if (routing.kind == bench::RoutingSpec::kMatrix) {
    return WrongFlag("--routing", routing.text, "one of experts, tokens or a trace for a layer");
  }
  if (settings.given("router")) {
    return WrongValue(settings, "router",
                      "none with --routing, which says what experts the tokens are given");
  }
  if (routing.kind == bench::RoutingSpec::kTrace) {
    MOE_RETURN_IF_ERROR(UseTrace(settings, *routing.replay, spec));
  }
  spec.routing = std::move(routing);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<bench::KernelSpec> MakeKernelSpec(const BenchCall& call, const Launch& launch) {
  using bench::KernelOp;
  const Settings& settings = call.settings;
  MOE_RETURN_IF_ERROR(RefuseLauncher(call, launch));
  MOE_ASSIGN_OR_RETURN(const bench::LayerSpec part, PartOf(call));
  bench::KernelSpec spec = {.dtype = part.dtype,
                            .tokens = part.tokens,
                            .hidden = part.layer.router.hidden_size,
                            .ffn = part.layer.ffn_hidden_size,
                            .router = part.layer.router,
                            .routing = *part.routing,
                            .seed = part.seed};
  for (const KernelOp op :
       {KernelOp::kGate, KernelOp::kPermute, KernelOp::kCombine, KernelOp::kGemm}) {
    if (call.operation == bench::NameOf(op)) spec.op = op;
  }
  const bool gate = spec.op == KernelOp::kGate;
  const bool gemm = spec.op == KernelOp::kGemm;
  // A gate's logits and weights are float32 whatever the rows are.
  if (gate) {
    MOE_ASSIGN_OR_RETURN(spec.dtype, LogitType(settings, launch.device));
  }
  if (!gemm) MOE_RETURN_IF_ERROR(CheckRouter(spec.router, spec.tokens, settings));
  if (gemm && spec.router.top_k > spec.router.num_experts) {
    return WrongFlag("--moe-router-topk", absl::StrCat(spec.router.top_k),
                     absl::StrCat("1 to the ", spec.router.num_experts, " experts"));
  }
  MOE_RETURN_IF_ERROR(CheckSizes(part, gate ? 0 : spec.hidden, gemm ? spec.ffn : 0));
  return spec;
}

absl::StatusOr<bench::LayerSpec> MakeLayerSpec(const BenchCall& call, const Launch& launch) {
  const Settings& settings = call.settings;
  const int ranks = launch.world.ranks;
  MOE_ASSIGN_OR_RETURN(bench::LayerSpec spec, LayerSpecOf(call));
  if (spec.layer.pack_weights && launch.device.kind == DeviceKind::kCuda) {
    return WrongFlag("--pack-weights", "given", "none with --device cuda");
  }
  MOE_ASSIGN_OR_RETURN(spec.expert_parallel_size, ExpertParallelSize(settings, ranks));
  if (spec.layer.router.num_experts == 0) spec.layer.router.num_experts = 8 * ranks;
  if (settings.given("routing")) MOE_RETURN_IF_ERROR(SetLayerRouting(settings, ranks, spec));
  MOE_RETURN_IF_ERROR(SetDispatch(settings, spec.expert_parallel_size, spec.layer.dispatcher));
  spec.device = launch.device.kind;
  MOE_RETURN_IF_ERROR(CheckRouter(spec.layer.router, spec.tokens, settings));
  MOE_RETURN_IF_ERROR(CheckSizes(spec, spec.layer.router.hidden_size, spec.layer.ffn_hidden_size));
  return spec;
}

}  // namespace moe::cli
