// Steps of one MoE layer through moe::Trainer: what tests run at every layout, on every backend
// and with ranks that die.
#ifndef MOE_TESTS_MOE_TRAINED_LAYER_H_
#define MOE_TESTS_MOE_TRAINED_LAYER_H_

#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "moe/trainer.h"
#include "tests/moe/layer_harness.h"

namespace moe::testing {

inline constexpr int64_t kTokens = 6, kHidden = 8, kMicroBatches = 5;

inline MoeLayerConfig LayerConfig(int overlap) {
  return {.router = {.gate = "deepseek-v3", .num_experts = 6, .top_k = 2, .hidden_size = kHidden},
          .ffn_hidden_size = 12,
          .overlap_degree = overlap};
}

inline TrainerOptions Options(const Layout& layout, Device device = {}) {
  return {.session = {.device = device,
                      .expert_parallel_size = layout.expert_parallel,
                      .overlap_exchange = layout.overlap > 1},
          .micro_batches = kMicroBatches};
}

// Rows of one micro-batch, whichever rank has it.
inline std::vector<float> Rows(const Round& round) {
  std::vector<float> rows(round.empty() ? 0 : kTokens * kHidden);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = std::sin(static_cast<float>(i * i + 31 * static_cast<size_t>(round.micro_batch())));
  }
  return rows;
}

inline MatrixView<float> View(std::vector<float>& rows) {
  return {rows.data(), static_cast<int64_t>(rows.size()) / kHidden, kHidden};
}

// Rows in memory of the device that `context` computes on.
class DeviceRows {
 public:
  static absl::StatusOr<DeviceRows> Create(int64_t rows, const Context& context) {
    DeviceRows made;
    made.rows_ = rows;
    MOE_ASSIGN_OR_RETURN(made.buffer_, Buffer::Allocate(made.bytes(), *context.memory));
    return made;
  }
  MatrixView<float> view() { return {buffer_.span<float>().data(), rows_, kHidden}; }
  absl::Status Write(const std::vector<float>& host, const Context& context) {
    MOE_RETURN_IF_ERROR(context.compute->CopyBytes(host.data(), view().data(), bytes()));
    return context.compute->Synchronize();
  }
  absl::Status Read(std::vector<float>& host, const Context& context) {
    MOE_RETURN_IF_ERROR(context.compute->CopyBytes(view().data(), host.data(), bytes()));
    return context.compute->Synchronize();
  }

 private:
  int64_t bytes() const { return rows_ * kHidden * static_cast<int64_t>(sizeof(float)); }
  Buffer buffer_;
  int64_t rows_ = 0;
};

// Forward and backward of a round; the loss is half the sum of squares of y + x.
inline absl::Status RunRound(Trainer& trainer, TrainedLayer<float>& layer, float poison = 0) {
  MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
  const Context& context = trainer.context();
  const std::vector<float> rows = Rows(round);
  std::vector<float> sum(rows.size());
  const int64_t count = round.empty() ? 0 : kTokens;
  MOE_ASSIGN_OR_RETURN(DeviceRows x, DeviceRows::Create(count, context));
  MOE_ASSIGN_OR_RETURN(DeviceRows y, DeviceRows::Create(count, context));
  MOE_ASSIGN_OR_RETURN(DeviceRows dx, DeviceRows::Create(count, context));
  MOE_RETURN_IF_ERROR(x.Write(rows, context));
  MOE_RETURN_IF_ERROR(layer.Forward(round, x.view(), y.view()));
  MOE_RETURN_IF_ERROR(y.Read(sum, context));
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += rows[i];
  if (!sum.empty()) sum[0] += poison;
  MOE_RETURN_IF_ERROR(y.Write(sum, context));
  MOE_RETURN_IF_ERROR(layer.Backward(round, y.view(), dx.view()));
  return context.compute->Synchronize();  // the rows go
}

inline absl::Status RunStep(Trainer& trainer, TrainedLayer<float>& layer) {
  for (int64_t r = 0; r < trainer.rounds(); ++r) {
    MOE_RETURN_IF_ERROR(RunRound(trainer, layer));
  }
  return trainer.Step({.learning_rate = 0.01}).status();
}

inline absl::Status RunSteps(const Layout& layout, std::unique_ptr<Communicator> world,
                             const std::function<void(const Trainer&)>& look,
                             DeviceKind kind = DeviceKind::kCpu) {
  MOE_ASSIGN_OR_RETURN(const Device device, DeviceOfRank(kind, *world));
  MOE_ASSIGN_OR_RETURN(const auto trainer,
                       Trainer::Create(Options(layout, device), std::move(world)));
  MOE_ASSIGN_OR_RETURN(auto* const layer,
                       trainer->AddMoeLayer<float>("mlp.", LayerConfig(layout.overlap)));
  for (int step = 1; step <= 3; ++step) MOE_RETURN_IF_ERROR(RunStep(*trainer, *layer));
  look(*trainer);
  return absl::OkStatus();
}

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_TRAINED_LAYER_H_
