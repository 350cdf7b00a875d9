#include "moe/cli/verify/layout.h"

#include <array>
#include <set>
#include <tuple>

#include <absl/strings/str_cat.h>

#include "moe/cli/base/choices.h"

namespace moe::verify {
namespace {

constexpr int kAxes = 6;

// A layout as one number an axis; capacity in thousandths, -1 = none.
std::array<int64_t, kAxes> Values(const Layout& l) {
  return {l.ranks,
          l.expert_parallel,
          static_cast<int64_t>(l.transport),
          static_cast<int64_t>(l.dispatch),
          l.overlap,
          l.capacity.has_value() ? static_cast<int64_t>(*l.capacity * 1000) : -1};
}

using Pair = std::tuple<int, int64_t, int, int64_t>;

std::vector<Pair> PairsOf(const Layout& layout) {
  const auto values = Values(layout);
  std::vector<Pair> pairs;
  for (int a = 0; a < kAxes; ++a) {
    for (int b = a + 1; b < kAxes; ++b) pairs.emplace_back(a, values[a], b, values[b]);
  }
  return pairs;
}

}  // namespace

int Layout::node_size() const {
  for (int size = expert_parallel / 2; size > 1; --size) {
    if (expert_parallel % size == 0) return size;
  }
  return 1;
}

std::string Describe(const Layout& layout) {
  return absl::StrCat(
      "ranks=", layout.ranks, " ep=", layout.expert_parallel, " ", moe::NameOf(layout.transport),
      " ", cli::NameOf(layout.dispatch, cli::kDispatches), " overlap=", layout.overlap,
      " capacity=", layout.capacity.has_value() ? absl::StrCat(*layout.capacity) : "none");
}

std::vector<Layout> AllLayouts(const LayoutAxes& axes) {
  std::vector<Layout> all;
  for (const int ranks : axes.ranks) {
    std::vector<int> divisors = axes.expert_parallel;
    for (int d = 1; axes.expert_parallel.empty() && d <= ranks; ++d) divisors.push_back(d);
    for (const int ep : divisors) {
      if (ranks % ep != 0) continue;
      for (const Backend transport : axes.transport) {
        for (const DispatchAlgorithm dispatch : axes.dispatch) {
          for (const int overlap : axes.overlap) {
            for (const auto& capacity : axes.capacity) {
              all.push_back({ranks, ep, transport, dispatch, overlap, capacity});
            }
          }
        }
      }
    }
  }
  return all;
}

std::vector<Layout> PairwiseLayouts(const LayoutAxes& axes) {
  const std::vector<Layout> all = AllLayouts(axes);
  std::set<Pair> open;
  for (const Layout& layout : all) {
    for (const Pair& pair : PairsOf(layout)) open.insert(pair);
  }
  std::vector<Layout> chosen;
  while (!open.empty()) {
    const Layout* best = nullptr;
    size_t most = 0;
    for (const Layout& layout : all) {
      size_t fresh = 0;
      for (const Pair& pair : PairsOf(layout)) fresh += open.count(pair);
      if (fresh > most) {
        most = fresh;
        best = &layout;
      }
    }
    for (const Pair& pair : PairsOf(*best)) open.erase(pair);
    chosen.push_back(*best);
  }
  return chosen;
}

}  // namespace moe::verify
