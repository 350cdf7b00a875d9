#include <algorithm>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/rotary_table.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/highway_targets.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/rotary.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

struct Pair {
  FloatLanes first, second;
};

HWY_INLINE Pair Rotate(Pair x, FloatLanes cosine, FloatLanes sine) {
  return {hn::Sub(hn::Mul(x.first, cosine), hn::Mul(x.second, sine)),
          hn::Add(hn::Mul(x.second, cosine), hn::Mul(x.first, sine))};
}

// Rotates pairs (d, d + half) of all heads of one row by the table's row of its position.
template <typename T>
void RotateRow(const float* cosine, const float* sine, float direction, int64_t half, int heads,
               T* x) {
  const auto sign = hn::Set(FloatTag(), direction);
  for (int head = 0; head < heads; ++head, x += 2 * half) {
    ForLanes(half, [&](int64_t d, auto lanes) MOE_LANES {
      const Pair y = Rotate({lanes.Load(x + d), lanes.Load(x + half + d)}, lanes.Load(cosine + d),
                            hn::Mul(sign, lanes.Load(sine + d)));
      lanes.Store(y.first, x + d);
      lanes.Store(y.second, x + half + d);
    });
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

namespace {

template <typename T>
absl::Status ApplyOnCuda(const AttentionShape& shape, float base, RotaryDirection direction,
                         MatrixView<T> x, Workspace& workspace, Stream& stream) {
  if (x.rows() == 0) return absl::OkStatus();  // no rows: neither table nor offsets are needed
  if (shape.first_position != 0) {
    return absl::UnimplementedError("ApplyRotary: first_position on a CUDA device, expected 0");
  }
  MOE_ASSIGN_OR_RETURN(
      const RotaryTable* const table,
      RotaryTable::For(base, x.cols() / shape.heads / 2, shape.LongestSequence(), stream.device()));
  MOE_ASSIGN_OR_RETURN(const auto offsets, UploadArray(shape.sequence_offsets, workspace, stream));
  return LaunchOn("ApplyRotary", stream, [&](auto cuda) {
    return attention::Run(
        attention::CudaRotary<T>{
            .x = x,
            .heads = shape.heads,
            .sequence_offsets = offsets.data(),
            .sequences = static_cast<int64_t>(shape.sequence_offsets.size()) - 1,
            .cosine = table->cosine(),
            .sine = table->sine(),
            .direction = static_cast<float>(direction)},
        cuda);
  });
}

}  // namespace

template <typename T>
absl::Status ApplyRotary(const AttentionShape& shape, float base, RotaryDirection direction,
                         MatrixView<T> x, Workspace& workspace, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckShape("ApplyRotary", "x", x, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(shape.Check("ApplyRotary", x.rows(), x.cols()));
  const int64_t depth = x.cols() / shape.heads;
  if (depth % 2 != 0 || !(base > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("ApplyRotary: head size ", depth, ", base ",
                                                   base, ", expected an even one and base > 0"));
  }
  if (IsCuda(stream)) return ApplyOnCuda(shape, base, direction, x, workspace, stream);
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads]() -> absl::Status {
    const absl::Span<const int64_t> offsets = shape.sequence_offsets;
    const int64_t half = depth / 2;
    MOE_ASSIGN_OR_RETURN(
        const RotaryTable* const table,
        RotaryTable::For(base, half, shape.first_position + shape.LongestSequence(), {}));
    threads.For(x.rows(), RowGrain(x.cols()), [&](int64_t begin, int64_t end) {
      // The sequence of row t starts at the last offset that is not above it.
      auto next = std::upper_bound(offsets.begin(), offsets.end(), begin);
      for (int64_t t = begin; t < end; ++t) {
        while (*next <= t) ++next;
        const int64_t at = (shape.first_position + t - *(next - 1)) * half;
        MOE_SIMD(RotateRow<T>)
        (table->cosine() + at, table->sine() + at, static_cast<float>(direction), half, shape.heads,
         x.row(t));
      }
    });
    return absl::OkStatus();
  });
}

MOE_INSTANTIATE_FOR_STORAGE(ApplyRotary)

}  // namespace moe
#endif  // HWY_ONCE
