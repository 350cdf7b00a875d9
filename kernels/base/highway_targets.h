// Which SIMD targets Highway compiles the operations for. Include it before <hwy/foreach_target.h>.
#ifndef MOE_KERNELS_BASE_HIGHWAY_TARGETS_H_
#define MOE_KERNELS_BASE_HIGHWAY_TARGETS_H_

// AVX2 and AVX-512 beside the baseline: every target costs compile time. SVE and RVV have vectors
// of unknown size, which arrays of lanes cannot hold.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#endif  // MOE_KERNELS_BASE_HIGHWAY_TARGETS_H_
