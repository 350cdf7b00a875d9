#include "moe/plan/step_time.h"

#include <algorithm>
#include <cmath>

#include "moe/plan/traffic.h"

namespace moe::plan {
namespace {

// Forward and backward of one micro-batch in all layers of one stage.
class StageCost {
 public:
  StageCost(const ModelCost& cost, const Machine& machine, const Workload& work,
            const Layout& layout)
      : cost_(cost), machine_(machine), work_(work), layout_(layout) {
    const PipelineShape pipeline = layout.pipeline();
    const double all = cost.layers;
    const double even = std::ceil(all / pipeline.parts()) * pipeline.chunks;
    layers_ = work.balanced_output ? all / pipeline.stages : std::min(all, even);
    mixtures_ = layers_ * cost.moe_layers() / all;
    rows_ = static_cast<double>(layout.micro_batch_size * work.sequence_length);
    tensor_ = layout.mesh.tensor;
  }

  // Passes over a layer, in forwards: a backward takes two.
  double passes() const { return layout_.recompute == Recompute::kLayer ? 4 : 3; }

  double Products() const {
    const double dense = layers_ - mixtures_;
    const double shared =
        layers_ * cost_.attention + mixtures_ * cost_.shared + dense * cost_.dense;
    const double router = mixtures_ * cost_.hidden * cost_.experts;
    const double own = rows_ / tensor_;  // of the tokens that this rank dispatches
    const double expert_rows = own * layout_.mesh.expert * cost_.top_k / cost_.experts;
    const double experts = mixtures_ * cost_.top_k * cost_.expert;
    const double output =
        cost_.vocab * cost_.hidden / tensor_ / (work_.balanced_output ? layout_.mesh.pipeline : 1);
    return passes() * (Product(shared / tensor_, rows_, rows_) + Product(router, own, own) +
                       Product(experts, own, expert_rows) * work_.row_skew) +
           3 * Product(output, rows_, rows_);
  }
  // Backward of fused attention computes the scores again: 3.5 forwards in all.
  double Attention() const {
    const double forward =
        layers_ * cost_.attended / tensor_ * rows_ * static_cast<double>(work_.sequence_length);
    return (passes() + 0.5) * forward / machine_.core_flops;
  }
  double Memory() const {
    const double expert = cost_.top_k * (12 * cost_.width + 10 * cost_.hidden);
    const double elements = rows_ / tensor_ * (layers_ * 30 * cost_.hidden + mixtures_ * expert);
    const double again = layout_.recompute == Recompute::kNone ? 1 : 4.0 / 3;
    return again * elements * work_.element_bytes / machine_.memory_bytes_per_s;
  }
  double Layers() const { return layers_ * passes() / 3 * machine_.layer_s; }
  double mixtures() const { return mixtures_; }

 private:
  // A forward product of `rows` rows by a matrix of so many elements, which meets `met` rows.
  double Product(double elements, double rows, double met) const {
    return machine_.ProductSeconds(2 * elements * rows, met);
  }

  const ModelCost& cost_;
  const Machine& machine_;
  const Workload& work_;
  const Layout& layout_;
  double layers_, mixtures_, rows_, tensor_;
};

double SecondsOf(const Link& link, double bytes) {
  return bytes > 0 ? bytes / link.bytes_per_s : 0;
}

// Of bytes that each of `size` ranks, `stride` apart, sends to others of its group: on the links
// within a node, and between nodes on those of all its ranks in a node together.
double GroupSeconds(const Machine& machine, double bytes, int size, int stride) {
  const int near = std::clamp(machine.node_ranks / stride, 1, std::max(1, size));
  const double within = near > 1 ? SecondsOf(machine.node, bytes) : 0;
  const double between = size > near ? SecondsOf(machine.network, bytes / near) : 0;
  return std::max(within, between);
}

}  // namespace

StepTime PredictStep(const ModelCost& cost, const Machine& machine, const Workload& work,
                     const Layout& layout, Bubbles& bubbles) {
  const MeshShape& mesh = layout.mesh;
  const StageCost stage(cost, machine, work, layout);
  const Traffic traffic = TrafficOf(cost, work, layout, machine.node_ranks);
  const auto rounds = static_cast<double>(Rounds(work, layout));
  StepTime time = {.products = rounds * stage.Products(),
                   .attention = rounds * stage.Attention(),
                   .memory = rounds * stage.Memory(),
                   .layers = rounds * stage.Layers()};
  if (mesh.expert > 1) {
    // Of the rank with the most micro-batches, which all of its group wait for.
    const double busiest = rounds * DataRanks(work, layout) /
                           static_cast<double>(MicroBatches(work, layout)) / work.ranks;
    const bool far = traffic.experts_network > 0;
    const double bytes = std::max(SecondsOf(machine.node, busiest * traffic.experts_node),
                                  SecondsOf(machine.network, busiest * traffic.experts_network));
    const double latency = (far ? machine.network : machine.node).latency_s;
    time.exchange = bytes * work.row_skew + rounds * stage.mixtures() * 8 * latency;
  }
  time.tensors = SecondsOf(machine.node, traffic.tensors / work.ranks);
  const double stage_s = time.total();
  if (mesh.pipeline > 1) {
    const double passes = stage.passes();
    const bool far = StageRanks(work, layout) >= machine.node_ranks;
    const Link& link = far ? machine.network : machine.node;
    const double row_bytes = static_cast<double>(layout.micro_batch_size * work.sequence_length) *
                             cost.hidden * work.element_bytes;
    const double op = stage_s / (rounds * layout.chunks * passes);
    time.bubble_share = bubbles.Share(layout.pipeline(), Rounds(work, layout),
                                      {.forward = op,
                                       .backward = (passes - 1) * op,
                                       .hop = link.latency_s + row_bytes / link.bytes_per_s});
    time.bubble = time.bubble_share * stage_s;
  }
  const int of_stage = StageRanks(work, layout), block = mesh.expert * mesh.expert_tensor;
  double sums =
      GroupSeconds(machine, traffic.gradients_shared / work.ranks, of_stage, 1) +
      GroupSeconds(machine, traffic.gradients_experts / work.ranks, of_stage / block, block);
  sums /= machine.sum_speed;
  // They travel behind passes but for the last bucket, a tenth of them: with ZeRO-2 and 3 in every
  // round, else behind the last one, and gathered weights behind the next step's first.
  const double rounds_beside = layout.zero >= ZeroStage::kGradients ? rounds : 1;
  const double beside = machine.overlap * stage_s * rounds_beside / rounds;
  time.gradients = std::max(sums * (1 - 0.9 * machine.overlap), sums - beside);
  // Masters, moments, sum and what layers read.
  const double held = (cost.parameters - cost.expert_parameters()) / mesh.pipeline / mesh.tensor +
                      cost.expert_parameters() / mesh.pipeline / mesh.expert / mesh.expert_tensor;
  const double own = held / (layout.zero == ZeroStage::kNone ? 1 : ExpertDataRanks(work, layout));
  time.optimizer = own * (24 + work.sum_bytes + work.element_bytes) / machine.memory_bytes_per_s;
  return time;
}

}  // namespace moe::plan
