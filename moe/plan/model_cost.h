// Parameters and floating-point operations of a model, whatever the layout.
#ifndef MOE_MOE_PLAN_MODEL_COST_H_
#define MOE_MOE_PLAN_MODEL_COST_H_

#include <cstdint>

#include "moe/lm/transformer_config.h"

namespace moe::plan {

// Parameters of the model over all experts, and those that one token uses.
struct ModelSize {
  int64_t total = 0;
  int64_t active = 0;
};
ModelSize SizeOf(const lm::TransformerConfig& config);

// What of a model its time and traffic depend on, so that models can be planned whose layers are
// not computed here. Elements of matrices are those of one layer; as doubles, since products of
// what a user asks for may not fit 64 bits.
struct ModelCost {
  int layers = 0;
  int dense_layers = 0;   // layers without experts
  double hidden = 0;      // H
  double vocab = 0;       // columns of the output layer
  double parameters = 0;  // of the whole model
  double attention = 0;   // elements of all projections
  // Columns of queries and of values over all heads: a token's scores and their products by values
  // take 2 of them for each token that it attends to.
  double attended = 0;
  double sums_of_heads = 0;       // of a token and layer, over all heads: norms of q and of k
  double experts = 0, top_k = 0;  // E, K
  double expert = 0;              // elements of an expert
  double width = 0;               // F of an expert
  double shared = 0;              // elements of the shared expert
  double dense = 0;               // elements of a dense network

  int moe_layers() const { return layers - dense_layers; }
  double expert_parameters() const { return moe_layers() * experts * expert; }
};
ModelCost CostOf(const lm::TransformerConfig& config);

// Operations of one token in a sequence of `length`, forward and backward: 6 for each element of a
// matrix that it meets (the embedding is read), and 3 for causal attention to half the sequence.
// Recomputed ones are not counted.
double TokenFlops(const ModelCost& cost, double length);

// Ranks of `ep` that hold some of the K experts of a token, in the mean over choices of K from E
// experts that are all as likely: EP (1 - C(E - E/EP, K) / C(E, K)). A token is sent once to each.
double RanksOfToken(double experts, double ep, double top_k);

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_MODEL_COST_H_
