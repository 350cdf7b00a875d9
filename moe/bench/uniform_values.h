// Random operands: their bits cost what a model's do, where zeros would run faster.
#ifndef MOE_MOE_BENCH_UNIFORM_VALUES_H_
#define MOE_MOE_BENCH_UNIFORM_VALUES_H_

#include <algorithm>
#include <cstdint>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "moe/bench/kernel_device.h"

namespace moe::bench {

// `count` values in [-1, 1], by `seed` and `which` array it is, on host and device.
template <typename T>
absl::StatusOr<Mirrored<T>> UniformValues(int64_t count, uint64_t seed, uint32_t which,
                                          const KernelDevice& device, absl::string_view name) {
  constexpr int64_t kGrain = 1 << 14;
  MOE_ASSIGN_OR_RETURN(Mirrored<T> array, Mirrored<T>::Allocate(count, device, name));
  const absl::Span<T> values = array.host();
  device.threads().For((count + 3) / 4, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = 4 * begin; i < std::min(4 * end, count); i += 4) {
      const auto four = Random4({.seed = seed,
                                 .purpose = RandomPurpose::kData,
                                 .layer = which,
                                 .item = static_cast<uint64_t>(i)});
      for (int64_t j = i; j < std::min(i + 4, count); ++j) {
        values[j] = T(static_cast<float>(four[j - i]) * 0x1p-31f - 1);
      }
    }
  });
  MOE_RETURN_IF_ERROR(array.Upload());
  return array;
}

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_UNIFORM_VALUES_H_
