#include "moe/plan/traffic.h"

#include <algorithm>
#include <cstdint>

namespace moe::plan {
namespace {

// Elements of layers, and of embedding and output layer.
struct Elements {
  double layers = 0, tables = 0;
};

// Elements that all ranks of a stage hold alike, that tensor ranks share, and of experts.
struct Held {
  Elements whole, cut, experts;
};

Held HeldOf(const ModelCost& cost, const Layout& layout) {
  Held held{.experts = {.layers = cost.expert_parameters()}};
  const double table = cost.vocab * cost.hidden;
  if (layout.mesh.tensor > 1) {
    held.cut = {.layers = cost.layers * cost.attention + cost.moe_layers() * cost.shared +
                          cost.dense_layers * cost.dense,
                .tables = table};
  }
  const double whole = cost.parameters - held.experts.layers - held.cut.layers - held.cut.tables;
  const double tables = layout.mesh.tensor > 1 ? table : 2 * table;
  held.whole = {.layers = whole - tables, .tables = tables};
  return held;
}

// With ZeRO-3, how often in a step a layer needs no gather, since it is one of the two modules that
// were used last: where a backward follows its forward, or a forward a backward. Behind the last
// layer comes the output layer, before the first one the embedding. Sum over stages.
double KeptLayers(const ModelCost& cost, const Layout& layout, int64_t rounds) {
  const PipelineShape pipeline = layout.pipeline();
  if (pipeline.chunks > 1 || pipeline.schedule == ScheduleKind::k1F1BOverlap) return 0;
  const int two = std::min(2, cost.layers / pipeline.stages);
  double kept = 0;
  for (int stage = 0; stage < pipeline.stages; ++stage) {
    // Pairs of a forward and a backward, behind the forwards that fill the pipeline.
    const bool first = stage == 0, last = stage == pipeline.stages - 1;
    const int64_t pairs = pipeline.schedule == ScheduleKind::kGPipe && !(first && last)
                              ? 1
                              : std::max<int64_t>(1, rounds - (pipeline.stages - 1 - stage));
    kept += static_cast<double>(pairs) * (last ? 1 : two) +
            static_cast<double>(pairs - 1) * (first ? 1 : two);
  }
  return kept;
}

// Rows that leave a token for experts and come home in a step, each of H elements, and float32
// weights.
double ExchangedBytes(const ModelCost& cost, const Workload& work, const Layout& layout) {
  const double out = RanksOfToken(cost.experts, layout.mesh.expert, cost.top_k);
  const double forwards = layout.recompute == Recompute::kLayer ? 2 : 1;
  const double rows = (forwards + 1) * (out + cost.top_k);
  return rows * cost.hidden * work.element_bytes + 4 * cost.top_k;
}

double GradientBytes(const ModelCost& cost, const Workload& work, const Layout& layout,
                     const Elements& elements, int holders) {
  const int64_t rounds = Rounds(work, layout);
  const auto times = static_cast<double>(rounds);
  const double all = elements.layers + elements.tables;
  double bytes = 0;
  switch (layout.zero) {
    case ZeroStage::kNone:
      bytes = 2 * work.sum_bytes * all;
      break;
    case ZeroStage::kOptimizer:
      bytes = (work.sum_bytes + work.element_bytes) * all;
      break;
    case ZeroStage::kGradients:
      bytes = (times * work.sum_bytes + work.element_bytes) * all;
      break;
    case ZeroStage::kWeights: {
      const double layers = 2 * times - KeptLayers(cost, layout, rounds) / cost.layers;
      bytes = times * work.sum_bytes * all +
              work.element_bytes * (layers * elements.layers + times * elements.tables);
      break;
    }
  }
  return (holders - 1) * bytes;
}

// For each other rank of a tensor group. Rows of attention and of a dense or shared network are
// gathered before it, and again in backward, with the gradients; sums go to the ranks of their rows
// in float32, each way. Of experts logits are gathered, backward gradients of combine weights. Of
// the output layer logits go to the ranks of their rows, and their gradients back. Of norms of all
// heads each rank sends sums of a node, also where activations are made again.
double TensorBytes(const ModelCost& cost, const Workload& work, const Layout& layout) {
  const double b = work.element_bytes;
  const double forwards = layout.recompute == Recompute::kLayer ? 2 : 1;
  const double networks =
      cost.layers + cost.dense_layers + (cost.shared > 0 ? cost.moe_layers() : 0);
  const double hidden = networks * (forwards * (4 + b) + 4 + 2 * b) + 4 + b;
  const double routers = cost.moe_layers() * 4 * (forwards * cost.experts + cost.top_k);
  const double outputs = cost.vocab * (4 + b) / layout.mesh.tensor;
  const double passes = layout.recompute == Recompute::kNone ? 2 : 3;
  const double norms = cost.layers * passes * 4 * cost.sums_of_heads * layout.mesh.tensor;
  return work.tokens() * (hidden * cost.hidden + routers + outputs + norms);
}

// For each other rank that shares experts: rows are gathered before these and sums in float32 go to
// the ranks of their rows, forward and, with gradients, backward.
double SharedExpertBytes(const ModelCost& cost, const Workload& work, const Layout& layout) {
  const double forwards = layout.recompute == Recompute::kLayer ? 2 : 1;
  const double rows = work.tokens() * cost.moe_layers() * cost.top_k;
  return rows * cost.hidden * (forwards + 1) * (work.element_bytes + 4);
}

}  // namespace

Traffic TrafficOf(const ModelCost& cost, const Workload& work, const Layout& layout,
                  int node_ranks) {
  const MeshShape& mesh = layout.mesh;
  Traffic traffic;
  if (mesh.expert > 1) {
    const double all = work.tokens() * cost.moe_layers() * ExchangedBytes(cost, work, layout);
    const double near = std::min(mesh.expert, std::max(1, node_ranks / mesh.expert_tensor));
    traffic.experts_self = all / mesh.expert;
    traffic.experts_node = all * (near - 1) / mesh.expert;
    traffic.experts_network = all * (mesh.expert - near) / mesh.expert;
  }
  const Held held = HeldOf(cost, layout);
  const auto gradients = [&](const Elements& elements, int holders) {
    return GradientBytes(cost, work, layout, elements, holders);
  };
  traffic.gradients_shared = gradients(held.whole, StageRanks(work, layout)) +
                             gradients(held.cut, DataRanks(work, layout));
  traffic.gradients_experts = gradients(held.experts, ExpertDataRanks(work, layout));
  const double rows = work.tokens() * cost.hidden;
  traffic.stages = 2 * (layout.pipeline().parts() - 1) * rows * work.element_bytes;
  traffic.tensors = (mesh.tensor - 1) * TensorBytes(cost, work, layout);
  traffic.shared_experts = (mesh.expert_tensor - 1) * SharedExpertBytes(cost, work, layout);
  return traffic;
}

}  // namespace moe::plan
