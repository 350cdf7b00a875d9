// Sums along a row in an order that is fixed by the row's length alone.
#ifndef MOE_KERNELS_BASE_FIXED_DOT_H_
#define MOE_KERNELS_BASE_FIXED_DOT_H_

#include <cstdint>

#include "kernels/base/dtype.h"

namespace moe {

// sum_i a[i] * b[i] in float32: 16 interleaved partial sums (element i goes to partial i mod 16,
// ascending, fused multiply-add), folded pairwise (8 + 8, 4 + 4, 2 + 2, 1 + 1). `a` and `b` may be
// the same row; 0 elements give 0. The bits are those of this order on every SIMD target with fused
// multiply-add (AVX2, AVX-512, NEON); the fallback without one rounds twice.
// Instantiated for float, BFloat16 and Float16.
template <typename T>
float FixedDot(const T* a, const T* b, int64_t n);

// The same sum in float64, where products are exact: 16 interleaved partial sums, folded alike. For
// sums that cancel. The same bits on every SIMD target, with or without fused multiply-add.
template <typename T>
double WideDot(const T* a, const T* b, int64_t n);

// sum_i a[i] in float32, in the order of FixedDot.
template <typename T>
float FixedSum(const T* a, int64_t n);

// sum_i term(i) of any float64 terms, in the order of WideDot.
template <typename Term>
double WideSum(int64_t n, Term term) {
  constexpr int64_t kPartials = 16;
  double partial[kPartials] = {};
  const int64_t body = n - n % kPartials;
  for (int64_t i = 0; i < body; i += kPartials) {
    for (int64_t j = 0; j < kPartials; ++j) partial[j] += term(i + j);
  }
  for (int64_t i = body; i < n; ++i) partial[i - body] += term(i);
  for (int64_t half = kPartials / 2; half >= 1; half /= 2) {
    for (int64_t j = 0; j < half; ++j) partial[j] += partial[j + half];
  }
  return partial[0];
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_FIXED_DOT_H_
