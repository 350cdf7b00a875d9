// The kernels of a layer alone, on one rank: gate, permute, combine, and the experts' products.
#ifndef MOE_MOE_CLI_BENCH_KERNEL_BENCH_H_
#define MOE_MOE_CLI_BENCH_KERNEL_BENCH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/router_config.h"
#include "kernels/base/dtype.h"
#include "moe/cli/bench/collectives.h"
#include "moe/cli/bench/kernel_device.h"
#include "moe/cli/bench/routing_spec.h"
#include "moe/cli/bench/tables.h"

namespace moe::bench {

// gate     logits [T, E] to slots, weights and counts, and back: a gate of gating/, without the
//          product that makes the logits and without capacity
// permute  tokens [T, H] to rows [N, H] grouped by expert; backward: the sum of a token's rows
// combine  rows [N, H] to tokens [T, H], weighted, in choice order; backward: weight * dy as rows,
//          and the gradient of the weights
// gemm     the grouped products of N rows: forward x W^T, input gradient dy W, weight gradient
//          dy^T x, each 2 N H F floating-point operations
enum class KernelOp : uint8_t { kGate, kPermute, kCombine, kGemm };
const char* NameOf(KernelOp op);

struct KernelSpec {
  KernelOp op = KernelOp::kGate;
  DType dtype = DType::kFloat32;  // of rows: f32, bf16 or f16; gate: on the CPU f32 alone
  int64_t tokens = 1024;          // T; a trace has its own
  int64_t hidden = 512;           // H
  int64_t ffn = 512;              // F; of gemm alone
  // num_experts and top_k; gate: all of it but capacity and losses. hidden_size is not read.
  RouterConfig router = {.num_experts = 8};
  RoutingSpec routing;  // uniform, zipf, hot_expert or trace (of one rank)
  uint64_t seed = 0;
};

// Bytes of a call: each byte of the arguments once, however often it is read, and each byte of the
// result once; what a cache cannot save. S slots, N rows, T' tokens with a slot, b = SizeOf(dtype),
// Q logit sets (1 but for noisy-topk):
//   gate     forward   4 Q T E + 4 T E + 8 S + 8 (T + 1) + 4 T + 8 E
//                      (logits; scores; ids and weights; offsets; log-sum-exp; counts)
//   gate     select    T E b + 8 S + 8 E                    (logits; ids and weights; counts)
//   gate     plan      12 S + 8 (E + 1) + 4 E  (ids; both maps of slots and rows;
//                      first rows; counts)
//   gate     backward  4 T E + 9 S + 8 (T + 1) + 4 Q T E
//   permute  gather    (T' + N) H b + 4 N
//   permute  sum       (N + T) H b + 4 S + 8 (T + 1)
//   combine  combine   (N + T) H b + 8 S + 8 (T + 1)
//   combine  scale     (T' + N) H b + 8 N
//   combine  weight_grad  (N + T') H b + 8 S + 8 (T + 1)
struct KernelRow {
  std::string pass;    // "forward", "backward"; gemm: empty
  std::string kernel;  // as above; gate: "gate", on a GPU "select" and "plan" too
                       // gemm: "forward", "input_grad", "weight_grad"
  KernelSpec spec;
  Place place;
  int64_t slots = 0, largest_rows = 0;  // S; of the busiest expert; the most of a trace's records
  int64_t bytes = 0;                    // mean over calls; gemm: operations
  // GB/s against a copy on the same threads that reads and writes as many bytes in all. Checked
  // against results that are computed apart: rows exactly, a gate's ids and counts exactly, its
  // weights and gradients in float64 within the rounding of a float32 softmax. Gates that do not
  // choose by the largest logits, or weigh in a way of their own, are not checked.
  // gemm: GFLOP/s against a loop in registers on the same threads, of multiply-adds or, for
  // bfloat16, of dot products where the CPU has them; on a GPU against one dense product by cuBLAS,
  // unless it is missing. Checked: sampled elements, which must have the bits of chains of
  // std::fma; tensor cores' are within what the order of their sums leaves open.
  KernelTimes times;
};

// kInvalidArgument   a type, gate or routing that the kernel does not have
absl::StatusOr<std::vector<KernelRow>> MeasureKernels(const KernelSpec& spec,
                                                      const MeasureOptions& options,
                                                      KernelDevice& device);

// Keys as docs/bench.md lists them.
Fields KernelFields(const KernelRow& row);
absl::Span<const Column> KernelColumns(KernelOp op);

// Of `call`: slots of one rank, in token order, K experts that differ for each token; and how many
// each expert has, [E]. A trace: of the record that `call` replays. kInvalidArgument for routings
// of ranks (hot_rank, ragged, zero_rank, matrix, a trace of several) and for K not in 1 .. E.
absl::StatusOr<TokenSlots> KernelSlots(const KernelSpec& spec, int64_t call);
absl::StatusOr<std::vector<int64_t>> ExpertRows(const KernelSpec& spec, int64_t call);

absl::StatusOr<std::unique_ptr<KernelCases>> MakeGateCases(const KernelSpec& spec,
                                                           KernelDevice& device);
// On a GPU, for gates that select by logits: what inference needs of them. kInvalidArgument for
// other gates and for sizes that the kernels are not compiled for.
absl::StatusOr<std::unique_ptr<KernelCases>> MakeSelectCases(const KernelSpec& spec,
                                                             KernelDevice& device);
absl::StatusOr<std::unique_ptr<KernelCases>> MakeRowCases(const KernelSpec& spec,
                                                          KernelDevice& device);
// The three products, over data that they share; and what bounds those of `rows` rows.
absl::StatusOr<std::unique_ptr<KernelCases>> MakeGemmCases(const KernelSpec& spec,
                                                           KernelDevice& device);
absl::StatusOr<KernelLimit> GemmLimit(const KernelSpec& spec, int64_t rows, KernelDevice& device);

}  // namespace moe::bench

#endif  // MOE_MOE_CLI_BENCH_KERNEL_BENCH_H_
