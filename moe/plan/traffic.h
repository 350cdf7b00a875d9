// Bytes that a training step moves between ranks.
#ifndef MOE_MOE_PLAN_TRAFFIC_H_
#define MOE_MOE_PLAN_TRAFFIC_H_

#include "moe/plan/layout.h"
#include "moe/plan/model_cost.h"

namespace moe::plan {

// Of one step, sums over ranks: what moe train counts in its end report, if all choices of experts
// are as likely and no slot is dropped.
struct Traffic {
  // Rows to experts and home, forward and backward (ExchangeBytes): a token's row travels once to
  // each rank that holds some of its K experts; K rows travel home; and backward with each slot's
  // float32 weight. With --recompute layer a layer's forward is done twice.
  double experts_self = 0, experts_node = 0, experts_network = 0;
  // Sums of gradients, and with ZeRO the gathered weights (TrainReport::all_reduce_bytes):
  //   all-reduce          2 (N - 1) sum_bytes an element that N ranks hold
  //   ZeRO-1              (N - 1) (sum_bytes + element_bytes)
  //   ZeRO-2              (N - 1) (rounds sum_bytes + element_bytes)
  //   ZeRO-3              (N - 1) rounds (sum_bytes + 2 element_bytes), of embedding and output
  //                       layer one element_bytes; a layer's weights that are there still are not
  //                       gathered again. With pipelines to 7 %: stages gather some for nothing
  double gradients_shared = 0;   // of what all ranks of a stage hold, but for matrices cut over TP
  double gradients_experts = 0;  // among ranks with the same experts
  double gradients() const { return gradients_shared + gradients_experts; }
  // Rows between stages, and their gradients: 2 (parts - 1) T H for each micro-batch.
  double stages = 0;
  // Among ranks that share matrices, the output layer untied, and among those that share experts:
  // (ETP - 1) N H (element_bytes + 4) each way for N rows of experts. TrainReport::tensor_bytes is
  // their sum. A node a rank (tree_cut.h), as where TP and ETP are powers of two.
  double tensors = 0, shared_experts = 0;
};

// node_ranks: consecutive ranks of a node; an expert-parallel group is taken to begin with one.
Traffic TrafficOf(const ModelCost& cost, const Workload& work, const Layout& layout,
                  int node_ranks);

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_TRAFFIC_H_
