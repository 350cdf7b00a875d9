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
#include "moe/tensor/own_rows.h"

namespace moe {

// What backward needs of one call.
template <typename T>
struct SharedExpertSaved {
  MatrixView<const T> x;  // [own T, H]
  ExpertsSaved<T> experts;
  MatrixView<T> out;       // [own T, H] before the gate; gated only
  absl::Span<float> gate;  // [own T] sigmoid(w . x); gated only
};

// y_t = Expert(x_t), or sigmoid(w . x_t) * Expert(x_t) when gated (Qwen2-MoE). Ranks of a tensor
// group share the expert and divide its rows; otherwise it is whole on each, so that nothing
// travels. Parameters: "<prefix>shared_expert.…" as Experts names them, and,
// gated, "<prefix>shared_expert_gate.weight" [1, H].
template <typename T>
class SharedExpert {
 public:
  enum class Gated : bool { kNo, kYes };

  static absl::StatusOr<std::unique_ptr<SharedExpert>> Create(const ExpertsConfig& config,
                                                              Gated gated,
                                                              const std::string& prefix,
                                                              ParameterStore& store);

  // y [own T, H] is overwritten. The gate is computed in float32, the product rounded to T once.
  // `saved` is memory that the pass keeps.
  absl::Status Forward(const Pass& pass, const OwnRows& own, MatrixView<const T> x, MatrixView<T> y,
                       SharedExpertSaved<T>& saved) const;

  struct Gradients {
    MatrixView<const T> dy;  // by the output, [own T, H]
    MatrixView<T> dx;        // by the input
    const OwnRows& own;
    absl::Span<const int64_t> micro_batch_offsets;  // [B + 1] of all rows
    absl::Span<const int64_t> segments;             // of own rows (SegmentsOf)
  };
  // Adds to dx and, for each micro-batch that has tokens, a partial to the gradients of the expert,
  // for each segment one to that of the gate. Reports each as complete, also without tokens.
  absl::Status Backward(const Pass& pass, Gradients gradients, SharedExpertSaved<T>& saved,
                        GradientReady ready) const;

  int64_t packed_bytes() const { return experts_->packed_bytes(); }

 private:
  SharedExpert() = default;
  absl::Status GateBackward(const Context& context, Gradients gradients,
                            const SharedExpertSaved<T>& saved, MatrixView<T> d_out) const;

  std::unique_ptr<Experts<T>> experts_;
  Parameter* gate_ = nullptr;  // null when not gated
};

}  // namespace moe

#endif  // MOE_MOE_LAYER_SHARED_EXPERT_H_
