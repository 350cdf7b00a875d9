// The rest of a plan for a group of one rank: nothing is sent, home rows are expert rows.
#include <algorithm>
#include <numeric>

#include "dispatch/dispatch_plan_builder.h"
#include "kernels/base/status_macros.h"

namespace moe {

absl::Status DispatchPlanBuilder::OrderRowsOfOneRank() {
  const int64_t rows = plan_.expert_rows();
  absl::Span<int32_t> own_row, own_rank, place;
  MOE_RETURN_IF_ERROR(Take(rows, own_row));
  MOE_RETURN_IF_ERROR(Take<int32_t>(rows, 0, own_rank));
  std::iota(own_row.begin(), own_row.end(), 0);
  place = own_row;
  if (plan_.chunks_ > 1) {
    MOE_RETURN_IF_ERROR(Take(rows, place));
    for (int c = 0; c < plan_.chunks_; ++c) {
      std::iota(place.begin() + plan_.expert_begin(c), place.begin() + plan_.expert_begin(c + 1),
                0);
    }
  }
  // Experts are in the order of their ids on both sides of the exchange that is not needed.
  expert_token_ = home_source_;
  plan_.expert_token_ = expert_token_;
  plan_.home_source_ = plan_.expert_home_row_ = plan_.return_order_ = own_row;
  plan_.home_peer_ = plan_.expert_peer_ = own_rank;
  plan_.return_place_ = place;
  return FindSourcesOfOneRank(place);
}

// With padding every place is received, else every token of the chunk once.
absl::Status DispatchPlanBuilder::FindSourcesOfOneRank(absl::Span<const int32_t> place) {
  if (padded()) {
    plan_.expert_source_ = place;
    return absl::OkStatus();
  }
  if (plan_.chunks_ == 1 && plan_.recv_rows() == plan_.tokens_) {
    plan_.expert_source_ = expert_token_;
    return absl::OkStatus();
  }
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), expert_source_));
  return FindExpertSources();
}

}  // namespace moe
