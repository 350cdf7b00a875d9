// From the operations of this folder to the CUDA kernel that does all of them. Internal.
#ifndef MOE_KERNELS_TOPK_GATE_GATE_LAUNCH_CUDA_H_
#define MOE_KERNELS_TOPK_GATE_GATE_LAUNCH_CUDA_H_

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/topk_gate_cuda.h"

namespace moe {

// Enqueues `gate`, whose shapes `function` has checked, on a stream of a CUDA device.
// kInvalidArgument, naming value and limit, for sizes that the kernel is not compiled for.
inline absl::Status LaunchGate(absl::string_view function, const topk_gate::CudaGate<float>& gate,
                               Stream& stream) {
  MOE_RETURN_IF_ERROR(
      CheckCudaLimit(function, "E (experts)", gate.logits.cols(), topk_gate::kMaxExperts));
  MOE_RETURN_IF_ERROR(CheckCudaLimit(function, "k", gate.expert.cols(), topk_gate::kMaxTopK));
  MOE_RETURN_IF_ERROR(
      CheckCudaLimit(function, "num_groups", gate.rule.num_groups, topk_gate::kMaxGroups));
  return LaunchOn(function, stream, [&](auto cuda) { return topk_gate::Run(gate, cuda); });
}

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_GATE_LAUNCH_CUDA_H_
