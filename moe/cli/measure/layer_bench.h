// A whole MoE layer, forward and backward, by phase.
#ifndef MOE_MOE_CLI_MEASURE_LAYER_BENCH_H_
#define MOE_MOE_CLI_MEASURE_LAYER_BENCH_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/dtype.h"
#include "moe/cli/measure/collectives.h"
#include "moe/cli/measure/routing_spec.h"
#include "moe/cli/measure/statistics.h"
#include "moe/cli/measure/tables.h"
#include "moe/layer/moe_layer.h"
#include "moe/train/trainer.h"

namespace moe::measure {

struct LayerSpec {
  // The seed also draws tokens and routing; mesh.expert 0: AllShareExperts.
  TrainerOptions trainer = {.session = {.mesh = {.expert = 0}}, .seed = 0};
  // T of each rank; with ragged, zero_rank and trace some have fewer. The ranks of a tensor group
  // pass the tokens of all of them through the layer together.
  int64_t tokens = 1024;
  // Everything of the layer: router, widths, activation, dispatch, overlap degree. Its seed and
  // micro_batch_tokens are not read.
  MoeLayerConfig layer = {.router = {.num_experts = 8, .hidden_size = 512}, .ffn_hidden_size = 512};
  // Empty: the router decides by itself, on random tokens. Otherwise its gate is replaced
  // (AssignedGate) by one that gives the tokens these experts; capacity and the rest of the router
  // stay. Every kind but matrix; a trace must fit the world's ranks, which share one set of
  // experts and no matrices.
  std::optional<RoutingSpec> routing;
  // No backward: forwards follow each other, as in a program that does not train.
  bool forward_only = false;

  // Rows of x on a rank.
  int64_t rows() const { return tokens * trainer.session.mesh.tensor; }
};

// EP with which all ranks share one set of experts, with the ETP of `mesh`; 1 where that
// does not divide them, which the mesh then refuses.
int AllShareExperts(const MeshShape& mesh, int ranks);

// A phase of a pass: gate, plan, dispatch, expert, combine; "all" is the wall-clock time of the
// pass, with what is between the phases. Phases may overlap if the overlap degree is above 1.
struct LayerRow {
  std::string pass;         // "forward", "backward"
  std::string phase;        // as above
  Statistics time_us;       // over calls, of the slowest rank in this phase
  double share_pct = 0;     // mean over ranks and calls of this phase / of the pass
  double gflops_per_s = 0;  // expert: of all ranks, by the median; NaN elsewhere
  int64_t wrong = 0;  // elements of y (forward) or dx (backward), over ranks and timed calls, that
                      // differ from those of the first call with this routing, bit for bit
};

// Figures of a whole call, over all ranks.
struct LayerFigures {
  int64_t iterations = 0;
  Statistics step_us;        // over calls: the passes, each of its slowest rank
  double tokens_per_s = 0;   // tokens of all ranks and calls / sum of the above
  double drop_fraction = 0;  // slots that capacity dropped / slots that the gate chose
  double max_vio = 0;        // (largest - mean) / mean of the slots of routed experts, before drops
  int dead_experts = 0;      // without a slot
  int64_t kept_rows = 0;     // rows of the experts in one call (mean over calls)
  // The largest value of a rank: workspace at its peak, parameters (master, compute copy and packed
  // copy), their gradients, and x, y, dx, dy.
  int64_t peak_bytes = 0;
};

struct LayerResult {
  LayerSpec spec;
  std::string backend;
  int ranks = 1;
  std::optional<BFloat16Order> bfloat16_order;  // none where no product of bfloat16 is on a CPU
  LayerFigures figures;
  std::vector<LayerRow> rows;  // of every pass, phases and all
};

// Draws random tokens and weights; a pass starts at a barrier. Gradients are computed, not reduced.
// options.check is not read: results of a layer have no closed form, so calls are compared with
// each other (moe verify compares with a reference). A trace is replayed record by record. Load
// figures are those of the calls before the timed ones, which cover every record that the first
// options.iterations timed calls use. Collective; takes `world`; the same result on every rank.
//
// Floating-point operations of the expert phase for N kept rows: 6 N H F forward (three products; 4
// without a gate projection), twice that backward.
//   kInvalidArgument   a type, shape or routing that the layer does not have
absl::StatusOr<LayerResult> MeasureLayer(const LayerSpec& spec, const MeasureOptions& options,
                                         std::unique_ptr<Communicator> world);

// "dot" or "tile"; null without an order.
Cell BFloat16OrderCell(std::optional<BFloat16Order> order);

// Keys as docs/bench.md lists them.
Fields LayerFields(const LayerResult& result, const LayerRow& row);
absl::Span<const Column> LayerColumns();

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_LAYER_BENCH_H_
