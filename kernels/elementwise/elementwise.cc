#include "kernels/elementwise/elementwise.h"

#include <algorithm>
#include <type_traits>

#include "kernels/base/device_arrays.h"
#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/elementwise/elementwise_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/elementwise/elementwise.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::elementwise {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

// Compute(op, begin, end): elements [begin, end) of arrays, or rows of matrices.

template <typename From, typename To>
HWY_INLINE void Compute(const Cast<From, To>& op, int64_t begin, int64_t end) {
  const From* const in = op.in + begin;
  To* const out = op.out + begin;
  if constexpr (std::is_same_v<From, To>) {
    std::copy_n(in, end - begin, out);
  } else {
    ForLanes(end - begin, [&](int64_t i, auto lanes) MOE_LANES {  //
      lanes.Store(lanes.Load(in + i), out + i);
    });
  }
}

HWY_INLINE void Compute(const Scale& op, int64_t begin, int64_t end) {
  const float* const in = op.in + begin;
  float* const out = op.out + begin;
  const auto factor = hn::Set(FloatTag(), op.factor);
  const bool add = op.write == Write::kAdd;
  ForLanes(end - begin, [&](int64_t i, auto lanes) MOE_LANES {
    const auto product = hn::Mul(lanes.Load(in + i), factor);
    lanes.Store(add ? hn::Add(lanes.Load(out + i), product) : product, out + i);
  });
}

template <typename T>
HWY_INLINE void Compute(const AddPartial<T>& op, int64_t begin, int64_t end) {
  const hn::CappedTag<T, 64 / sizeof(T)> d;
  constexpr auto kStep = static_cast<int64_t>(hn::MaxLanes(decltype(d)()));
  const T* const in = op.in;
  T* const out = op.out;
  int64_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    hn::StoreU(hn::Add(hn::LoadU(d, in + i), hn::LoadU(d, out + i)), d, out + i);
  }
  for (; i < end; ++i) out[i] = in[i] + out[i];
}

template <typename T, typename U>
HWY_INLINE void Compute(const Sum<T, U>& op, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const T* const a = op.a.row(t);
    const U* const b = op.b.row(t);
    T* const out = op.out.row(t);
    ForLanes(op.out.cols(), [&](int64_t h, auto lanes) MOE_LANES {
      lanes.Store(hn::Add(lanes.Load(a + h), lanes.Load(b + h)), out + h);
    });
  }
}

template <typename T, typename U>
HWY_INLINE void Compute(const Product<T, U>& op, int64_t begin, int64_t end) {
  const bool add = op.write == Write::kAdd;
  for (int64_t t = begin; t < end; ++t) {
    const U* const a = op.a.row(t);
    const float* const b = op.b.row(t);
    T* const out = op.out.row(t);
    ForLanes(op.out.cols(), [&](int64_t h, auto lanes) MOE_LANES {
      const auto product = hn::Mul(lanes.Load(a + h), lanes.Load(b + h));
      lanes.Store(add ? hn::Add(lanes.Load(out + h), product) : product, out + h);
    });
  }
}

