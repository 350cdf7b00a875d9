// Arguments of both paths of elementwise.h, in the memory of one device. Internal. Plain C++: .cu
// files include it.
#ifndef MOE_KERNELS_ELEMENTWISE_ELEMENTWISE_OP_H_
#define MOE_KERNELS_ELEMENTWISE_ELEMENTWISE_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"
#include "kernels/elementwise/cast_slice.h"

namespace moe::elementwise {

// Arrays [n], with any alignment: 16-byte accesses on CUDA if all begin at a multiple of 16 bytes.
template <typename From, typename To>
struct Cast {
  const From* in;
  To* out;
  int64_t n;
};

// CastSlices on CUDA.
template <typename To>
struct CastSlices {
  const CastSlice<To>* slices;  // [count], which cover elements [first, end)
  int64_t count;
  int64_t first, end;
};

struct Scale {
  const float* in;
  float factor;
  float* out;  // may be `in`
  Write write;
  int64_t n;
};

// T: float or uint64_t; signed integers are added as uint64_t, which wraps around.
template <typename T>
struct AddPartial {
  const T* in;
  T* out;  // added to
  int64_t n;
};

// Matrices [T, H]; out may be a or b.
template <typename T, typename U>
struct Sum {
  MatrixView<const T> a;
  MatrixView<const U> b;
  MatrixView<T> out;
};

template <typename T, typename U>
struct Product {
  MatrixView<const U> a;
  MatrixView<const float> b;
  MatrixView<T> out;
  Write write;
};

// Op: one of the structs above. Enqueues and returns the launch error alone. The bits are the
// CPU's, except that a NaN of Float16 may have another payload.
template <class Op>
cudaError_t Run(const Op& op, cudaStream_t stream);
template <typename To>
cudaError_t Run(const CastSlices<To>& op, cudaStream_t stream);

// instantiate(Op) for every operation.
// clang-format off
#define MOE_FOR_ELEMENTWISE(instantiate)                                          \
  instantiate(Cast<float, BFloat16>) instantiate(Cast<float, Float16>)            \
  instantiate(Cast<BFloat16, float>) instantiate(Cast<Float16, float>)            \
  instantiate(Cast<float, float>) instantiate(Scale)                              \
  instantiate(AddPartial<float>) instantiate(AddPartial<uint64_t>)                \
  instantiate(Sum<float, float>) instantiate(Product<float, float>)               \
  instantiate(Sum<BFloat16, BFloat16>) instantiate(Product<BFloat16, BFloat16>)   \
  instantiate(Sum<Float16, Float16>) instantiate(Product<Float16, Float16>)       \
  instantiate(Sum<BFloat16, float>) instantiate(Product<BFloat16, float>)         \
  instantiate(Sum<Float16, float>) instantiate(Product<Float16, float>)
// clang-format on

}  // namespace moe::elementwise

#endif  // MOE_KERNELS_ELEMENTWISE_ELEMENTWISE_OP_H_
