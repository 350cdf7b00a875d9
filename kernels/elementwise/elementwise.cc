#include "kernels/elementwise/elementwise.h"

#include "kernels/base/device_arrays.h"
#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/elementwise/elementwise_op.h"

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
  // Without their signs integers wrap around, where others would be undefined.
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

#define MOE_INSTANTIATE(T, U)                                                                  \
  template absl::Status AddRows<T, U>(MatrixView<const T>, MatrixView<const U>, MatrixView<T>, \
                                      Stream&);                                                \
  template absl::Status MultiplyRows<T, U>(MatrixView<const U>, MatrixView<const float>,       \
                                           MatrixView<T>, Write, Stream&);
MOE_INSTANTIATE(float, float)
MOE_INSTANTIATE(BFloat16, BFloat16)
MOE_INSTANTIATE(Float16, Float16)
MOE_INSTANTIATE(BFloat16, float)
MOE_INSTANTIATE(Float16, float)
#undef MOE_INSTANTIATE

}  // namespace moe
