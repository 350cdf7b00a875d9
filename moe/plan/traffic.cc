#include "moe/plan/traffic.h"

namespace moe::plan {
namespace {

// Elements that all ranks of a stage hold alike, that tensor ranks share, and of experts.
struct Held {
  double whole = 0, cut = 0, experts = 0;
};

Held HeldOf(const ModelCost& cost, const Layout& layout) {
  Held held{.experts = cost.expert_parameters()};
  if (layout.mesh.tensor > 1) {
    held.cut = cost.layers * cost.attention + cost.moe_layers() * cost.shared +
               cost.dense_layers * cost.dense + cost.vocab * cost.hidden;
  }
  held.whole = cost.parameters - held.experts - held.cut;
  return held;
}

// Rows that leave a token for experts and come home in a step, each of H elements, and float32
// weights.
double ExchangedBytes(const ModelCost& cost, const Workload& work, const Layout& layout) {
  const double out = RanksOfToken(cost.experts, layout.mesh.expert, cost.top_k);
  const double forwards = layout.recompute == Recompute::kLayer ? 2 : 1;
  const double rows = (forwards + 1) * (out + cost.top_k);
  return rows * cost.hidden * work.element_bytes + 4 * cost.top_k;
}

double GradientBytes(const Workload& work, const Layout& layout, double elements, int holders) {
  const auto rounds = static_cast<double>(Rounds(work, layout));
  double bytes = 0;
  switch (layout.zero) {
    case ZeroStage::kNone:
      bytes = 2 * work.sum_bytes;
      break;
    case ZeroStage::kOptimizer:
      bytes = work.sum_bytes + work.element_bytes;
      break;
    case ZeroStage::kGradients:
      bytes = rounds * work.sum_bytes + work.element_bytes;
      break;
    case ZeroStage::kWeights:
      bytes = rounds * (work.sum_bytes + 2 * work.element_bytes);
      break;
  }
  return (holders - 1) * elements * bytes;
}

// For each other rank of a tensor group. A sum goes to the ranks of its rows in float32, and comes
// back to all of them as rows: of o_proj and of down projections, backward of what begins with the
// same rows; of the experts rows alone. Of the output layer logits go to the ranks of their rows,
// and their gradients back.
double TensorBytes(const ModelCost& cost, const Workload& work, const Layout& layout) {
  const double sum = 4 + work.element_bytes;
  const double both = layout.recompute == Recompute::kLayer ? 3 : 2;
  const double networks = cost.dense_layers + (cost.shared > 0 ? cost.moe_layers() : 0);
  const double hidden =
      both * ((cost.layers + networks) * sum + cost.moe_layers() * work.element_bytes) + sum;
  return work.tokens() * (hidden * cost.hidden + cost.vocab * sum / layout.mesh.tensor);
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
  traffic.gradients_shared = GradientBytes(work, layout, held.whole, StageRanks(work, layout)) +
                             GradientBytes(work, layout, held.cut, DataRanks(work, layout));
  traffic.gradients_experts =
      GradientBytes(work, layout, held.experts, ExpertDataRanks(work, layout));
  const double rows = work.tokens() * cost.hidden;
  traffic.stages = 2 * (layout.pipeline().parts() - 1) * mesh.tensor * rows * work.element_bytes;
  traffic.tensors = (mesh.tensor - 1) * TensorBytes(cost, work, layout);
  return traffic;
}

}  // namespace moe::plan
