#include "kernels/partial_sum/partial_sum.h"

#include <cstdint>

#include "kernels/base/cuda_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/partial_sum/partial_sum_cpu.h"
#include "kernels/partial_sum/partial_sum_cuda.h"

namespace moe {
namespace {

constexpr int64_t kGrain = int64_t{1} << 15;  // elements: a fork costs about as much as 4000

// Integers are added without their signs: those wrap around, where others would be undefined.
template <typename T>
using Added = std::conditional_t<std::is_same_v<T, int64_t>, uint64_t, T>;

}  // namespace

template <typename T>
absl::Status AddPartial(absl::Span<const std::type_identity_t<T>> partial, absl::Span<T> acc,
                        Stream& stream) {
  const auto n = static_cast<int64_t>(acc.size());
  MOE_RETURN_IF_ERROR(CheckLength("AddPartial", "partial", partial.size(), n));
  const auto* const from = reinterpret_cast<const Added<T>*>(partial.data());
  auto* const to = reinterpret_cast<Added<T>*>(acc.data());
  if (IsCuda(stream)) {
    return LaunchOn("AddPartial", stream,
                    [&](auto cuda) { return partial_sum::Run(from, to, n, cuda); });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(n, kGrain, [&](int64_t begin, int64_t end) {
      AddPartialRange(from + begin, to + begin, end - begin);
    });
    return absl::OkStatus();
  });
}

template absl::Status AddPartial(absl::Span<const float>, absl::Span<float>, Stream&);
template absl::Status AddPartial(absl::Span<const int64_t>, absl::Span<int64_t>, Stream&);

}  // namespace moe
