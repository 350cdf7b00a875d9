#include "kernels/base/xxh3.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace moe {

uint64_t Xxh3(const void* data, size_t bytes, uint64_t seed) {
#ifdef __x86_64__
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return Xxh3Avx2(data, bytes, seed);
#endif
  return XXH3_64bits_withSeed(data, bytes, seed);
}

}  // namespace moe
