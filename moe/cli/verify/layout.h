// Ways to lay one problem out over ranks.
#ifndef MOE_MOE_CLI_VERIFY_LAYOUT_H_
#define MOE_MOE_CLI_VERIFY_LAYOUT_H_

#include <optional>
#include <string>
#include <vector>

#include "comm/create.h"
#include "dispatch/dispatcher.h"

namespace moe::verify {

struct Layout {
  int ranks = 1;
  int expert_parallel = 1;
  Backend transport = Backend::kLocal;
  DispatchAlgorithm dispatch = DispatchAlgorithm::kStaged;
  int overlap = 1;
  // Not of the layout but of the problem; here because the flag that names layouts names it, too.
  std::optional<double> capacity;

  // Ranks that stand for one host in hierarchical dispatch: EP's largest divisor below it.
  int node_size() const;
  bool operator==(const Layout&) const = default;
};
// "ranks=4 ep=2 local staged overlap=1 capacity=none"
std::string Describe(const Layout& layout);

// The values of every axis.
struct LayoutAxes {
  std::vector<int> ranks = {1, 2, 3, 4, 8};
  std::vector<int> expert_parallel;  // empty: all divisors of the ranks
  std::vector<Backend> transport = {Backend::kLocal};
  std::vector<DispatchAlgorithm> dispatch = {DispatchAlgorithm::kStaged, DispatchAlgorithm::kDirect,
                                             DispatchAlgorithm::kHierarchical};
  std::vector<int> overlap = {1, 4};
  std::vector<std::optional<double>> capacity = {std::nullopt, 1.0};
};

// All combinations in which EP divides the ranks.
std::vector<Layout> AllLayouts(const LayoutAxes& axes);

// A part of AllLayouts in which every pair of values of two axes that occurs there occurs, too.
// Greedy: the layout with the most pairs not yet covered, the first of equals. (Pairwise testing:
// Cohen et al., "The AETG System", IEEE TSE 1997.)
std::vector<Layout> PairwiseLayouts(const LayoutAxes& axes);

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_LAYOUT_H_
