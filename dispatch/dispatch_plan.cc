// The home side of a plan: this rank's slots, in the orders in which they leave and return.
#include "dispatch/dispatch_plan.h"

#include <algorithm>
#include <limits>

#include <absl/strings/str_cat.h>

#include "dispatch/dispatch_plan_builder.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

absl::Status Invalid(absl::string_view message) {
  return absl::InvalidArgumentError(absl::StrCat("DispatchPlan: ", message));
}

// 0 = offsets[0] <= offsets[1] <= ... = end.
bool AreOffsets(absl::Span<const int64_t> offsets, int64_t end) {
  return !offsets.empty() && offsets.front() == 0 && offsets.back() == end &&
         std::is_sorted(offsets.begin(), offsets.end());
}

}  // namespace

absl::StatusOr<DispatchPlan> DispatchPlan::Build(const Routing& routing,
                                                 absl::Span<const int64_t> micro_batch_offsets,
                                                 const ExpertPlacement& placement,
                                                 const DispatchPlanOptions& options,
                                                 Communicator& comm, Workspace& workspace,
                                                 Stream& stream) {
  DispatchPlanBuilder builder(routing, micro_batch_offsets, placement, comm, workspace);
  MOE_RETURN_IF_ERROR(builder.Check(options));
  MOE_RETURN_IF_ERROR(builder.CheckSlots());
  MOE_RETURN_IF_ERROR(builder.StartMessage(options));
  MOE_RETURN_IF_ERROR(builder.CountKeptSlots());
  MOE_RETURN_IF_ERROR(builder.OrderHomeRows());
  MOE_RETURN_IF_ERROR(builder.OrderSendRows());
  MOE_RETURN_IF_ERROR(builder.GatherCounts(stream));
  MOE_RETURN_IF_ERROR(builder.SumCounts());
  MOE_RETURN_IF_ERROR(builder.ExchangeTokens(stream));
  MOE_RETURN_IF_ERROR(builder.OrderExpertRows());
  MOE_RETURN_IF_ERROR(builder.FindHomeSources());
  return builder.plan();
}

absl::StatusOr<DispatchPlan> DispatchPlan::OnDevice(Workspace& workspace, Stream& stream) const {
  DispatchPlan plan = *this;
  if (!IsCuda(stream)) return plan;
  for (absl::Span<const int32_t>* const rows :
       {&plan.home_row_of_slot_, &plan.home_slot_, &plan.home_peer_, &plan.home_source_,
        &plan.send_token_, &plan.expert_source_, &plan.expert_peer_, &plan.expert_token_,
        &plan.expert_home_row_, &plan.return_order_, &plan.return_place_}) {
    MOE_ASSIGN_OR_RETURN(*rows, UploadArray(*rows, workspace, stream));
  }
  return plan;
}

DispatchPlanBuilder::DispatchPlanBuilder(const Routing& routing,
                                         absl::Span<const int64_t> micro_batch_offsets,
                                         const ExpertPlacement& placement, Communicator& comm,
                                         Workspace& workspace)
    : routing_(routing),
      offsets_(micro_batch_offsets),
      placement_(placement),
      comm_(comm),
      workspace_(workspace),
      routed_(routing.num_routed_experts),
      micro_batches_(std::max<int64_t>(1, static_cast<int64_t>(micro_batch_offsets.size()) - 1)) {
  plan_.ranks_ = comm.size();
  plan_.rank_ = comm.rank();
  plan_.tokens_ = routing.tokens();
  plan_.segments_ = plan_.ranks_ * micro_batches_;
}

absl::Status DispatchPlanBuilder::Check(const DispatchPlanOptions& options) const {
  const int64_t slots = routing_.slots();
  if (placement_.ranks() != comm_.size() || placement_.num_experts() != routed_ || routed_ < 1 ||
      routing_.num_experts < routed_) {
    return Invalid(absl::StrCat("placement of ", placement_.num_experts(), " experts on ",
                                placement_.ranks(), " ranks, but the routing has ", routed_, " of ",
                                routing_.num_experts, " experts routed and the group ",
                                comm_.size(), " ranks"));
  }
  if (options.overlap_degree < 1) {
    return Invalid(absl::StrCat("overlap degree ", options.overlap_degree, ", expected >= 1"));
  }
  if (slots > kMaxRows || plan_.tokens_ > kMaxRows) return BadSlotOffsets();
  if (!routing_.dropped.empty() && static_cast<int64_t>(routing_.dropped.size()) != slots) {
    return Invalid(absl::StrCat("dropped [", routing_.dropped.size(), "], expected [", slots, "]"));
  }
  if (!offsets_.empty() && !AreOffsets(offsets_, plan_.tokens_)) {
    return Invalid(absl::StrCat("micro_batch_offsets [", offsets_.size(),
                                "], expected ascending offsets from 0 to ", plan_.tokens_));
  }
  const int64_t most = kMaxRows / (int64_t{routed_} * micro_batches_);
  if (routing_.padded_rows < 0 || routing_.padded_rows > most) {
    return Invalid(absl::StrCat("padded_rows ", routing_.padded_rows, " for ", routed_,
                                " experts in ", micro_batches_, " micro-batches, expected 0 .. ",
                                most));
  }
  return absl::OkStatus();
}

absl::Status DispatchPlanBuilder::BadSlotOffsets() const {
  return Invalid(absl::StrCat("slot_offset [", routing_.slot_offset.size(), "] and ",
                              routing_.slots(),
                              " slots, expected ascending offsets from 0 to the number of slots, "
                              "fewer than 2^31"));
}

