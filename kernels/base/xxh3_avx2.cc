#include "kernels/base/xxh3.h"

#ifdef __x86_64__

#include <cstdlib>
#include <cstring>

#include <immintrin.h>

// Compiles every function of xxhash.h for AVX2. The headers that it includes come above, so that
// they are not affected.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define XXH_INLINE_ALL
#define XXH_VECTOR XXH_AVX2
#include <xxhash.h>

namespace moe {

uint64_t Xxh3Avx2(const void* data, size_t bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

}  // namespace moe

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
