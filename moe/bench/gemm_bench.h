// The grouped products of an expert layer against the float32 peak of the cores they run on.
#ifndef MOE_MOE_BENCH_GEMM_BENCH_H_
#define MOE_MOE_BENCH_GEMM_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "kernels/base/dtype.h"
#include "kernels/base/parallel.h"
#include "moe/bench/routing_spec.h"
#include "moe/bench/statistics.h"
#include "moe/bench/tables.h"

namespace moe::bench {

struct GemmSpec {
  DType dtype = DType::kFloat32;  // f32 or bf16
  int64_t tokens = 1024;          // T
  int top_k = 2;                  // K: T * K rows in all
  int num_experts = 8;            // E
  int64_t hidden = 512;           // H
  int64_t ffn = 512;              // F
  RoutingSpec routing;            // uniform, zipf or hot_expert: rows per expert
  uint64_t seed = 0;
};

struct GemmOptions {
  int iterations = 20;  // timed calls of each product, at least
  int warmup = 2;
  absl::Duration budget = absl::Seconds(1);  // ends the calls past `iterations`
  double max_noise_pct = 5;                  // so does a cv of at most this
};

// One product of N = T * K rows: forward x W^T, input gradient dy W, weight gradient dy^T x, each
// 2 N H F floating-point operations.
struct GemmRow {
  std::string product;  // "forward", "input_grad", "weight_grad"
  GemmSpec spec;
  int threads = 1;
  int64_t rows = 0, largest_rows = 0;  // N; of the busiest expert
  Statistics time_us;
  int64_t iterations = 0;
  double gflops_per_s = 0;  // of the median time
  double peak_gflops_per_s =
      0;                // of the same threads, median; a loop of multiply-adds in registers
  double peak_pct = 0;  // median over calls of the ratio to the peak measured just before
  int64_t wrong = 0;    // sampled elements whose bits differ from a chain of std::fma
};

// Rows of each expert, [E], in sum T * K; as the tokens of traffic.h are drawn.
// kInvalidArgument for routings of ranks (hot_rank, ragged, zero_rank, matrix).
absl::StatusOr<std::vector<int64_t>> ExpertRows(const GemmSpec& spec);

// The three products. The peak is measured before every call, so that both see the same clock and
// the same neighbours.
absl::StatusOr<std::vector<GemmRow>> MeasureGemm(const GemmSpec& spec, const GemmOptions& options,
                                                 ThreadPool& threads);

// Keys and values as in bench_row.h:
//   schema, op, product, dtype, tokens, topk, experts, hidden, ffn, routing, seed, threads, rows,
//   largest_rows, iters, time_us (median), time_us_min, time_us_max, time_us_p99, time_us_cv_pct,
//   gflops_per_s, peak_gflops_per_s, peak_pct, nwrong, status, error
const std::vector<std::string>& GemmKeys();
std::vector<Cell> GemmCells(const GemmRow& row);

// The table that people read.
std::string GemmHead();
std::string GemmLine(const GemmRow& row);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_GEMM_BENCH_H_
