// Checksums: XXH3 of Collet's xxHash, 64 bits, with the widest instructions of this CPU.
#ifndef MOE_KERNELS_BASE_XXH3_H_
#define MOE_KERNELS_BASE_XXH3_H_

#include <cstddef>
#include <cstdint>

namespace moe {

uint64_t Xxh3(const void* data, size_t bytes, uint64_t seed = 0);

#ifdef __x86_64__
// Internal: for CPUs with AVX2, 1.5 to 1.7 times as fast as what all x86-64 have.
uint64_t Xxh3Avx2(const void* data, size_t bytes, uint64_t seed);
#endif

}  // namespace moe

#endif  // MOE_KERNELS_BASE_XXH3_H_
