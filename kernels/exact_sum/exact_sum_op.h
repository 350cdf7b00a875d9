// Arguments of both paths of exact_sum.h, and of AddSquares on CUDA, in the memory of one device.
// Internal. Plain C++: .cu files include it.
#ifndef MOE_KERNELS_EXACT_SUM_EXACT_SUM_OP_H_
#define MOE_KERNELS_EXACT_SUM_EXACT_SUM_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/exact_sum/grid_tally.h"
#include "kernels/exact_sum/square_sum.h"
#include "kernels/exact_sum/sum_view.h"

namespace moe::exact_sum {

// ExactAccumulate.
struct Accumulate {
  const float* partial;  // [n]
  double inverse_unit;   // 2^-unit_log2
  int64_t limit;         // ExactGrid::limit
  int64_t* sum;          // [n]
  Write write;
  GridTally* tally;  // added to
  int64_t n;
};

// out[i] = float(double(sum[i]) * factor): ExactToFloat.
struct ToFloat {
  const int64_t* sum;  // [n]
  double factor;       // scale * 2^unit_log2
  float* out;          // [n]
  int64_t n;
};

// AddSquares on CUDA. View: SumView of float or int64_t.
template <class View>
struct AddSquares {
  View x;
  const SquaresUnit* units;  // [count]
  int64_t* sum;              // [.][kSquareSumSize], added to
  int64_t count;
};

constexpr int64_t kSquaresBlock = 4096;  // elements of a partial sum, as on the CPU

// All enqueue on `stream` and return the launch error alone. The bits are the CPU's for every
// finite result: integers are added, roundings to nearest even are IEEE's on both, and squares,
// exact in float64, are summed in the same order. NaNs stay NaNs, but their payload may differ.
cudaError_t Run(const Accumulate& accumulate, cudaStream_t stream);
cudaError_t Run(const ToFloat& to_float, cudaStream_t stream);
template <class View>
cudaError_t Run(const AddSquares<View>& squares, cudaStream_t stream);

}  // namespace moe::exact_sum

#endif  // MOE_KERNELS_EXACT_SUM_EXACT_SUM_OP_H_
