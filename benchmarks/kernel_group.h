// Kernels of a layer, each alone on one process, for kernel_bench.
#ifndef MOE_BENCHMARKS_KERNEL_GROUP_H_
#define MOE_BENCHMARKS_KERNEL_GROUP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "benchmarks/kernel_device.h"
#include "gating/router_config.h"
#include "kernels/base/dtype.h"
#include "kernels/grouped_gemm/gemm_options.h"
#include "moe/cli/measure/routing_spec.h"

namespace moe::measure {

// T tokens with K slots each, on E experts: S = T K slots, each of which is a row of an expert.
struct KernelShape {
  DType dtype = DType::kFloat32;             // type of rows: f32, bf16 or f16; gate: of logits
  int64_t tokens = 1024;                     // T
  int64_t hidden = 512;                      // H
  int64_t ffn = 512;                         // F
  RouterConfig router = {.num_experts = 8};  // E and K; gate: everything except capacity and losses
  RoutingSpec routing;                       // uniform, zipf or hot_expert
  int leaves = 1;                            // leaves of products: see GemmTree
  BFloat16Order order = BFloat16Order::kDot;  // of products of bf16
  uint64_t seed = 0;

  SlotOptions slots() const {
    return {
        .tokens = tokens, .top_k = router.top_k, .num_experts = router.num_experts, .seed = seed};
  }
};

// A limit of a kernel, measured just before its calls on the same threads or device, so that clock
// frequency and other programs affect both alike.
struct KernelLimit {
  const char* name;  // "copy"
  const char* unit;  // unit of `measure`: "gbytes_per_s"
  double work = 0;   // the kernel's work in the limit's units: bytes, or floating-point operations
  std::function<absl::StatusOr<double>()> measure;  // work per ns
};

struct Kernel {
  std::string name;
  std::function<absl::Status()> run;  // enqueues one call
  std::vector<KernelLimit> limits;    // the first one's unit is that of the kernel's speed
};

// Kernels and the data that they share.
class KernelGroup {
 public:
  virtual ~KernelGroup() = default;
  absl::Span<const Kernel> kernels() const { return kernels_; }

 protected:
  std::vector<Kernel> kernels_;
};
using MadeKernels = absl::StatusOr<std::unique_ptr<KernelGroup>>;

// The limit of memory: a copy, which reads half of the bytes and writes half. On a CPU by all
// threads, once through the caches and once bypassing them: kernels that read more than they write
// may be faster than the former. The device must outlive it.
class CopyLimit {
 public:
  explicit CopyLimit(KernelDevice& device) : device_(device) {}

  // Allocates memory for kernels of `bytes`.
  absl::Status Reserve(double bytes);
  KernelLimit Of(double bytes);

 private:
  absl::StatusOr<double> Measure(int64_t bytes);

  KernelDevice& device_;
  Buffer from_, to_;
};

// Bytes of a call: each byte of the arguments once, however often it is read, and each byte of the
// result once; the traffic that no cache can avoid. T' tokens with a slot, N rows, b =
// SizeOf(dtype), Q sets of logits (noisy-topk: 2, others 1).

// Logits [T, Q E] to slots, weights and counts by a gate of gating/, and backward; without the
// product that computes the logits and without capacity.
//   forward   4 Q T E + 4 T E + 8 S + 8 (T + 1) + 4 T + 8 E
//             (logits; scores; ids and weights; offsets; log-sum-exp; counts)
//   backward  4 T E + 9 S + 8 (T + 1) + 4 Q T E
// On a GPU, for gates that choose the largest logits, also the parts that inference needs of them;
// logits in 16 bits have these two alone.
//   select    T E b + 8 S + 8 E              (logits; ids and weights; counts)
//   plan      12 S + 16 (E + 1) + 4 E        (ids; both maps of slots and rows; first rows of
//             experts and segments; counts)
MadeKernels MakeGateKernels(const KernelShape& shape, KernelDevice& device);
MadeKernels MakeSelectKernels(const KernelShape& shape, KernelDevice& device);
bool SelectsByLogits(const RouterConfig& router);  // have select and plan on a GPU

// permute: tokens [T, H] to rows [N, H] grouped by expert, and the sum of a token's rows.
//   gather       (T' + N) H b + 4 (N + S) + 8 (T + 1)
//   sum          (N + T) H b + 4 S + 8 (T + 1)
// combine: rows to tokens, weighted, in choice order; weight * dy as rows, and the gradient of the
// weights.
//   combine      (N + T) H b + 8 S + 8 (T + 1)
//   scale        (T' + N) H b + 4 N + 8 S + 8 (T + 1)
//   weight_grad  (N + T') H b + 8 S + 8 (T + 1)
MadeKernels MakePermuteKernels(const KernelShape& shape, KernelDevice& device);
MadeKernels MakeCombineKernels(const KernelShape& shape, KernelDevice& device);

// The grouped products of N rows: forward x W^T, input_grad dy W, weight_grad dy^T x in float32 and
// weight_grad_exact in exact sums, of 2 N H F operations each; on a CPU also pack, and
// packed_forward, whose weights are packed already.
MadeKernels MakeGemmKernels(const KernelShape& shape, KernelDevice& device);

}  // namespace moe::measure

#endif  // MOE_BENCHMARKS_KERNEL_GROUP_H_
