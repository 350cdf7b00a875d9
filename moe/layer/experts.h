// Feed-forward networks over rows grouped by expert.
#ifndef MOE_MOE_LAYER_EXPERTS_H_
#define MOE_MOE_LAYER_EXPERTS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/activation/activation.h"
#include "kernels/base/group_offsets.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"
#include "moe/tensor/gathered_rows.h"
#include "moe/tensor/linear.h"
#include "moe/tensor/tensor_share.h"

namespace moe {

struct ExpertsConfig {
  int64_t hidden_size = 0;      // H
  int64_t ffn_hidden_size = 0;  // F
  ActivationFunction activation = Activation::kSwiGlu;
  bool biases = false;          // both projections add a bias
  bool train = true;            // false: frozen, ParameterSpec::trainable
  double init_std = 0.02;       // gate and up projections
  double down_init_std = 0.02;  // down projection
  // Forward reads packed copies of the weights (kernels/grouped_gemm/packed_weights.h), packed
  // again after each change: the same bits, faster the fewer rows a network has, for twice the
  // memory. CPU.
  bool pack_weights = false;
  bool keep_hidden = true;  // false: ExpertsSaved::hidden is made again in backward
  TensorShare share = {};   // ranks that share the networks
};

// What backward needs of one call; views into the workspace of Prepare, or of PrepareBackward.
template <typename T>
struct ExpertsSaved {
  MatrixView<const T> rows;  // [N, H]
  // Where ranks share experts: `rows` are those of all of them, `own` what this rank was sent, and
  // d_out [N, H] the gradients by all outputs, which InputGradient gathers.
  std::optional<GatheredRows> gathered;
  MatrixView<const T> own;
  MatrixView<T> all, d_out;
  // [N, 2F], or [N, F] when not gated; its gradient after InputGradient. F: this rank's share.
  MatrixView<T> gate_up;
  MatrixView<T> hidden;  // [N, F], the activation of gate_up
};

// L networks: out = act(x W_gate^T + b_gate, x W_up^T + b_up) W_down^T + b_down, for rows sorted by
// network. Serves the routed experts (held by kExpertData), the shared expert and dense layers (one
// network, held by kData).
//
// Parameters per network: "<prefix>gate_up_proj.weight" [2F, H] (gate rows, then up rows; plain
// activations: "up_proj.weight" [F, H]) and "<prefix>down_proj.weight" [H, F]; with biases
// "<prefix>gate_up_proj.bias" [1, 2F] and "<prefix>down_proj.bias" [1, H], which start at 0.
template <typename T>
class Experts {
 public:
  // prefixes [L]: name prefix of each network. holders: of the networks, kData or kExpertData.
  static absl::StatusOr<std::unique_ptr<Experts>> Create(const ExpertsConfig& config,
                                                         absl::Span<const std::string> prefixes,
                                                         MeshGroup holders, ParameterStore& store);

  int local_experts() const { return static_cast<int>(down_.weights().size()); }
  const ExpertsConfig& config() const { return config_; }
  // The down projection of each.
  absl::Span<Parameter* const> weights() const { return down_.weights(); }

  // Takes the memory of backward's inputs for N rows. gathered: of networks that an expert-tensor
  // group shares; `rows` are then this rank's own, as `out` and `d_rows` below are.
  absl::Status Prepare(MatrixView<const T> rows, Workspace& workspace, ExpertsSaved<T>& saved,
                       const std::optional<GatheredRows>& gathered = {}) const;

  // out rows of networks [first, last) from saved.rows; offsets [L + 1] of all L over all rows. Of
  // networks that a tensor group shares, one, saved.rows and d_out are all rows, `out` and d_rows
  // this rank's own (LinearRows), and InputGradient may find saved.rows gone: WeightGradient reads
  // them again.
  // Writes the same rows of saved. Rows of other networks are untouched. Offsets that only the
  // device has require one call for all networks; rows after theirs may be overwritten. Networks
  // that an expert-tensor group shares are those gathered at once: collective over the group.
  absl::Status Forward(const Context& context, const LinearRows& networks, ExpertsSaved<T>& saved,
                       MatrixView<T> out) const;

  // Takes the memory of what Forward did not keep, before InputGradient, which writes it, for
  // WeightGradient, which reads it.
  absl::Status PrepareBackward(Workspace& workspace, ExpertsSaved<T>& saved) const;
  // d_rows of the same networks from d_out. Overwrites these rows of saved.gate_up with their
  // gradient, which WeightGradient reads: one Backward for each Forward, and nothing else may need
  // saved.gate_up between the two calls.
  absl::Status InputGradient(const Context& context, const LinearRows& networks,
                             ExpertsSaved<T>& saved, MatrixView<const T> d_out,
                             MatrixView<T> d_rows) const;
  // After InputGradient of all networks: adds a gradient partial for each (network, segment) and
  // reports each gradient as complete. segment_offsets [L * G + 1]; gathered rows have their own.
  // Has no effect on frozen networks. In fast numerics the segments of a network are merged. Where
  // cuBLAS computes the gradients, the host waits for offsets that only the device has.
  absl::Status WeightGradient(const Context& context, const GroupOffsets& segment_offsets,
                              const ExpertsSaved<T>& saved, MatrixView<const T> d_out,
                              GradientReady ready) const;

  int64_t packed_bytes() const { return gate_up_.packed_bytes() + down_.packed_bytes(); }

 private:
  Experts(const ExpertsConfig& config, Linear<T> gate_up, Linear<T> down)
      : config_(config), gate_up_(std::move(gate_up)), down_(std::move(down)) {
    if (gate_up_.weights().empty()) return;  // no network is here
    width_ = gate_up_.out_features() / (IsGated(config.activation) ? 2 : 1);
  }

  MatrixView<T> UpColumns(MatrixView<T> gate_up) const;  // empty when not gated
  absl::Status Activate(MatrixView<T> gate_up, MatrixView<T> hidden, Stream& stream) const;
  // Whether a backward reads `hidden` that no forward kept.
  bool MakesHiddenAgain() const { return !config_.keep_hidden && config_.train; }

  const ExpertsConfig config_;
  Linear<T> gate_up_, down_;
  int64_t width_ = 0;  // F, or this rank's share of it
};

}  // namespace moe

#endif  // MOE_MOE_LAYER_EXPERTS_H_
