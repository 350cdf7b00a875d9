#include "kernels/permute/permute.h"

#include <absl/container/inlined_vector.h>
#include <absl/strings/string_view.h>

#include "kernels/base/cuda_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/permute/permute_cpu.h"
#include "kernels/permute/permute_cuda.h"

namespace moe {
namespace permute {

template <typename T>
void Reference(const Gather<T>& gather) {
  for (int64_t i = 0; i < gather.out.rows(); ++i) {
    const int32_t view = gather.source_view.empty() ? 0 : gather.source_view[i];
    const int32_t row = gather.source_row[i];
    for (int64_t h = 0; h < gather.out.cols(); ++h) {
      T value = T(0.0f);
      if (row >= 0) value = gather.in[view](row, h);
      if (row >= 0 && !gather.scale.empty()) {
        value = T(gather.scale[i] * static_cast<float>(value));
      }
      gather.out(i, h) = value;
    }
  }
}

template void Reference<float>(const Gather<float>&);
template void Reference<BFloat16>(const Gather<BFloat16>&);
template void Reference<Float16>(const Gather<Float16>&);

}  // namespace permute

namespace {

template <typename T>
absl::Status CheckGather(absl::string_view function, MatrixView<const T> in,
                         absl::Span<const int32_t> source_row, MatrixView<T> out) {
  MOE_RETURN_IF_ERROR(CheckShape(function, "in", in, in.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(function, "out", out, out.rows(), out.cols()));
  return CheckLength(function, "source_row", source_row.size(), out.rows());
}

// One source: the view itself travels into the task, since a span of it would not live.
template <typename T>
absl::Status EnqueueGather(absl::string_view function, MatrixView<const T> in,
                           absl::Span<const int32_t> source_row, absl::Span<const float> scale,
                           MatrixView<T> out, Stream& stream) {
  if (IsCuda(stream)) {
    return LaunchOn(function, stream, [&](auto cuda) {
      return permute::Run(
          permute::CudaGather<T>{
              .in = in, .source_row = source_row.data(), .scale = scale.data(), .out = out},
          cuda);
    });
  }
  return stream.Enqueue([=, &threads = stream.threads()] {
    const absl::Span<const MatrixView<const T>> one(&in, 1);
    permute::Run<T>({one, {}, source_row, scale, out}, threads);
    return absl::OkStatus();
  });
}

}  // namespace

template <typename T>
absl::Status GatherRows(MatrixView<const T> in, absl::Span<const int32_t> source_row,
                        MatrixView<T> out, Stream& stream) {
  constexpr char kName[] = "GatherRows";
  MOE_RETURN_IF_ERROR(CheckGather(kName, in, source_row, out));
  return EnqueueGather<T>(kName, in, source_row, {}, out, stream);
}

template <typename T>
absl::Status GatherScaledRows(MatrixView<const T> in, absl::Span<const int32_t> source_row,
                              absl::Span<const float> scale, MatrixView<T> out, Stream& stream) {
  constexpr char kName[] = "GatherScaledRows";
  MOE_RETURN_IF_ERROR(CheckGather(kName, in, source_row, out));
  MOE_RETURN_IF_ERROR(CheckLength(kName, "scale", scale.size(), out.rows()));
  return EnqueueGather<T>(kName, in, source_row, scale, out, stream);
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
  if (IsCuda(stream)) {
    return LaunchOn(kName, stream, [&](auto cuda) {
      return permute::Run(
          permute::CudaGatherOfMany<T>{.views = in.data(),
                                       .view_count = static_cast<int64_t>(in.size()),
                                       .source_view = source_view.data(),
                                       .source_row = source_row.data(),
                                       .scale = scale.empty() ? nullptr : scale.data(),
                                       .out = out},
          cuda);
    });
  }
  const absl::InlinedVector<MatrixView<const T>, 8> views(in.begin(), in.end());
  return stream.Enqueue([=, &threads = stream.threads()] {
    permute::Run<T>({views, source_view, source_row, scale, out}, threads);
    return absl::OkStatus();
  });
}

#define MOE_INSTANTIATE(T)                                                                        \
  template absl::Status GatherRows<T>(MatrixView<const T>, absl::Span<const int32_t>,             \
                                      MatrixView<T>, Stream&);                                    \
  template absl::Status GatherScaledRows<T>(MatrixView<const T>, absl::Span<const int32_t>,       \
                                            absl::Span<const float>, MatrixView<T>, Stream&);     \
  template absl::Status GatherRowsOfMany<T>(absl::Span<const MatrixView<const T>>,                \
                                            absl::Span<const int32_t>, absl::Span<const int32_t>, \
                                            absl::Span<const float>, MatrixView<T>, Stream&);
MOE_INSTANTIATE(float)
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe
