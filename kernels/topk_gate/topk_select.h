// The k best experts of each row of scores: selection alone, for gates whose scores are no softmax.
#ifndef MOE_KERNELS_TOPK_GATE_TOPK_SELECT_H_
#define MOE_KERNELS_TOPK_GATE_TOPK_SELECT_H_

#include <cstdint>

#include <absl/status/status.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// expert[t, :] = ids of the K largest of value[t, :], best first.
//
//   value   [T, E]  float32, any stride >= E
//   expert  [T, K]  K = expert.cols(), 1 <= K <= E
//
// The order of TopKGate: larger first; among equals (+0 and -0 are equal) the lowest id; a NaN
// ranks below everything, also below -infinity. Ids are therefore always in range and distinct, and
// every backend selects the same ones.
//
// Both views live on stream.device() and stay valid until the stream passes this point. Enqueues;
// each row alone: the same ids for any T and any number of threads. Cost: K searches of E values a
// row.
// Errors: kInvalidArgument if shapes disagree or E > 2^20, on CUDA if E > 1024 or K > 16.
absl::Status TopKSelect(MatrixView<const float> value, MatrixView<int32_t> expert, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_TOPK_SELECT_H_
