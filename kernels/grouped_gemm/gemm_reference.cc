#include <cmath>

#include "kernels/grouped_gemm/gemm_problem.h"

namespace moe::gemm {

template <typename T, typename TOut>
void Reference(const Problem<T, TOut>& problem) {
  const auto& [a, b, c, a_layout, b_layout, write, exact] = problem;
  const auto b_at = [&](int64_t k, int64_t j) {
    if (b_layout == Layout::kPlain) return b(k, j);
    if (b_layout == Layout::kTransposed) return b(j, k);
    return b(j / b.cols() * problem.depth() + k, j % b.cols());
  };
  for (int64_t i = 0; i < c.rows(); ++i) {
    for (int64_t j = 0; j < c.cols(); ++j) {
      float sum = write == Write::kAdd ? static_cast<float>(c(i, j)) : 0.0f;
      for (int64_t k = 0; k < problem.depth(); ++k) {
        const T x = a_layout == Layout::kPlain ? a(i, k) : a(k, i);
        const T y = b_at(k, j);
        sum = std::fma(static_cast<float>(x), static_cast<float>(y), sum);
      }
      c(i, j) = static_cast<TOut>(sum);
    }
  }
}

template void Reference(const Problem<float, float>&);
template void Reference(const Problem<BFloat16, BFloat16>&);
template void Reference(const Problem<BFloat16, float>&);
template void Reference(const Problem<Float16, Float16>&);
template void Reference(const Problem<Float16, float>&);

}  // namespace moe::gemm
