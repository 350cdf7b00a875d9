// The expert that every token passes, beside those the router chooses.
#ifndef MOE_MOE_LAYER_SHARED_EXPERT_H_
#define MOE_MOE_LAYER_SHARED_EXPERT_H_

#include <memory>
#include <string>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/layer/experts.h"
#include "moe/run/pass.h"
#include "moe/state/parameter.h"

namespace moe {

// What backward needs of one call.
template <typename T>
struct SharedExpertSaved {
  ExpertsSaved<T> experts;
  MatrixView<T> out;       // [T, H] before the gate; gated only
  absl::Span<float> gate;  // [T] sigmoid(w . x); gated only
};

// y_t = Expert(x_t), or sigmoid(w . x_t) * Expert(x_t) when gated (Qwen2-MoE). Replicated on every
// rank, so nothing travels. Parameters: "<prefix>shared_expert.…" as Experts names them, and,
// gated, "<prefix>shared_expert_gate.weight" [1, H].
template <typename T>
class SharedExpert {
 public:
  enum class Gated : bool { kNo, kYes };

  static absl::StatusOr<std::unique_ptr<SharedExpert>> Create(const ExpertsConfig& config,
                                                              Gated gated,
                                                              const std::string& prefix,
                                                              ParameterStore& store);

  // y [T, H] is overwritten. The gate is computed in float32, the product rounded to T once.
  // `saved` is memory that the pass keeps.
  absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y,
                       SharedExpertSaved<T>& saved) const;

  // By the output, and by the input.
  struct Gradients {
    MatrixView<const T> dy;
    MatrixView<T> dx;
  };
  // Adds to dx [T, H] and, for each micro-batch of micro_batch_offsets [B + 1] that has tokens, a
  // partial to each gradient, which it then reports as complete; without tokens it reports alone.
  absl::Status Backward(const Pass& pass, Gradients gradients,
                        absl::Span<const int64_t> micro_batch_offsets, SharedExpertSaved<T>& saved,
                        GradientReady ready) const;

  int64_t packed_bytes() const { return experts_->packed_bytes(); }

 private:
  SharedExpert() = default;
  absl::Status GateBackward(const Context& context, Gradients gradients,
                            absl::Span<const int64_t> micro_batch_offsets,
                            const SharedExpertSaved<T>& saved, MatrixView<T> d_out) const;

  std::unique_ptr<Experts<T>> experts_;
  Parameter* gate_ = nullptr;  // null when not gated
};

}  // namespace moe

#endif  // MOE_MOE_LAYER_SHARED_EXPERT_H_
