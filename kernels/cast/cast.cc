#include "kernels/cast/cast.h"

#include <algorithm>

#include "kernels/base/cuda_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/simd_targets.h"
#include "kernels/base/status_macros.h"
#include "kernels/cast/cast_cuda.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cast/cast.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

template <typename From, typename To>
HWY_INLINE void Convert(const From* in, To* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) StoreLanes(LoadLanes(in + i), out + i);
  if (i < n) StoreFirst(LoadFirst(in + i, n - i), out + i, n - i);
}

void NarrowBF16(const float* in, BFloat16* out, int64_t n) {
  Convert(in, out, n);
}
void NarrowF16(const float* in, Float16* out, int64_t n) {
  Convert(in, out, n);
}
void WidenBF16(const BFloat16* in, float* out, int64_t n) {
  Convert(in, out, n);
}
void WidenF16(const Float16* in, float* out, int64_t n) {
  Convert(in, out, n);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(NarrowBF16);
HWY_EXPORT(NarrowF16);
HWY_EXPORT(WidenBF16);
HWY_EXPORT(WidenF16);

namespace {

constexpr int64_t kGrain = int64_t{1} << 15;  // elements: a fork costs about as much as 4000

void CastRange(const float* in, BFloat16* out, int64_t n) {
  HWY_DYNAMIC_DISPATCH(NarrowBF16)(in, out, n);
}
void CastRange(const float* in, Float16* out, int64_t n) {
  HWY_DYNAMIC_DISPATCH(NarrowF16)(in, out, n);
}
void CastRange(const BFloat16* in, float* out, int64_t n) {
  HWY_DYNAMIC_DISPATCH(WidenBF16)(in, out, n);
}
void CastRange(const Float16* in, float* out, int64_t n) {
  HWY_DYNAMIC_DISPATCH(WidenF16)(in, out, n);
}
void CastRange(const float* in, float* out, int64_t n) {
  std::copy_n(in, n, out);
}

}  // namespace

template <typename From, typename To>
absl::Status Cast(absl::Span<const From> in, absl::Span<To> out, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckLength("Cast", "out", out.size(), static_cast<int64_t>(in.size())));
  if (IsCuda(stream)) {
    return LaunchOn("Cast", stream, [&](auto cuda) {
      return cast::Run(in.data(), out.data(), static_cast<int64_t>(in.size()), cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([in, out, &threads] {
    threads.For(static_cast<int64_t>(in.size()), kGrain, [&](int64_t begin, int64_t end) {
      CastRange(in.data() + begin, out.data() + begin, end - begin);
    });
    return absl::OkStatus();
  });
}

template absl::Status Cast(absl::Span<const float>, absl::Span<BFloat16>, Stream&);
template absl::Status Cast(absl::Span<const float>, absl::Span<Float16>, Stream&);
template absl::Status Cast(absl::Span<const BFloat16>, absl::Span<float>, Stream&);
template absl::Status Cast(absl::Span<const Float16>, absl::Span<float>, Stream&);
template absl::Status Cast(absl::Span<const float>, absl::Span<float>, Stream&);

}  // namespace moe
#endif  // HWY_ONCE
