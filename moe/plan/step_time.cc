#include "moe/plan/step_time.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "moe/plan/traffic.h"

namespace moe::plan {
namespace {

constexpr double kMovements = 8;  // of rows in an MoE layer: four forward, four backward
constexpr double kGathers = 4;    // of shared experts: rows before and sums behind, forth and back

// Of which rank.
enum class Share : uint8_t { kBusiest, kMean };

// Forward and backward of one micro-batch in all layers of one stage.
class StageCost {
 public:
  StageCost(const ModelCost& cost, const Machine& machine, const Workload& work,
            const Layout& layout, Share share)
      : cost_(cost), machine_(machine), work_(work), layout_(layout) {
    const PipelineShape pipeline = layout.pipeline();
    const bool even = work.balanced_output || share == Share::kMean;
    const double all = cost.layers;
    const double most = std::ceil(all / pipeline.parts()) * pipeline.chunks;
    layers_ = even ? all / pipeline.stages : std::min(all, most);
    mixtures_ = layers_ * cost.moe_layers() / all;
    outputs_ = even ? 1.0 / pipeline.stages : 1;
    rows_ = static_cast<double>(layout.micro_batch_size * work.sequence_length);
    tensor_ = layout.mesh.tensor;
    share_ = layout.mesh.expert_tensor;
  }

  // Passes over a layer, in forwards: a backward takes two.
  double passes() const { return layout_.recompute == Recompute::kLayer ? 4 : 3; }

