#include "moe/train/grid_unit.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace moe {

int GridUnitLog2(float largest, int64_t max_terms, int headroom_log2) {
  const auto limit = static_cast<uint64_t>(ExactGrid{.max_terms = max_terms}.limit());
  return std::ilogb(largest) + 1 + headroom_log2 - (63 - std::countl_zero(limit));
}

void GridUnit::Follow(const GradientNorm& norm, int64_t max_terms) {
  if (stays_ || !(norm.largest > 0) || !std::isfinite(norm.largest)) return;
  const bool fits = norm.non_finite == 0;
  if (fits && state_.settled) return;
  state_.settled = fits;
  const int roomy = GridUnitLog2(norm.largest, max_terms, kHeadroomLog2);
  if (!fits || state_.log2 < GridUnitLog2(norm.largest, max_terms, kLeastHeadroomLog2)) {
    state_.log2 = std::max(state_.log2, roomy);
    return;
  }
  if (norm.grid_loss_is_named()) state_.log2 = std::min(state_.log2, roomy);
}

}  // namespace moe
