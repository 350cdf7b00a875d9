// A whole MoE layer, forward and backward, by phase.
#ifndef MOE_MOE_BENCH_LAYER_BENCH_H_
#define MOE_MOE_BENCH_LAYER_BENCH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "dispatch/dispatcher.h"
#include "kernels/base/dtype.h"
#include "moe/bench/collectives.h"
#include "moe/bench/statistics.h"
#include "moe/bench/tables.h"

namespace moe::bench {

struct LayerSpec {
  DType dtype = DType::kFloat32;  // f32 or bf16
  int64_t tokens = 1024;          // T of each rank
  int top_k = 2;
  int num_experts = 8;  // E over all ranks
  int64_t hidden = 512;
  int64_t ffn = 512;
  uint64_t seed = 0;  // of tokens and weights
  DispatcherOptions dispatcher;
  int threads = 1;  // of each rank
};

// A phase of a pass: gate, plan, dispatch, expert, combine; "all" is the pass by the clock on the
// wall, with what stands between the phases.
struct LayerRow {
  std::string pass;   // "forward", "backward"
  std::string phase;  // as above
  LayerSpec spec;
  std::string backend;
  int ranks = 1;
  int64_t iterations = 0;
  Statistics time_us;       // over calls, of the slowest rank in this phase
  double share_pct = 0;     // mean over ranks and calls of this phase / of the pass
  double gflops_per_s = 0;  // expert: of all ranks, by the median; NaN elsewhere
  int64_t wrong = 0;  // elements of y (forward) or dx (backward), over ranks and timed calls, that
                      // differ from those of the first call, bit for bit
};

// Random tokens and weights, mixtral's gate, SwiGLU experts, expert-parallel over all of `world`; a
// pass starts at a barrier. Gradients are made, not reduced. options.check is not looked at: results
// of a layer have no closed form, so calls are compared with each other (moe verify compares with a
// reference). Collective; takes `world`; the same rows on every rank.
//
// Floating-point operations of the expert phase: 6 N H F forward (three products) and 12 N H F
// backward, N = T K ranks.
//   kInvalidArgument   a type or shape that the layer refuses
absl::StatusOr<std::vector<LayerRow>> MeasureLayer(const LayerSpec& spec,
                                                   const MeasureOptions& options,
                                                   std::unique_ptr<Communicator> world);

// Keys and values as in bench_row.h:
//   schema, op, pass, phase, dtype, tokens, topk, experts, hidden, ffn, seed, dispatch, backend,
//   ranks, threads, iters, time_us (median), time_us_min, time_us_max, time_us_p99, time_us_cv_pct,
//   share_pct, gflops_per_s, nwrong, status, error
const std::vector<std::string>& LayerKeys();
std::vector<Cell> LayerCells(const LayerRow& row);

std::string LayerHead();
std::string LayerLine(const LayerRow& row);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_LAYER_BENCH_H_
