// Grouped products by cblas_sgemm, one expert after the other, for benchmarks/gemm_table.py.
#include <cblas.h>

#include "benchmarks/peers/cpu/gemm_peer.h"

int main() {
  return moe::peers::Serve([](moe::peers::Problem& p) -> std::function<void()> {
    if (p.bf16) return nullptr;  // not every build has cblas_sbgemm
    return [&p] {
      const auto m = static_cast<blasint>(p.m), n = static_cast<blasint>(p.n);
      const auto k = static_cast<blasint>(p.k);
      for (int64_t e = 0; e < p.experts; ++e) {
        cblas_sgemm(CblasRowMajor, p.a_transposed ? CblasTrans : CblasNoTrans,
                    p.b_transposed ? CblasTrans : CblasNoTrans, m, n, k, 1, &p.a[e * p.m * p.k],
                    p.a_transposed ? m : k, &p.b[e * p.k * p.n], p.b_transposed ? k : n, 0,
                    &p.c[e * p.m * p.n], n);
      }
    };
  });
}
