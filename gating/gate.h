// What a gate is: from logits to slots and weights, and back. Internal to gating/.
#ifndef MOE_GATING_GATE_H_
#define MOE_GATING_GATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "gating/routing.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"

namespace moe {

struct RouterConfig;

// What a gate chose, before capacity. Slots of a token in choice order. All in the workspace.
struct GateSelection {
  absl::Span<const int64_t> slot_offset;  // [T + 1]
  absl::Span<const int32_t> expert;       // [slots]
  absl::Span<float> weight;               // [slots] combine weights
  absl::Span<const int64_t> count;        // [E] slots per expert
  MatrixView<const float> probs;          // [T, E] softmax(logits): for the losses and backward
  absl::Span<const float> log_sum_exp;    // [T] of the logits
};

// What backward of a gate reads.
struct GateGradientInput {
  MatrixView<const float> logits;    // [T, E]
  MatrixView<const float> probs;     // [T, E]
  const Routing& routing;            // after capacity
  absl::Span<const float> d_weight;  // [slots] gradient by routing.weight
};

// A gate is stateless but for its configuration and may be shared between threads.
class Gate {
 public:
  virtual ~Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  // A token's slots may depend on all tokens of its token group; `batch` has the boundaries, as
  // CopyBatch returns them. Same bits on any number of threads.
  virtual absl::StatusOr<GateSelection> Select(MatrixView<const float> logits, const Batch& batch,
                                               Workspace& workspace, Stream& stream) const = 0;

  // Called when capacity has dropped slots, before their weights become 0: gates whose definition
  // renormalises over the kept slots write selection.weight again.
  virtual absl::Status Reweigh(const GateSelection& /*selection*/,
                               absl::Span<const uint8_t> /*dropped*/, Stream& /*stream*/) const {
    return absl::OkStatus();
  }

  // d_logits [T, E] is overwritten. d_weight of dropped slots is not read.
  virtual absl::Status Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                                Stream& stream) const = 0;

  // How many of a token's slots the load-balance loss counts; its k.
  virtual int32_t balance_choices() const = 0;

 protected:
  Gate() = default;
};

// A gate by its `--router` name. The caller has validated the configuration.
struct GateEntry {
  const char* name;
  int32_t only_top_k;  // the k the gate is defined for; 0 = any
  std::unique_ptr<const Gate> (*make)(const RouterConfig& config);
};

// nullptr if there is none.
const GateEntry* FindGate(absl::string_view name);

// All names, in the order of the documentation; and the one that looks most like `name`.
std::vector<std::string> GateNames();
std::string NearestGateName(absl::string_view name);

}  // namespace moe

#endif  // MOE_GATING_GATE_H_
