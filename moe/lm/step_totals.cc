#include "moe/lm/step_totals.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/base/status_macros.h"

namespace moe::lm {
namespace {

constexpr double kUnit = 0x1p-30;
// Limits of a token's loss and of a micro-batch's sum over tokens. 2^42 units are 4096 nats, and
// two million such losses still fit an int64; 2^52 units are 4 million nats, and 2048 such sums
// fit.
constexpr double kLimit = 0x1p42, kSumLimit = 0x1p52;

}  // namespace

void StepTotals::AddReal(Field field, double value, double limit) {
  const double scaled = value / kUnit;
  if (!(std::fabs(scaled) < limit)) {  // NaN, infinite, or beyond the limit
    ++fields_[kNonFinite];
    return;
  }
  fields_[field] += std::llrint(scaled);
}

void StepTotals::AddLosses(absl::Span<const float> row_loss, int64_t tokens) {
  for (const float loss : row_loss) AddReal(kLoss, loss, kLimit);
  fields_[kLosses] += std::ssize(row_loss);
  fields_[kTokens] += tokens;
}

void StepTotals::AddRouters(absl::Span<const RouterStats> routers) {
  for (const RouterStats& router : routers) {
    AddReal(kAuxLoss, router.aux_loss, kSumLimit);
    AddReal(kEntropy, router.entropy_sum, kSumLimit);
    fields_[kDropped] += router.dropped_slots;
    for (const int64_t slots : router.expert_count) fields_[kSlots] += slots;
  }
}

float StepTotals::MeanLoss() const {
  if (fields_[kLosses] == 0) return 0;
  return static_cast<float>(static_cast<double>(fields_[kLoss]) * kUnit /
                            static_cast<double>(fields_[kLosses]));
}

double StepTotals::MeanAuxLoss(int64_t micro_batches) const {
  return static_cast<double>(fields_[kAuxLoss]) * kUnit / static_cast<double>(micro_batches);
}

double StepTotals::MeanEntropy() const {
  const int64_t rows = fields_[kTokens] * moe_layers_;
  return rows == 0 ? 0 : static_cast<double>(fields_[kEntropy]) * kUnit / static_cast<double>(rows);
}

absl::StatusOr<std::vector<RoutingTraceRecord>> RoutingRecorder::Gather(
    int64_t step, absl::Span<const int> stage_of, Mesh& mesh, Stream& stream) const {
  Communicator& world = mesh.world();
  const int ranks = world.size(), of_stage = mesh.size(MeshGroup::kStage);
  const bool first = world.rank() == 0;
  const auto size = static_cast<int64_t>(counts_.size());
  std::vector<int64_t> all(first ? size * ranks : 0), send(ranks, 0), receive(ranks, 0);
  send[0] = size;
  if (first) std::fill(receive.begin(), receive.end(), size);
  MOE_RETURN_IF_ERROR(world.AllToAllV<int64_t>(counts_, send, absl::MakeSpan(all), receive, stream,
                                               {.name = "routing", .step = step}));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<RoutingTraceRecord> records;
  for (int layer = 0; first && layer < moe_layers_; ++layer) {
    RoutingTraceRecord& record = records.emplace_back();
    record.step = step;
    record.layer = layer;
    for (int r = stage_of[layer] * of_stage; r < (stage_of[layer] + 1) * of_stage; ++r) {
      const auto of_rank = all.begin() + size * r;
      const auto slots = of_rank + 1 + int64_t{layer} * num_experts_;
      record.tokens.push_back(*of_rank);
      record.slots.insert(record.slots.end(), slots, slots + num_experts_);
    }
  }
  return records;
}

double MaxViolation(const std::vector<std::vector<int64_t>>& expert_load, int32_t experts) {
  double worst = 0;
  for (const auto& load : expert_load) {
    const auto end = load.begin() + experts;
    const int64_t total = std::accumulate(load.begin(), end, int64_t{0});
    if (total == 0) continue;
    const double mean = static_cast<double>(total) / experts;
    worst =
        std::max(worst, (static_cast<double>(*std::max_element(load.begin(), end)) - mean) / mean);
  }
  return worst;
}

int DeadExperts(const std::vector<std::vector<int64_t>>& expert_load, int32_t experts) {
  int dead = 0;
  for (const auto& load : expert_load) {
    dead += static_cast<int>(std::count(load.begin(), load.begin() + experts, 0));
  }
  return dead;
}

}  // namespace moe::lm
