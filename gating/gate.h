// What a gate is: from logits to slots and weights, and back. Every gate of gating/ is one, and a
// program may register its own (examples/custom_gate.cc).
#ifndef MOE_GATING_GATE_H_
#define MOE_GATING_GATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "gating/router_config.h"
#include "gating/routing.h"
#include "gating/token_groups.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"

namespace moe {

// What the router and the layer must know of a gate besides its functions.
struct GateTraits {
  // Rows of the router's weight for every expert. Above 1, logits are [T, logit_sets * E]: the
  // experts' logits, then whatever else the gate learns (noisy top-k: the width of the noise).
  int32_t logit_sets = 1;
  bool router_bias = false;  // logits have a trained bias
  bool expert_bias = false;  // selection has a bias without gradient, moved by counts
  // > 0: in training the router sees x * U[1 - e, 1 + e], drawn per element.
  float input_jitter = 0;
  // The score the losses, the entropy and probability-ordered drops are told in.
  ScoreFunction score = ScoreFunction::kSoftmax;
  // How many of a token's slots the load-balance loss counts, and its k; 0 = no such loss.
  int32_t balance_choices = 0;
  bool limits_itself = false;  // takes capacity into its selection: nothing is dropped afterwards
  WeightOn weight_on = WeightOn::kOutput;
};

// What a gate is told about one call. E counts identity experts too. Logits and expert_bias live on
// the stream's device (see Gate::RunsOn), batch and groups in host memory.
struct GateInput {
  MatrixView<const float> logits;  // [T, logit_sets * E], router_bias added
  const Batch& batch;              // as CopyBatch returns it
  const TokenGroups& groups;
  absl::Span<const float> expert_bias;  // [E]; empty without traits().expert_bias
};

// What a gate chose, before capacity. Slots of a token in choice order. All in the workspace, which
// has memory of the stream's device.
struct GateSelection {
  absl::Span<const int64_t> slot_offset;  // [T + 1]
  absl::Span<const int32_t> expert;       // [slots]
  absl::Span<float> weight;               // [slots] combine weights
  absl::Span<const int64_t> count;        // [E] slots per expert
  MatrixView<const float> score;          // [T, E] of traits().score, for losses and backward
  absl::Span<const float> log_sum_exp;    // [T] of the experts' logits
  MatrixView<const float> memo;           // [T, any] what the gate leaves for its own backward
};

// What backward of a gate reads, on the stream's device but for the batch.
struct GateGradientInput {
  MatrixView<const float> logits;
  const Batch& batch;
  const GateSelection& selection;
  absl::Span<const uint8_t> dropped;  // [slots] 1 = over capacity
  absl::Span<const float> d_weight;   // [slots] gradient by the combine weights
};

// A gate is stateless but for its configuration and may be shared between threads.
class Gate {
 public:
  virtual ~Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  virtual GateTraits traits() const = 0;

  // Whether Select and Backward take streams of such a device and views of its memory. Gates that
  // do not are given copies in host memory, and a stream of the CPU. A gate with Reweigh or
  // AddLosses runs on CPUs alone.
  virtual bool RunsOn(DeviceKind device) const { return device == DeviceKind::kCpu; }

  // A token's slots may depend on all tokens of its token group, and on nothing beyond it. Random
  // numbers are keyed by the global token id. Same bits on any number of threads.
  virtual absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                               Stream& stream) const = 0;

  // Called when capacity has dropped slots, before their weights become 0: gates whose definition
  // renormalises over the kept slots write selection.weight again.
  virtual absl::Status Reweigh(const GateSelection& /*selection*/,
                               absl::Span<const uint8_t> /*dropped*/, Stream& /*stream*/) const {
    return absl::OkStatus();
  }

  // *loss += the gate's own losses, summed over micro-batches; d_logits [T, logit_sets * E] +=
  // their gradient (empty view = not wanted). The load-balance and z-loss are the router's. Host
  // memory, computed at once: of gates that run on CPUs alone.
  virtual absl::Status AddLosses(const GateInput& /*input*/, const GateSelection& /*selection*/,
                                 double* /*loss*/, MatrixView<float> /*d_logits*/,
                                 Workspace& /*workspace*/) const {
    return absl::OkStatus();
  }

  // d_logits [T, logit_sets * E] is overwritten. d_weight of dropped slots is not read.
  virtual absl::Status Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                                Stream& stream) const = 0;

 protected:
  Gate() = default;
};

// A gate by its `--router` name.
struct GateDefinition {
  std::string name = {};
  int32_t only_top_k = 0;  // the k the gate is defined for; 0 = any
  // GateOption bits: what of RouterConfig the gate reads. Anything else must keep its default.
  uint32_t options = 0;
  // Called with a configuration that ValidateRouterConfig has accepted.
  std::function<std::unique_ptr<const Gate>(const RouterConfig& config)> make;
};

// Adds a gate to those that RouterConfig::gate can name, for the life of the process. Call before
// the first layer that uses it, on every rank (ranks of one process share the table). Thread-safe.
// kAlreadyExists if the name is taken, kInvalidArgument without a name or `make`.
absl::Status RegisterGate(GateDefinition definition);

// nullptr if there is none; valid for the life of the process.
const GateDefinition* FindGate(absl::string_view name);

// All names: the built-in ones in the order of the documentation, then registered ones; and the one
// that looks most like `name`.
std::vector<std::string> GateNames();
std::string NearestGateName(absl::string_view name);

}  // namespace moe

#endif  // MOE_GATING_GATE_H_
