// Uneven routing at any number of ranks: how much longer the busiest ranks take.
#ifndef MOE_MOE_PLAN_ROUTING_SIM_H_
#define MOE_MOE_PLAN_ROUTING_SIM_H_

#include <cstdint>
#include <vector>

#include "moe/io/routing_trace.h"

namespace moe::plan {

// Shares of slots by expert [E], which add up to 1, of each of some passes through a layer.
using PassShares = std::vector<std::vector<double>>;

// Drawn from the symmetric Dirichlet distribution: the larger the concentration, the more even.
// Deterministic by the seed. Gamma variates: Marsaglia and Tsang, doi:10.1145/358407.358414.
PassShares DirichletShares(int experts, double concentration, int passes, uint64_t seed);

// A pass for each record of the trace with slots: those of all its ranks together.
PassShares TraceShares(const RoutingTrace& trace);

struct RoutedWorld {
  int ranks = 1;
  int expert = 1;  // EP; divides the ranks
  int top_k = 1;
  int64_t tokens = 1;  // of a rank in one pass
  uint64_t seed = 0;
};

// Rows for experts over even rows, of the busiest rank of an expert-parallel group in each pass,
// for which the others wait: 1 is even.
struct Imbalance {
  double mean_group = 1;     // sum over passes; mean over groups
  double slowest_group = 1;  // sum over passes; the group with most, for which a step waits
  double worst_pass = 1;     // of any group in one pass
};

// Slots of a group and pass are multinomial over its ranks, with the shares of their experts
// (ExpertPlacement); a share is at most 1/K, since a token chooses an expert once. Cost: one draw
// for each rank and pass, some 50 ns.
Imbalance SimulateRouting(const PassShares& shares, const RoutedWorld& world);

// Of `nodes` equal blocks of experts, those that a token's K choices reach, mean over passes.
double NodesOfToken(const PassShares& shares, int nodes, int top_k);

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_ROUTING_SIM_H_
