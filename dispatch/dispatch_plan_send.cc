// The home side of a plan: the rows that leave for the experts' ranks.
#include <algorithm>

#include "dispatch/dispatch_plan_builder.h"
#include "kernels/base/status_macros.h"

namespace moe {

// Visits every (token, chunk and rank) with a kept slot there, once, in token order.
template <typename Visit>
void DispatchPlanBuilder::ForEachSendRow(absl::Span<const int32_t> pair_of_expert,
                                         absl::Span<int32_t> last_token, Visit visit) const {
  const Slots slots = slots_;
  if (last_token.size() == 1) {  // one pair: a token's first kept slot tells
    for (int64_t t = 0; t < plan_.tokens_; ++t) {
      int64_t s = slots.offset[t];
      while (s < slots.offset[t + 1] && !slots.kept(s)) ++s;
      if (s < slots.offset[t + 1]) visit(0, static_cast<int32_t>(t));
    }
    return;
  }
  std::fill(last_token.begin(), last_token.end(), -1);
  for (int64_t t = 0; t < plan_.tokens_; ++t) {
    for (int64_t s = slots.offset[t]; s < slots.offset[t + 1]; ++s) {
      if (!slots.kept(s)) continue;
      const int32_t pair = pair_of_expert[slots.expert[s]];
      if (last_token[pair] == t) continue;
      last_token[pair] = static_cast<int32_t>(t);
      visit(pair, static_cast<int32_t>(t));
    }
  }
}

absl::Status DispatchPlanBuilder::OrderSendRows() {
  if (padded()) return OrderPaddedSendRows();
  const auto pairs = static_cast<int64_t>(send_counts_.size());
  absl::Span<int64_t> send_begin, next;
  absl::Span<int32_t> pair_of_expert, last_token, send_token;
  MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.chunks_ + 1, 0, send_begin));
  MOE_RETURN_IF_ERROR(Take<int64_t>(pairs, 0, next));
  MOE_RETURN_IF_ERROR(Take<int32_t>(routed_, 0, pair_of_expert));
  MOE_RETURN_IF_ERROR(Take<int32_t>(pairs, 0, last_token));
  ForEachExpert([&](int c, int r, int64_t e) { pair_of_expert[e] = c * plan_.ranks_ + r; });

  ForEachSendRow(pair_of_expert, last_token, [&](int32_t pair, int32_t) { ++send_counts_[pair]; });
  int64_t rows = 0;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    next[pair] = rows;
    rows += send_counts_[pair];
    send_begin[pair / plan_.ranks_ + 1] = rows;
  }
  MOE_RETURN_IF_ERROR(Take(rows, send_token));
  ForEachSendRow(pair_of_expert, last_token,
                 [&](int32_t pair, int32_t token) { send_token[next[pair]++] = token; });
  plan_.send_begin_ = send_begin;
  plan_.send_token_ = send_token;
  return absl::OkStatus();
}

// Every place of every expert travels: send rows are home rows.
absl::Status DispatchPlanBuilder::OrderPaddedSendRows() {
  const int64_t rows = plan_.return_rows();
  const auto expert_rows = static_cast<int32_t>(micro_batches_ * routing_.padded_rows);
  absl::Span<int32_t> send_token;
  MOE_RETURN_IF_ERROR(Take<int32_t>(rows, -1, send_token));
  ForEachExpert([&](int c, int r, int64_t e) {
    send_counts_[c * plan_.ranks_ + r] += expert_rows;
    const auto tokens = home_source_.subspan(exchange_start_[e], expert_rows);
    std::copy(tokens.begin(), tokens.end(), send_token.begin() + home_start_[e]);
  });
  plan_.send_begin_ = plan_.home_begin_;
  plan_.send_token_ = send_token;
  return absl::OkStatus();
}

}  // namespace moe