template <class Op>
void ComputeRange(const Op& op, int64_t begin, int64_t end) {
  Compute(op, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::elementwise
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::elementwise {

template <class Op>
void Run(const Op& op, ThreadPool& threads) {
  const auto compute = [&](int64_t begin, int64_t end) {
    MOE_SIMD(ComputeRange<Op>)(op, begin, end);
  };
  if constexpr (requires { op.n; }) {
    threads.For(op.n, int64_t{1} << 15, compute);  // a fork costs about as much as 4000 elements
  } else {
    threads.For(op.out.rows(), RowGrain(op.out.cols()), compute);
  }
}

}  // namespace moe::elementwise

namespace moe {

template <typename From, typename To>
absl::Status Cast(absl::Span<const From> in, absl::Span<To> out, Stream& stream) {
  const auto n = static_cast<int64_t>(in.size());
  MOE_RETURN_IF_ERROR(CheckLength("Cast", "out", out.size(), n));
  return RunOp("Cast", elementwise::Cast<From, To>{in.data(), out.data(), n}, stream);
}

template <typename To>
absl::Status CastSlices(absl::Span<const CastSlice<To>> slices, Workspace& workspace,
                        Stream& stream) {
  if (slices.empty()) return absl::OkStatus();
  if (IsCuda(stream)) {
    const WorkspaceScope scope(workspace);
    MOE_ASSIGN_OR_RETURN(const auto table, UploadArray(slices, workspace, stream));
    const int64_t end = slices.back().first + slices.back().size;
    return LaunchOn("CastSlices", stream, [&](auto cuda) {
      return elementwise::Run(
          elementwise::CastSlices<To>{table.data(), std::ssize(table), slices.front().first, end},
          cuda);
    });
  }
  return stream.Enqueue([=, &threads = stream.threads()] {
    for (const CastSlice<To>& slice : slices) {
      elementwise::Run(elementwise::Cast<float, To>{slice.in, slice.out, slice.size}, threads);
    }
    return absl::OkStatus();
  });
}

absl::Status Scale(absl::Span<const float> in, float factor, absl::Span<float> out, Write write,
                   Stream& stream) {
  const auto n = static_cast<int64_t>(in.size());
  MOE_RETURN_IF_ERROR(CheckLength("Scale", "out", out.size(), n));
  return RunOp("Scale", elementwise::Scale{in.data(), factor, out.data(), write, n}, stream);
}

template <typename T>
absl::Status AddPartial(absl::Span<const std::type_identity_t<T>> partial, absl::Span<T> acc,
                        Stream& stream) {
  // Unsigned integers wrap around; overflow of signed ones would be undefined.
  using Added = std::conditional_t<std::is_same_v<T, int64_t>, uint64_t, T>;
  const auto n = static_cast<int64_t>(acc.size());
  MOE_RETURN_IF_ERROR(CheckLength("AddPartial", "partial", partial.size(), n));
  return RunOp("AddPartial",
               elementwise::AddPartial<Added>{reinterpret_cast<const Added*>(partial.data()),
                                              reinterpret_cast<Added*>(acc.data()), n},
               stream);
}

template <typename T, typename U>
absl::Status AddRows(MatrixView<const T> a, MatrixView<const std::type_identity_t<U>> b,
                     MatrixView<T> out, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckShape("AddRows", "a", a, out.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape("AddRows", "b", b, out.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape("AddRows", "out", out, out.rows(), out.cols()));
  return RunOp("AddRows", elementwise::Sum<T, U>{a, b, out}, stream);
}

template <typename T, typename U>
absl::Status MultiplyRows(MatrixView<const std::type_identity_t<U>> a, MatrixView<const float> b,
                          MatrixView<T> out, Write write, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckShape("MultiplyRows", "a", a, out.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape("MultiplyRows", "b", b, out.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape("MultiplyRows", "out", out, out.rows(), out.cols()));
  return RunOp("MultiplyRows", elementwise::Product<T, U>{a, b, out, write}, stream);
}

template absl::Status Cast(absl::Span<const float>, absl::Span<BFloat16>, Stream&);
template absl::Status Cast(absl::Span<const float>, absl::Span<Float16>, Stream&);
template absl::Status Cast(absl::Span<const BFloat16>, absl::Span<float>, Stream&);
template absl::Status Cast(absl::Span<const Float16>, absl::Span<float>, Stream&);
template absl::Status Cast(absl::Span<const float>, absl::Span<float>, Stream&);
template absl::Status CastSlices(absl::Span<const CastSlice<BFloat16>>, Workspace&, Stream&);
template absl::Status CastSlices(absl::Span<const CastSlice<Float16>>, Workspace&, Stream&);
template absl::Status AddPartial(absl::Span<const float>, absl::Span<float>, Stream&);
template absl::Status AddPartial(absl::Span<const int64_t>, absl::Span<int64_t>, Stream&);

#define MOE_INSTANTIATE(T, U)                     \
  template decltype(AddRows<T, U>) AddRows<T, U>; \
  template decltype(MultiplyRows<T, U>) MultiplyRows<T, U>;
MOE_INSTANTIATE(float, float)
MOE_INSTANTIATE(BFloat16, BFloat16)
MOE_INSTANTIATE(Float16, Float16)
MOE_INSTANTIATE(BFloat16, float)
MOE_INSTANTIATE(Float16, float)
#undef MOE_INSTANTIATE

}  // namespace moe
#endif  // HWY_ONCE
