// The grouped products of an expert layer against the float32 peak of the cores they run on.
#ifndef MOE_MOE_CLI_BENCH_GEMM_BENCH_H_
#define MOE_MOE_CLI_BENCH_GEMM_BENCH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "moe/cli/bench/collectives.h"
#include "moe/cli/bench/kernel_device.h"
#include "moe/cli/bench/routing_spec.h"
#include "moe/cli/bench/tables.h"

namespace moe::bench {

struct GemmSpec {
  DType dtype = DType::kFloat32;  // f32, bf16 or f16
  int64_t tokens = 1024;          // T
  int top_k = 2;                  // K: T * K rows in all
  int num_experts = 8;            // E
  int64_t hidden = 512;           // H
  int64_t ffn = 512;              // F
  RoutingSpec routing;  // uniform, zipf, hot_expert or trace (of one rank): rows per expert
  uint64_t seed = 0;
};

// One product of N = T * K rows: forward x W^T, input gradient dy W, weight gradient dy^T x, each
// 2 N H F floating-point operations.
struct GemmRow {
  std::string product;  // "forward", "input_grad", "weight_grad"
  GemmSpec spec;
  Place place;
  int64_t rows = 0, largest_rows = 0;  // N; of the busiest expert; the most of a trace's records
  // Against a loop in registers on the same threads, of multiply-adds or, for bfloat16, of dot
  // products where the CPU has them; on a GPU against one dense product by cuBLAS, unless it is
  // missing. Checked: sampled elements, which must have the bits of a chain of std::fma; tensor
  // cores' are within what the order of their sums leaves open.
  KernelTimes times;
};

// Rows of each expert, [E], in sum T * K: the slots that DrawSlots gives a token, K experts that
// differ. A trace: the slots of the record that `call` replays. kInvalidArgument for routings of
// ranks (hot_rank, ragged, zero_rank, matrix, a trace of several ranks) and for K not in 1 .. E.
absl::StatusOr<std::vector<int64_t>> ExpertRows(const GemmSpec& spec, int64_t call);

// The three products, over data that they share.
absl::StatusOr<std::unique_ptr<KernelCases>> MakeGemmCases(const GemmSpec& spec,
                                                           KernelDevice& device);
absl::StatusOr<std::vector<GemmRow>> MeasureGemm(const GemmSpec& spec,
                                                 const MeasureOptions& options,
                                                 KernelDevice& device);

// Keys as docs/bench.md lists them.
Fields GemmFields(const GemmRow& row);
absl::Span<const Column> GemmColumns();

}  // namespace moe::bench

#endif  // MOE_MOE_CLI_BENCH_GEMM_BENCH_H_
