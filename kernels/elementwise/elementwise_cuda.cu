#include <type_traits>

#include "kernels/base/cuda_elements.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/elementwise/elementwise_op.h"

namespace moe::elementwise {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// 16 bytes of it are one access, and as many elements of the wider type are two.
template <typename In, typename Out>
using Narrower = std::conditional_t<(sizeof(In) < sizeof(Out)), In, Out>;
template <class Op>
using UnitOf =
    Narrower<std::remove_cvref_t<decltype(*Op().in)>, std::remove_cvref_t<decltype(*Op().out)>>;

// Compute<kWidth>(op, ...): kWidth neighbouring elements, from what they begin at.

template <int kWidth, typename From, typename To>
__device__ void Compute(const Cast<From, To>& /*op*/, const From* in, To* out) {
  const auto from = LoadElements<kWidth>(in);
  Elements<To, kWidth> to;
  for (int j = 0; j < kWidth; ++j) to.at[j] = To(static_cast<float>(from.at[j]));
  StoreElements(to, out);
}

template <int kWidth>
__device__ void Compute(const Scale& op, const float* in, float* out) {
  auto values = Load<kWidth>(in);
  for (float& value : values.at) value *= op.factor;
  if (op.write == Write::kAdd) {
    const auto sum = Load<kWidth>(out);
    for (int j = 0; j < kWidth; ++j) values.at[j] = sum.at[j] + values.at[j];
  }
  Store(values, out);
}

template <int kWidth, typename T>
__device__ void Compute(const AddPartial<T>& /*op*/, const T* in, T* out) {
  const auto received = Load<kWidth>(in);
  auto sum = Load<kWidth>(out);
  for (int j = 0; j < kWidth; ++j) sum.at[j] = received.at[j] + sum.at[j];
  Store(sum, out);
}

template <int kWidth, typename T, typename U>
__device__ void Compute(const Sum<T, U>& /*op*/, const T* a, const U* b, T* out) {
  auto values = Load<kWidth>(a);
  const auto others = LoadElements<kWidth>(b);
  for (int i = 0; i < kWidth; ++i) {
    values.at[i] = T(static_cast<float>(values.at[i]) + static_cast<float>(others.at[i]));
  }
  Store(values, out);
}

template <int kWidth, typename T, typename U>
__device__ void Compute(const Product<T, U>& op, const U* a, const float* b, T* out) {
  const auto a_values = LoadElements<kWidth>(a);
  const auto b_values = LoadElements<kWidth>(b);
  Elements<T, kWidth> old = {};
  if (op.write == Write::kAdd) old = Load<kWidth>(out);
  Elements<T, kWidth> result;
  for (int i = 0; i < kWidth; ++i) {
    const float product = static_cast<float>(a_values.at[i]) * b_values.at[i];
    result.at[i] = T(op.write == Write::kAdd ? static_cast<float>(old.at[i]) + product : product);
  }
  Store(result, out);
}

// A thread owns elements.
template <class Op>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) ArrayKernel(Op op) {
  ForElements<UnitOf<Op>>(
      op.n,
      [&](int64_t i, auto width) { Compute<decltype(width)::value>(op, op.in + i, op.out + i); },
      op.in, op.out);
}

// A warp owns a row.
template <class Op>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) RowKernel(Op op) {
  const int64_t cols = op.out.cols();
  ForRows<kWarpLanes>(op.out.rows(), [&](int64_t t, int lane) {
    const auto* const a = op.a.row(t);
    const auto* const b = op.b.row(t);
    auto* const out = op.out.row(t);
    using T = std::remove_reference_t<decltype(*out)>;
    ForColumns<T>(
        cols, VectorColumns<T>(cols, a, b, out), lane, kWarpLanes,
        [&](int64_t h, auto width) { Compute<decltype(width)::value>(op, a + h, b + h, out + h); });
  });
}

}  // namespace

template <class Op>
cudaError_t Run(const Op& op, cudaStream_t stream) {
  if constexpr (requires { op.n; }) {
    if (op.n == 0) return cudaSuccess;
    return Launch(&ArrayKernel<Op>, ElementShape<UnitOf<Op>>(op.n), stream, op);
  } else {
    if (op.out.rows() == 0 || op.out.cols() == 0) return cudaSuccess;
    return Launch(&RowKernel<Op>, RowShape<kWarpLanes>(op.out.rows()), stream, op);
  }
}

#define MOE_INSTANTIATE(...) template cudaError_t Run(const __VA_ARGS__&, cudaStream_t);
MOE_FOR_ELEMENTWISE(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::elementwise
