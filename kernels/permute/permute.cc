#include "kernels/permute/permute.h"

#include <absl/container/inlined_vector.h>
#include <absl/strings/string_view.h>

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/permute/permute_op.h"

namespace moe {
namespace permute {

template <typename T>
void Reference(const GatherOfMany<T>& gather) {
  for (int64_t i = 0; i < gather.out.rows(); ++i) {
    const int32_t row = gather.source_row[i];
    for (int64_t h = 0; h < gather.out.cols(); ++h) {
      T value = T(0.0f);
      if (row >= 0) value = gather.views[gather.source_view[i]](row, h);
      if (row >= 0 && gather.scale != nullptr) {
        value = T(gather.scale[i] * static_cast<float>(value));
      }
      gather.out(i, h) = value;
    }
  }
}

}  // namespace permute

namespace {

template <typename T>
absl::Status CheckGather(absl::string_view function, MatrixView<const T> in,
                         absl::Span<const int32_t> source_row, MatrixView<T> out) {
  MOE_RETURN_IF_ERROR(CheckShape(function, "in", in, in.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(function, "out", out, out.rows(), out.cols()));
  return CheckLength(function, "source_row", source_row.size(), out.rows());
}

}  // namespace

template <typename T>
absl::Status GatherRows(MatrixView<const T> in, absl::Span<const int32_t> source_row,
                        MatrixView<T> out, Stream& stream) {
  constexpr char kName[] = "GatherRows";
  MOE_RETURN_IF_ERROR(CheckGather(kName, in, source_row, out));
  return RunOp(kName, permute::Gather<T>{.in = in, .source_row = source_row.data(), .out = out},
               stream);
}

template <typename T>
absl::Status GatherScaledRows(MatrixView<const T> in, absl::Span<const int32_t> source_row,
                              absl::Span<const float> scale, MatrixView<T> out, Stream& stream) {
  constexpr char kName[] = "GatherScaledRows";
  MOE_RETURN_IF_ERROR(CheckGather(kName, in, source_row, out));
  MOE_RETURN_IF_ERROR(CheckLength(kName, "scale", scale.size(), out.rows()));
  return RunOp(kName, permute::Gather<T>{in, source_row.data(), scale.data(), out}, stream);
}

template <typename T>
absl::Status GatherRowsOfMany(absl::Span<const MatrixView<const T>> in,
                              absl::Span<const int32_t> source_view,
                              absl::Span<const int32_t> source_row, absl::Span<const float> scale,
                              MatrixView<T> out, Stream& stream) {
  constexpr char kName[] = "GatherRowsOfMany";
  if (in.empty()) return absl::InvalidArgumentError("GatherRowsOfMany: no source, expected >= 1");
  for (const MatrixView<const T>& view : in) {
    MOE_RETURN_IF_ERROR(CheckGather(kName, view, source_row, out));
  }
  MOE_RETURN_IF_ERROR(CheckLength(kName, "source_view", source_view.size(), out.rows()));
  if (!scale.empty()) MOE_RETURN_IF_ERROR(CheckLength(kName, "scale", scale.size(), out.rows()));
  const permute::GatherOfMany<T> gather = {.views = in.data(),
                                           .view_count = static_cast<int64_t>(in.size()),
                                           .source_view = source_view.data(),
                                           .source_row = source_row.data(),
                                           .scale = scale.empty() ? nullptr : scale.data(),
                                           .out = out};
  if (IsCuda(stream)) {
    return LaunchOn(kName, stream, [&](auto cuda) { return permute::Run(gather, cuda); });
  }
  // The views travel into the task, since a span of them would not live.
  const absl::InlinedVector<MatrixView<const T>, 8> views(in.begin(), in.end());
  return stream.Enqueue([views, gather, &threads = stream.threads()] {
    permute::GatherOfMany<T> kept = gather;
    kept.views = views.data();
    permute::Run(kept, threads);
    return absl::OkStatus();
  });
}

#define MOE_INSTANTIATE(T)                                                                        \
  template void permute::Reference(const permute::GatherOfMany<T>&);                              \
  template absl::Status GatherRows<T>(MatrixView<const T>, absl::Span<const int32_t>,             \
                                      MatrixView<T>, Stream&);                                    \
  template absl::Status GatherScaledRows<T>(MatrixView<const T>, absl::Span<const int32_t>,       \
                                            absl::Span<const float>, MatrixView<T>, Stream&);     \
  template absl::Status GatherRowsOfMany<T>(absl::Span<const MatrixView<const T>>,                \
                                            absl::Span<const int32_t>, absl::Span<const int32_t>, \
                                            absl::Span<const float>, MatrixView<T>, Stream&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
