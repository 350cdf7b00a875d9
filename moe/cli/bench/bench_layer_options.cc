// The options of moe bench layer.
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

// Limits sizes that no machine holds, and whose products would not fit 64 bits. For one rank.
absl::Status CheckSizes(const measure::LayerSpec& spec) {
  constexpr double kMostRows = std::numeric_limits<int32_t>::max();  // rows are numbered by int32
  const auto tokens = static_cast<double>(spec.rows());
  const auto experts = static_cast<double>(spec.layer.router.num_outputs());
  const auto hidden = static_cast<double>(spec.layer.router.hidden_size);
  const auto ffn = static_cast<double>(spec.layer.ffn_hidden_size);
  const double rows = tokens * static_cast<double>(spec.layer.router.top_k);
  if (rows > kMostRows) {
    return WrongFlag("--tokens x --moe-router-topk", absl::StrCat("about ", rows),
                     absl::StrCat("at most ", std::numeric_limits<int32_t>::max(), " rows"));
  }
  // Rows before and after the experts, logits or drawn preferences, weights.
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

absl::StatusOr<measure::LayerSpec> LayerSpecOf(const BenchCall& call) {
  const Settings& settings = call.settings;
  measure::LayerSpec spec = call.options.layer;
  if (spec.layer.router.hidden_size < 1) return WrongValue(settings, "hidden-size", "at least 1");
  MOE_RETURN_IF_ERROR(CompleteLayer(settings, spec.layer));
  MOE_ASSIGN_OR_RETURN(spec.trainer.dtype, ExpertType(settings));
  spec.trainer.seed = settings.seed("seed");
  return spec;
}

// Takes the sizes of the layer from a trace, which replaces these flags.
absl::Status UseTrace(const Settings& settings, const measure::Replay& replay,
                      measure::LayerSpec& spec) {
  constexpr const char* kOfTrace[] = {"tokens",
                                      "moe-router-topk",
                                      "num-experts",
                                      "expert-model-parallel-size",
                                      "tensor-model-parallel-size",
                                      "expert-tensor-parallel-size"};
  for (const char* name : kOfTrace) {
    if (settings.given(name)) return WrongValue(settings, name, "none: the trace says it");
  }
  const RoutingTraceHeader& header = replay.header();
  RouterConfig& router = spec.layer.router;
  spec.tokens = replay.most_tokens();
  router.top_k = header.top_k;
  router.num_experts = header.num_experts;
  if (!settings.given("hidden-size")) router.hidden_size = header.hidden_size;
  if (!settings.given("datatype")) spec.trainer.dtype = header.dtype;
  return absl::OkStatus();
}

absl::StatusOr<int> ExpertParallelSize(const Settings& settings, const MeshShape& mesh, int ranks) {
  constexpr char kName[] = "expert-model-parallel-size";
  if (settings.empty(kName)) return measure::AllShareExperts(mesh, ranks);
  const int size = settings.integer(kName);
  if (size >= 1 && ranks % size == 0) return size;
  return WrongFlag("--ep", settings.text(kName),
                   absl::StrCat("a divisor of the ", ranks, " ranks"));
}

absl::Status CheckRouter(RouterConfig router, int64_t tokens, const Settings& settings) {
  router.micro_batch_tokens = tokens;
  return InFlags(ValidateRouterConfig(router), settings);
}

absl::Status SetLayerRouting(const Settings& settings, int ranks, measure::LayerSpec& spec) {
  MOE_ASSIGN_OR_RETURN(measure::RoutingSpec routing, RoutingOf(settings, ranks));
  if (routing.kind == measure::RoutingSpec::kMatrix) {
    return WrongFlag("--routing", routing.text, "one of experts, tokens or a trace for a layer");
  }
  if (settings.given("router")) {
    return WrongValue(settings, "router",
                      "none with --routing, which says what experts the tokens are given");
  }
  if (routing.kind == measure::RoutingSpec::kTrace) {
    MOE_RETURN_IF_ERROR(UseTrace(settings, *routing.replay, spec));
  }
  spec.routing = std::move(routing);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<measure::LayerSpec> MakeLayerSpec(const BenchCall& call, const Launch& launch) {
  const Settings& settings = call.settings;
  const int ranks = launch.world.ranks;
  MOE_ASSIGN_OR_RETURN(measure::LayerSpec spec, LayerSpecOf(call));
  if (spec.layer.pack_weights && launch.device.kind == DeviceKind::kCuda) {
    return WrongFlag("--pack-weights", "given", "none with --device cuda");
  }
  MOE_ASSIGN_OR_RETURN(const int ep,
                       ExpertParallelSize(settings, spec.trainer.session.mesh, ranks));
  SessionOptions& session = spec.trainer.session;
  session.mesh.expert = ep;
  session.device = launch.device.kind;
  session.tensor_leaves = settings.integer("tensor-leaves");
  MOE_RETURN_IF_ERROR(CheckMesh(session, ranks));
  if (spec.layer.router.num_experts == 0) spec.layer.router.num_experts = 8 * ranks;
  if (settings.given("routing")) MOE_RETURN_IF_ERROR(SetLayerRouting(settings, ranks, spec));
  MOE_RETURN_IF_ERROR(CheckBFloat16Order(spec.trainer));
  MOE_RETURN_IF_ERROR(SetDispatch(settings, ep, spec.layer.dispatcher));
  MOE_RETURN_IF_ERROR(CheckRouter(spec.layer.router, spec.rows(), settings));
  MOE_RETURN_IF_ERROR(CheckSizes(spec));
  return spec;
}

}  // namespace moe::cli
