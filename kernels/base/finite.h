// Counts values that are NaN or infinite, at the speed of memory where none is.
#ifndef MOE_KERNELS_BASE_FINITE_H_
#define MOE_KERNELS_BASE_FINITE_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace moe {

// Number of NaNs and infinities among the `count` values of type T at `values`, which need no
// alignment.
template <typename T = float>
int64_t CountNonFinite(const void* values, int64_t count) {
  // Signed, since SSE2 has no largest of unsigned numbers.
  using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int16_t>;
  constexpr int64_t kBlock = 128;  // fixed, so that compilers make vectors of it
  // Exponents of NaN and infinity are all ones: without their sign they are the largest.
  constexpr Bits kInfinity = std::bit_cast<Bits>(T(std::numeric_limits<float>::infinity()));
  const auto* const bytes = static_cast<const unsigned char*>(values);
  const auto magnitude = [&](int64_t i) {
    Bits bits;
    std::memcpy(&bits, bytes + i * int64_t{sizeof bits}, sizeof bits);
    return static_cast<Bits>(bits & std::numeric_limits<Bits>::max());
  };
  int64_t found = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    if (end - begin == kBlock) {
      Bits largest = 0;
      for (int64_t i = 0; i < kBlock; ++i) largest = std::max(largest, magnitude(begin + i));
      if (largest < kInfinity) continue;
    }
    for (int64_t i = begin; i < end; ++i) found += magnitude(i) >= kInfinity ? 1 : 0;
  }
  return found;
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_FINITE_H_