absl::Status DispatchPlanBuilder::CheckSlots() const {
  const int64_t slots = routing_.slots();
  const bool no_tokens = routing_.slot_offset.empty() && slots == 0;
  if (!no_tokens && !AreOffsets(routing_.slot_offset, slots)) return BadSlotOffsets();
  for (int64_t s = 0; s < slots; ++s) {
    if (routing_.expert[s] >= 0 && routing_.expert[s] < routing_.num_experts) continue;
    return Invalid(absl::StrCat("slot ", s, " names expert ", routing_.expert[s],
                                ", expected 0 .. ", routing_.num_experts - 1));
  }
  return absl::OkStatus();
}

absl::Status DispatchPlanBuilder::StartMessage(const DispatchPlanOptions& options) {
  plan_.chunks_ = std::clamp<int>(options.overlap_degree, 1, placement_.LocalExperts(0));
  const int64_t pairs = int64_t{plan_.chunks_} * plan_.ranks_;
  MOE_RETURN_IF_ERROR(Take<int32_t>(kHeaderSize + pairs + micro_batches_ * routed_, 0, message_));
  send_counts_ = message_.subspan(kHeaderSize, pairs);
  kept_ = message_.subspan(kHeaderSize + pairs);
  plan_.kept_slots_ = kept_;
  return absl::OkStatus();
}

absl::Status DispatchPlanBuilder::CountKeptSlots() {
  for (int64_t b = 0; b < micro_batches_; ++b) {
    for (int64_t t = micro_batch_begin(b); t < micro_batch_end(b); ++t) {
      for (int64_t s = routing_.slot_offset[t]; s < routing_.slot_offset[t + 1]; ++s) {
        if (kept(s)) ++kept_[b * routed_ + routing_.expert[s]];
      }
    }
  }
  return CheckPadding();
}

absl::Status DispatchPlanBuilder::CheckPadding() const {
  const auto most = std::max_element(kept_.begin(), kept_.end());
  if (!padded() || *most <= routing_.padded_rows) return absl::OkStatus();
  const int64_t at = most - kept_.begin();
  return Invalid(absl::StrCat("expert ", at % routed_, " keeps ", *most, " slots of micro-batch ",
                              at / routed_, ", expected at most ", routing_.padded_rows,
                              " (padded_rows)"));
}

absl::StatusOr<int64_t> DispatchPlanBuilder::StartHomeRows() {
  absl::Span<int64_t> home_begin;
  MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.chunks_ + 1, 0, home_begin));
  MOE_RETURN_IF_ERROR(Take<int64_t>(routed_, 0, home_start_));
  MOE_RETURN_IF_ERROR(Take<int64_t>(routed_, 0, exchange_start_));
  const auto my_rows = [&](int64_t expert) {
    if (padded()) return micro_batches_ * routing_.padded_rows;
    int64_t rows = 0;
    for (int64_t b = 0; b < micro_batches_; ++b) rows += kept_[b * routed_ + expert];
    return rows;
  };
  int64_t rows = 0;
  ForEachExpert([&](int c, int, int64_t e) {
    home_start_[e] = rows;
    rows += my_rows(e);
    home_begin[c + 1] = rows;  // every chunk has an expert of rank 0
  });
  for (int64_t e = 1; e < routed_; ++e) {
    exchange_start_[e] = exchange_start_[e - 1] + my_rows(e - 1);
  }
  plan_.home_begin_ = home_begin;
  return rows;
}

absl::Status DispatchPlanBuilder::OrderHomeRows() {
  MOE_ASSIGN_OR_RETURN(const int64_t rows, StartHomeRows());
  absl::Span<int32_t> home_row_of_slot, home_slot;
  absl::Span<int64_t> next;
  MOE_RETURN_IF_ERROR(Take<int32_t>(routing_.slots(), -1, home_row_of_slot));
  MOE_RETURN_IF_ERROR(Take<int32_t>(rows, -1, home_slot));
  MOE_RETURN_IF_ERROR(Take<int32_t>(rows, -1, home_source_));
  MOE_RETURN_IF_ERROR(Take<int64_t>(routed_, 0, next));
  for (int64_t b = 0; b < micro_batches_; ++b) {
    if (padded()) std::fill(next.begin(), next.end(), b * routing_.padded_rows);
    for (int64_t t = micro_batch_begin(b); t < micro_batch_end(b); ++t) {
      for (int64_t s = routing_.slot_offset[t]; s < routing_.slot_offset[t + 1]; ++s) {
        if (!kept(s)) continue;
        const int32_t e = routing_.expert[s];
        const int64_t place = next[e]++;
        home_row_of_slot[s] = static_cast<int32_t>(home_start_[e] + place);
        home_slot[home_start_[e] + place] = static_cast<int32_t>(s);
        home_source_[exchange_start_[e] + place] = static_cast<int32_t>(t);
      }
    }
  }
  plan_.home_row_of_slot_ = home_row_of_slot;
  plan_.home_slot_ = home_slot;
  return absl::OkStatus();
}

// Visits every (token, chunk and rank) with a kept slot there, once, in token order.
template <typename Visit>
void DispatchPlanBuilder::ForEachSendRow(absl::Span<const int32_t> pair_of_expert,
                                         absl::Span<int32_t> last_token, Visit visit) const {
  std::fill(last_token.begin(), last_token.end(), -1);
  for (int64_t t = 0; t < plan_.tokens_; ++t) {
    for (int64_t s = routing_.slot_offset[t]; s < routing_.slot_offset[t + 1]; ++s) {
      if (!kept(s)) continue;
      const int32_t pair = pair_of_expert[routing_.expert[s]];
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
  MOE_RETURN_IF_ERROR(Take<int32_t>(rows, -1, send_token));
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
