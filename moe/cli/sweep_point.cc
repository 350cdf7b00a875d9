#include "moe/cli/sweep_point.h"

#include <algorithm>
#include <vector>

#include <absl/strings/str_cat.h>

#include "gating/router_config.h"
#include "kernels/base/status_macros.h"
#include "moe/bench/routing_spec.h"
#include "moe/bench/traffic.h"
#include "moe/cli/common_settings.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/train_options.h"
#include "moe/lm/train_config.h"

namespace moe::cli {
namespace {

// A model that is one MoE layer and nothing else.
lm::TransformerConfig ModelOf(const MoeLayerConfig& layer) {
  lm::TransformerConfig model;
  model.vocab_size = 0;
  model.num_layers = 1;
  model.hidden_size = layer.router.hidden_size;
  model.moe = layer;
  return model;
}

ModelSize LayerSizeOf(const lm::TransformerConfig& model) {
  ModelSize size = SizeOf(model);
  const int64_t h = model.hidden_size;
  const int64_t around = h + 4 * h * h + 2 * h;  // last norm, attention, two norms
  return {.total = size.total - around, .active = size.active - around};
}

// Shares are a matrix of ranks by ranks. Above this the most that skew can be stands for it.
constexpr int kMostSharedRanks = 1024;

// Rows of the rank with the most over their mean.
double RowSkew(const Settings& settings, int ep) {
  const auto routing = bench::ParseRouting(settings.text("routing"));
  if (settings.empty("routing") || !routing.ok()) return 1;
  if (ep > kMostSharedRanks) return ep;
  const std::vector<double> shares =
      bench::DestinationShares(*routing, ep, settings.integer("num-experts"));
  return ep * *std::max_element(shares.begin(), shares.end());
}

// Without peer memory a direct dispatcher runs staged, and the row would not say so.
absl::Status CheckDispatch(const Settings& settings, const Launch& launch) {
  MOE_RETURN_IF_ERROR(CheckTwoHops(settings, launch.device));
  if (launch.plan.backend != Backend::kNccl || !settings.is("dispatch", "direct")) {
    return absl::OkStatus();
  }
  return WrongFlag("--dispatch", "direct",
                   "staged or hierarchical: backend nccl has no peer memory");
}

absl::Status CheckLayer(const Settings& settings, const MoeLayerConfig& layer, int ranks, int ep) {
  for (const char* name : {"threads", "iters"}) {
    if (settings.is(name, "auto") || settings.integer(name) >= 1) continue;
    return WrongFlag(absl::StrCat("--", name), settings.text(name), "at least 1");
  }
  for (const char* name : {"warmup-iters", "node-size"}) {
    if (settings.integer(name) >= 0) continue;
    return WrongFlag(absl::StrCat("--", name), settings.text(name), "at least 0");
  }
  for (const char* name : {"max-noise", "timeout"}) {
    if (settings.real(name) >= 0) continue;
    return WrongFlag(absl::StrCat("--", name), settings.text(name), "0 or more");
  }
  const int node = layer.dispatcher.node_size;
  if (layer.dispatcher.algorithm == DispatchAlgorithm::kHierarchical && node > 0 &&
      ep % node != 0) {
    return WrongFlag("--node-size", absl::StrCat(node),
                     absl::StrCat("0 or a divisor of --ep ", ep));
  }
  if (ranks % ep != 0) {
    return WrongFlag("--ep", absl::StrCat(ep), absl::StrCat("a divisor of the ", ranks, " ranks"));
  }
  const auto hidden = static_cast<double>(layer.router.hidden_size);
  const double widest =
      3.0 * hidden *
      std::max({static_cast<double>(layer.ffn_hidden_size) * layer.router.num_experts,
                static_cast<double>(layer.shared_expert_ffn_hidden_size), 4 * hidden,
                static_cast<double>(settings.integer("tokens"))});
  if (widest > kMostElements) {
    return WrongFlag("the layer", absl::StrCat("about ", widest, " elements"), "at most 1e12");
  }
  return absl::OkStatus();
}

}  // namespace

void FillPoint(const Settings& settings, sweep::Point& point) {
  point.experts = settings.integer("num-experts");
  point.topk = settings.integer("moe-router-topk");
  point.capacity_factor = settings.is("moe-expert-capacity-factor", "none")
                              ? 0
                              : settings.real("moe-expert-capacity-factor");
  point.ep = settings.integer("expert-model-parallel-size");
  point.ranks = settings.integer("ranks");
  point.overlap = settings.integer("moe-overlap-degree");
  point.hidden = settings.integer("hidden-size");
  point.ffn = settings.integer("moe-ffn-hidden-size");
  point.dtype = settings.text("dtype");
  point.router = settings.text("router");
  point.dispatch = settings.text("dispatch");
  point.seed = settings.seed("seed");
  if (point.measure == "train") return;
  point.tokens_per_rank = settings.integer("tokens");
  point.routing = settings.text("routing");
}

absl::Status PlanTraining(const Settings& settings, const lm::Corpus& corpus,
                          PlannedPoint& planned) {
  const World& world = planned.launch.world;
  MOE_RETURN_IF_ERROR(CheckDispatch(settings, planned.launch));
  MOE_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions(settings, world));
  planned.train = options.train;
  const lm::TrainConfig& train = planned.train;
  const int64_t batch = train.micro_batch_size * train.sequence_length * train.micro_batches;
  planned.point.tokens_per_rank = (batch + world.ranks / 2) / world.ranks;
  planned.memory = sweep::ShapeOfTraining(train, SizeOf(train.model).total);
  return lm::CheckTextLength(train, corpus);
}

absl::Status PlanLayer(const Settings& settings, PlannedPoint& planned) {
  MOE_RETURN_IF_ERROR(CheckDispatch(settings, planned.launch));
  MOE_ASSIGN_OR_RETURN(MoeLayerConfig layer, LayerConfigOf(settings));
  layer.dispatcher = DispatcherOf(settings);
  layer.overlap_degree = settings.integer("moe-overlap-degree");
  layer.router.micro_batch_tokens = settings.integer("tokens");
  const int ranks = planned.launch.world.ranks;
  const int ep = settings.integer("expert-model-parallel-size");
  MOE_RETURN_IF_ERROR(CheckLayer(settings, layer, ranks, ep));
  if (const absl::Status status = ValidateRouterConfig(layer.router); !status.ok()) {
    return absl::InvalidArgumentError(InFlags(status.message(), settings));
  }
  const DType dtype = ComputeTypeOf(settings);
  planned.layer = {.dtype = dtype,
                   .tokens = settings.integer("tokens"),
                   .layer = layer,
                   .expert_parallel_size = ep,
                   .device = planned.launch.device.kind,
                   .threads = static_cast<int>(planned.point.threads),
                   .seed = settings.seed("seed")};
  if (!settings.empty("routing")) {
    MOE_ASSIGN_OR_RETURN(planned.layer.routing, bench::ParseRouting(settings.text("routing")));
  }
  const lm::TransformerConfig model = ModelOf(layer);
  planned.layer_size = LayerSizeOf(model);
  planned.memory = {.model = model,
                    .parameters_total = planned.layer_size.total,
                    .tokens = planned.layer.tokens,
                    .dtype = dtype,
                    .expert_parallel_size = ep,
                    .row_skew = RowSkew(settings, ep),
                    .trained = false};
  return absl::OkStatus();
}

}  // namespace moe::cli
