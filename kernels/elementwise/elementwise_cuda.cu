#include <type_traits>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/elementwise/elementwise_op.h"

namespace moe::elementwise {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// The narrower type: 16 bytes of it are one access, and as many elements of the wider type are two.
template <typename In, typename Out>
using Narrower = std::conditional_t<(sizeof(In) < sizeof(Out)), In, Out>;
template <class Op>
using UnitOf =
    Narrower<std::remove_cvref_t<decltype(*Op().in)>, std::remove_cvref_t<decltype(*Op().out)>>;

// Result<kWidth>(op, inputs, out) computes kWidth neighbouring elements. `inputs` and, where it is
// added to, `out` point to the first of them.

template <int kWidth, typename From, typename To>
__device__ Elements<To, kWidth> Result(const Cast<From, To>& /*op*/, const From* in,
                                       const To* /*out*/) {
  const auto from = LoadElements<kWidth>(in);
  Elements<To, kWidth> to;
  for (int j = 0; j < kWidth; ++j) {
    const auto value = static_cast<float>(from.at[j]);
    to.at[j] = To(value);
    if constexpr (std::is_same_v<To, Float16>) {
      // of all NaNs a GPU's conversion makes one
      const auto bits = __builtin_bit_cast(uint32_t, value);
      if (value != value) {
        to.at[j].bits =
            static_cast<uint16_t>((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu));
      }
    }
  }
  return to;
}

template <int kWidth>
__device__ Elements<float, kWidth> Result(const Scale& op, const float* in, const float* out) {
  auto values = Load<kWidth>(in);
  for (float& value : values.at) value *= op.factor;
  if (op.write == Write::kAdd) {
    const auto sum = Load<kWidth>(out);
    for (int j = 0; j < kWidth; ++j) values.at[j] = sum.at[j] + values.at[j];
  }
  return values;
}

template <int kWidth, typename T>
__device__ Elements<T, kWidth> Result(const AddPartial<T>& /*op*/, const T* in, const T* out) {
  const auto received = Load<kWidth>(in);
  auto sum = Load<kWidth>(out);
  for (int j = 0; j < kWidth; ++j) sum.at[j] = received.at[j] + sum.at[j];
  return sum;
}

template <int kWidth, typename T, typename U>
__device__ Elements<T, kWidth> Result(const Sum<T, U>& /*op*/, const T* a, const U* b,
                                      const T* /*out*/) {
  auto values = Load<kWidth>(a);
  const auto others = LoadElements<kWidth>(b);
  for (int i = 0; i < kWidth; ++i) {
    values.at[i] = T(static_cast<float>(values.at[i]) + static_cast<float>(others.at[i]));
  }
  return values;
}

template <int kWidth, typename T, typename U>
__device__ Elements<T, kWidth> Result(const Product<T, U>& op, const U* a, const float* b,
                                      const T* out) {
  const auto a_values = LoadElements<kWidth>(a);
  const auto b_values = LoadElements<kWidth>(b);
  Elements<T, kWidth> old = {};
  if (op.write == Write::kAdd) old = Load<kWidth>(out);
  Elements<T, kWidth> result;
  for (int i = 0; i < kWidth; ++i) {
    const float product = static_cast<float>(a_values.at[i]) * b_values.at[i];
    result.at[i] = T(op.write == Write::kAdd ? static_cast<float>(old.at[i]) + product : product);
  }
  return result;
}

// A thread owns elements.
template <class Op>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) ArrayKernel(Op op) {
  ForElements<UnitOf<Op>>(
      op.n,
      [&](int64_t i, auto width) {
        StoreElements(Result<decltype(width)::value>(op, op.in + i, op.out + i), op.out + i);
      },
      op.in, op.out);
}

// A block owns kSliceElements elements, a thread some of them.
template <typename To>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) CastSlicesKernel(CastSlices<To> op) {
  ForSlices(op.slices, op.count, op.first, [](const CastSlice<To>& s, int64_t begin, int64_t n) {
    const float* const in = s.in + begin;
    To* const out = s.out + begin;
    ForColumns<To>(n, VectorColumns<To>(n, in, out), static_cast<int>(threadIdx.x), kRowThreads,
                   [&](int64_t i, auto width) {
                     StoreElements(
                         Result<decltype(width)::value>(Cast<float, To>(), in + i, out + i),
                         out + i);
                   });
  });
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
    const auto result = [&](int64_t h, auto width) {
      return Result<decltype(width)::value>(op, a + h, b + h, out + h);
    };
    ForColumns<T, kReadAheadOfMany>(cols, VectorColumns<T>(cols, a, b, out), lane, kWarpLanes,
                                    result, StoreTo(out));
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

template <typename To>
cudaError_t Run(const CastSlices<To>& op, cudaStream_t stream) {
  if (op.first == op.end) return cudaSuccess;
  return Launch(&CastSlicesKernel<To>, SliceShape(op.first, op.end), stream, op);
}

template cudaError_t Run(const CastSlices<BFloat16>&, cudaStream_t);
template cudaError_t Run(const CastSlices<Float16>&, cudaStream_t);
#define MOE_INSTANTIATE(...) template cudaError_t Run(const __VA_ARGS__&, cudaStream_t);
MOE_FOR_ELEMENTWISE(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::elementwise
