// Comparisons of the reference, and whether float32 may take them the other way.
#include <algorithm>
#include <cmath>
#include <numeric>

#include <absl/strings/str_cat.h>

#include "moe/cli/verify/reference_parts.h"

namespace moe::verify {

void Decisions::Check(const Bounded& a, const Bounded& b, const std::string& what) {
  const double gap = std::fabs(a.value - b.value);
  const double bound = a.error + b.error;
  // NaN and infinite bounds are undecided. A gap of 0 is a tie by construction.
  if (gap == 0 || gap > bound || !undecided_.empty()) return;
  undecided_ = absl::StrCat(what, ": a gap of ", gap, ", rounding bound ", bound);
}

std::vector<int32_t> Decisions::Largest(const std::vector<Bounded>& value, int64_t count,
                                        const std::string& what) {
  std::vector<int32_t> order(value.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return value[a].value > value[b].value; });
  for (int64_t i = 0; i < count && i + 1 < static_cast<int64_t>(order.size()); ++i) {
    if (std::isinf(value[order[i + 1]].value)) continue;  // masked
    Check(value[order[i]], value[order[i + 1]], what);
  }
  order.resize(std::min<size_t>(order.size(), count));
  return order;
}

// The values whose order Sinkhorn selects by: column_e * exp(l_te - max_t), the columns scaled
// until they change by less than 1e-4, at most 100 times.
//
// Bounds: let every cost be known within a factor e^{+-d}. A half-step turns row (column) factors
// known within e^{+-c} into column (row) factors within e^{+-(c + d)}, so after n iterations the
// columns are within e^{+-2nd}: the error grows by 2d an iteration, not geometrically.
void AddSinkhornValues(const std::vector<ReferenceToken>& tokens, TokenRange range, int64_t outputs,
                       Decisions& decisions, std::vector<std::vector<Bounded>>& value) {
  const int64_t count = range.second - range.first;
  Grid<double> cost(count, outputs);
  double d = 0;
  for (int64_t t = 0; t < count; ++t) {
    const std::vector<Bounded>& l = tokens[range.first + t].logits;
    double most = l[0].value, error = 0;
    for (const Bounded& v : l) {
      most = std::max(most, v.value);
      error = std::max(error, v.error);
    }
    d = std::max(d, 2 * error + kUnit);
    for (int64_t e = 0; e < outputs; ++e) cost(t, e) = std::exp(l[e].value - most);
  }
  std::vector<double> column(outputs, 1.0);
  double known_within = 0;
  for (int i = 0; i < 100; ++i) {
    std::vector<double> sum(outputs);
    for (int64_t t = 0; t < count; ++t) {
      double row = 0;
      for (int64_t e = 0; e < outputs; ++e) row += column[e] * cost(t, e);
      for (int64_t e = 0; e < outputs; ++e) {
        sum[e] += cost(t, e) / (static_cast<double>(count) * row);
      }
    }
    double change = 0, change_error = 0;
    const double before = known_within;
    known_within += 2 * d;
    for (int64_t e = 0; e < outputs; ++e) {
      const double next = 1 / (static_cast<double>(outputs) * (sum[e] + 1e-8));
      change += std::fabs(next - column[e]) / static_cast<double>(outputs);
      change_error += (next * std::expm1(known_within) + column[e] * std::expm1(before)) /
                      static_cast<double>(outputs);
      column[e] = next;
    }
    // Once the change is noise, the number of iterations is no matter: later ones change nothing
    // that the bound of the values does not cover.
    decisions.Check({change, change_error}, 1e-4, "Sinkhorn's last iteration");
    if (change <= 1e-4) break;
  }
  for (int64_t t = 0; t < count; ++t) {
    std::vector<Bounded>& mine = value[range.first + t];
    for (int64_t e = 0; e < outputs; ++e) {
      const double v = column[e] * cost(t, e);
      mine.push_back(Rounded(v, v * std::expm1(known_within + d)));
    }
  }
}

}  // namespace moe::verify