  // Backward of fused attention computes the scores again: 3.5 forwards in all.
  double Attention() const {
    const double core =
        layers_ * cost_.attended / tensor_ * rows_ * static_cast<double>(work_.sequence_length);
    return passes() * Product(layers_ * cost_.attention / tensor_, rows_, rows_) +
           (passes() + 0.5) * core / machine_.core_flops;
  }
  double Experts() const {
    const double own = rows_ / tensor_;  // of the tokens that this rank dispatches
    const double rows = own * layout_.mesh.expert * share_ * cost_.top_k / cost_.experts;
    return passes() * (Product(mixtures_ * cost_.shared / tensor_, rows_, rows_) +
                       Product(mixtures_ * cost_.hidden * cost_.experts, own, own) +
                       Product(mixtures_ * cost_.top_k * cost_.expert, own, rows) * work_.row_skew);
  }
  double Dense() const {
    return passes() * Product((layers_ - mixtures_) * cost_.dense / tensor_, rows_, rows_);
  }
  double Output() const {
    return 3 * Product(outputs_ * cost_.vocab * cost_.hidden / tensor_, rows_, rows_);
  }
  double Memory() const {
    const double expert = cost_.top_k * (12 * cost_.width + 10 * cost_.hidden);
    const double elements = rows_ / tensor_ * (layers_ * 30 * cost_.hidden + mixtures_ * expert);
    // Rows of all that share experts, put in order, and their float32 nodes: written, put in order
    // and read; both ways.
    const double gathered =
        share_ > 1 ? rows_ / tensor_ * mixtures_ * cost_.top_k * share_ * cost_.hidden : 0;
    const double bytes = elements * work_.element_bytes + gathered * (4 * work_.element_bytes + 32);
    const double again = layout_.recompute == Recompute::kNone ? 1 : 4.0 / 3;
    return again * bytes / machine_.memory_bytes_per_s;
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
  double layers_, mixtures_, outputs_, rows_, tensor_, share_;
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

// The passes of all rounds.
StepTime PassesOf(const ModelCost& cost, const Machine& machine, const Workload& work,
                  const Layout& layout, Share share) {
  const StageCost stage(cost, machine, work, layout, share);
  const Traffic traffic = TrafficOf(cost, work, layout, machine.node_ranks);
  const double mean = static_cast<double>(MicroBatches(work, layout)) / DataRanks(work, layout);
  const double rounds = share == Share::kMean ? mean : static_cast<double>(Rounds(work, layout));
  StepTime time = {.attention = rounds * stage.Attention(),
                   .experts = rounds * stage.Experts(),
                   .dense = rounds * stage.Dense(),
                   .output = rounds * stage.Output(),
                   .memory = rounds * stage.Memory(),
                   .layers = rounds * stage.Layers()};
  if (layout.mesh.expert > 1) {
    // All of a group wait for the rank with the most micro-batches.
    const double of_rank = rounds / mean / work.ranks;
    const bool far = traffic.experts_network > 0;
    const double bytes = std::max(SecondsOf(machine.node, of_rank * traffic.experts_node),
                                  SecondsOf(machine.network, of_rank * traffic.experts_network));
    const double latency = (far ? machine.network : machine.node).latency_s;
    time.exchange = bytes * work.row_skew + rounds * stage.mixtures() * kMovements * latency;
  }
  const double sums = traffic.shared_experts * work.row_skew / work.ranks;
  time.tensors = (SecondsOf(machine.node, traffic.tensors / work.ranks) +
                  GroupSeconds(machine, sums, layout.mesh.expert_tensor, 1)) /
                 machine.sum_speed;
  if (layout.mesh.expert_tensor > 1) {
    time.tensors += rounds * stage.mixtures() * kGathers * machine.node.latency_s;
  }
  return time;
}

// Waits of the pipeline, over the time of its stages' passes, which take stage_s. sharers: see
// OpTimes.
double BubbleShare(const ModelCost& cost, const Machine& machine, const Workload& work,
                   const Layout& layout, double stage_s, double sharers, Bubbles& bubbles) {
  if (layout.mesh.pipeline == 1 || stage_s == 0) return 0;
  const double passes = layout.recompute == Recompute::kLayer ? 4 : 3;
  const int64_t rounds = Rounds(work, layout);
  const bool far = StageRanks(work, layout) >= machine.node_ranks;
  const Link& link = far ? machine.network : machine.node;
  const double row_bytes = static_cast<double>(layout.micro_batch_size * work.sequence_length) *
                           cost.hidden * work.element_bytes;
  const double op = stage_s / sharers / (static_cast<double>(rounds) * layout.chunks * passes);
  return bubbles.Share(layout.pipeline(), rounds,
                       {.forward = op,
                        .backward = (passes - 1) * op,
                        .hop = link.latency_s + row_bytes / link.bytes_per_s,
                        .sharers = sharers});
}

void AddUpdate(const ModelCost& cost, const Machine& machine, const Workload& work,
               const Layout& layout, double stage_s, StepTime& time) {
  const MeshShape& mesh = layout.mesh;
  const Traffic traffic = TrafficOf(cost, work, layout, machine.node_ranks);
  const auto rounds = static_cast<double>(Rounds(work, layout));
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
  time.optimizer = own * (24 + work.sum_bytes + work.element_bytes) / machine.state_bytes_per_s;
}

// Ranks that share cores, at their mean rates. Either the cores have always something to do, while
// some wait for rows, or the busiest stage, with a core to itself, and its waits take longer.
StepTime SharedPasses(const ModelCost& cost, const Machine& machine, const Workload& work,
                      const Layout& layout, const StepTime& busiest, Bubbles& bubbles) {
  const auto with_bubble = [&](double stage_s, double sharers) {
    return stage_s * (1 + BubbleShare(cost, machine, work, layout, stage_s, sharers, bubbles));
  };
  StepTime time = PassesOf(cost, machine, work, layout, Share::kMean);
  const auto hidden = [](const StepTime& passes) {
    return Machine::kHiddenWaits * passes.exchange;
  };
  const double computing = time.passes() - hidden(time);
  const double alone = (busiest.passes() - hidden(busiest)) / machine.sharers + hidden(busiest);
  const double waits =
      std::max(with_bubble(computing, machine.sharers), with_bubble(alone, 1)) - computing;
  const double exchange = std::clamp(waits, 0.0, hidden(time));
  time.exchange += exchange - hidden(time);
  time.bubble = std::max(0.0, waits - exchange);
  return time;
}

}  // namespace

StepTime PredictStep(const ModelCost& cost, const Machine& machine, const Workload& work,
                     const Layout& layout, Bubbles& bubbles) {
  StepTime time = PassesOf(cost, machine, work, layout, Share::kBusiest);
  const double stage_s = time.passes();
  if (machine.sharers > 1) {
    time = SharedPasses(cost, machine, work, layout, time, bubbles);
  } else {
    time.bubble = stage_s * BubbleShare(cost, machine, work, layout, stage_s, 1, bubbles);
  }
  time.bubble_share = time.bubble / time.passes();
  AddUpdate(cost, machine, work, layout, stage_s, time);
  return time;
}

StepTime MeanStep(const ModelCost& cost, const Machine& machine, const Workload& work,
                  const Layout& layout) {
  StepTime time = PassesOf(cost, machine, work, layout, Share::kMean);
  AddUpdate(cost, machine, work, layout, time.passes(), time);
  return time;
}

}  // namespace moe::plan
