// The home side of a plan: this rank's slots, in the order in which their rows return.
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

// The rows of an expert are written one after the other, but a processor that writes those of many
// experts in turn does not see it: the next cache line is asked for before it is needed.
void PutInTurn(int32_t value, int32_t* to) {
  constexpr int64_t kCacheLine = 64 / sizeof(int32_t);
  *to = value;
  __builtin_prefetch(to + kCacheLine, /*rw=*/1);
}

}  // namespace

absl::StatusOr<DispatchPlan> DispatchPlan::Build(const DispatchPlanInputs& inputs,
                                                 Workspace& workspace, Stream& stream) {
  DispatchPlanBuilder builder(inputs, workspace, /*device=*/nullptr);
  MOE_RETURN_IF_ERROR(builder.Check());
  MOE_RETURN_IF_ERROR(builder.CheckSlotOffsets());
  MOE_RETURN_IF_ERROR(builder.StartMessage());
  MOE_RETURN_IF_ERROR(builder.CountSlots());
  MOE_RETURN_IF_ERROR(builder.CountPadding());
  MOE_RETURN_IF_ERROR(builder.OrderHomeRows());
  MOE_RETURN_IF_ERROR(builder.GatherCounts(stream));
  MOE_RETURN_IF_ERROR(builder.SumCounts());
  MOE_RETURN_IF_ERROR(builder.OrderExpertRows(stream));
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
  MOE_ASSIGN_OR_RETURN(plan.slot_offset_, UploadArray(plan.slot_offset_, workspace, stream));
  return plan;
}

DispatchPlanBuilder::DispatchPlanBuilder(const DispatchPlanInputs& inputs, Workspace& workspace,
                                         Workspace* device)
    : routing_(inputs.routing),
      offsets_(inputs.micro_batch_offsets),
      placement_(inputs.placement),
      options_(inputs.options),
      comm_(inputs.comm),
      site_(inputs.site),
      workspace_(workspace),
      device_(device),
      routed_(routing_.num_routed_experts),
      slots_{.offset = routing_.slot_offset.data(),
             .expert = routing_.expert.data(),
             .dropped = routing_.dropped.empty() ? nullptr : routing_.dropped.data(),
             .routed = routed_},
      micro_batches_(MicroBatches(offsets_)) {
  plan_.ranks_ = comm_.size();
  plan_.rank_ = comm_.rank();
  plan_.reads_peers_ = options_.reads_peers;
  plan_.node_size_ = options_.node_size;
  plan_.tokens_ = routing_.tokens();
  plan_.segments_ = plan_.ranks_ * micro_batches_;
}

absl::Status DispatchPlanBuilder::Check() const {
  if (placement_.ranks() != comm_.size() || placement_.num_experts() != routed_ || routed_ < 1 ||
      routing_.num_experts < routed_) {
    return Invalid(absl::StrCat("placement of ", placement_.num_experts(), " experts on ",
                                placement_.ranks(), " ranks, but the routing has ", routed_, " of ",
                                routing_.num_experts, " experts routed and the group ",
                                comm_.size(), " ranks"));
  }
  if (options_.overlap_degree < 1) {
    return Invalid(absl::StrCat("overlap degree ", options_.overlap_degree, ", expected >= 1"));
  }
  const int node_size = options_.node_size;
  if (node_size < 0 || (node_size > 0 && comm_.size() % node_size != 0)) {
    return Invalid(absl::StrCat("node size ", node_size, ", expected 0 or a divisor of the ",
                                comm_.size(), " ranks"));
  }
  return CheckRouting(routing_, offsets_);
}

absl::Status DispatchPlanBuilder::CheckRouting(const Routing& routing,
                                               absl::Span<const int64_t> micro_batch_offsets) {
  const int64_t slots = routing.slots(), tokens = routing.tokens();
  if (slots > kMaxRows || tokens > kMaxRows) return BadSlotOffsets(routing);
  if (!routing.dropped.empty() && static_cast<int64_t>(routing.dropped.size()) != slots) {
    return Invalid(absl::StrCat("dropped [", routing.dropped.size(), "], expected [", slots, "]"));
  }
  if (!micro_batch_offsets.empty() && !AreOffsets(micro_batch_offsets, tokens)) {
    return Invalid(absl::StrCat("micro_batch_offsets [", micro_batch_offsets.size(),
                                "], expected ascending offsets from 0 to ", tokens));
  }
  const int64_t experts = routing.num_routed_experts, batches = MicroBatches(micro_batch_offsets);
  if (experts < 1) return Invalid(absl::StrCat(experts, " experts, expected 1 or more"));
  const int64_t most = kMaxRows / (experts * batches);
  if (routing.padded_rows < 0 || routing.padded_rows > most) {
    return Invalid(absl::StrCat("padded_rows ", routing.padded_rows, " for ", experts,
                                " experts in ", batches, " micro-batches, expected 0 .. ", most));
  }
  const auto padding = std::ssize(routing.padding);
  if (padding != 0 && (routing.padded_rows == 0 || padding != experts * batches)) {
    return Invalid(absl::StrCat("padding [", padding, "] with padded_rows ", routing.padded_rows,
                                ", expected [", batches, ", ", experts, "] and rows to fill up"));
  }
  return absl::OkStatus();
}

absl::Status DispatchPlanBuilder::BadSlotOffsets(const Routing& routing) {
  return Invalid(absl::StrCat("slot_offset [", routing.slot_offset.size(), "] and ",
                              routing.slots(),
                              " slots, expected ascending offsets from 0 to the number of slots, "
                              "fewer than 2^31"));
}

absl::Status DispatchPlanBuilder::CheckSlotOffsets() const {
  const int64_t slots = routing_.slots();
  const bool no_tokens = routing_.slot_offset.empty() && slots == 0;
  return no_tokens || AreOffsets(routing_.slot_offset, slots) ? absl::OkStatus()
                                                              : BadSlotOffsets(routing_);
}

absl::Status DispatchPlanBuilder::StartMessage() {
  plan_.chunks_ = std::clamp<int>(options_.overlap_degree, 1, placement_.LocalExperts(0));
  const int64_t kept = kHeaderSize + most_pairs();
  const int64_t batches = std::max(micro_batches_, kMicroBatchesAtOnce);
  MOE_RETURN_IF_ERROR(Take<int32_t>(kept + batches * routed_, 0, message_));
  message_[kTokens] = static_cast<int32_t>(plan_.tokens_);
  message_[kMicroBatches] = static_cast<int32_t>(micro_batches_);
  message_[kPaddedRows] = static_cast<int32_t>(routing_.padded_rows);
  message_[kChunks] = plan_.chunks_;
  message_[kNodeSize] = options_.node_size;
  send_counts_ = message_.subspan(kHeaderSize, int64_t{plan_.chunks_} * plan_.ranks_);
  kept_ = message_.subspan(kept, micro_batches_ * routed_);
  told_ = message_;
  plan_.kept_slots_ = kept_;
  return absl::OkStatus();
}

absl::StatusOr<DispatchPlanBuilder::TokensByGroup> DispatchPlanBuilder::StartTokens(
    int group_ranks, absl::Span<int32_t> rows) {
  absl::Span<int32_t> group_of_expert, last_token;
  MOE_RETURN_IF_ERROR(Take(routed_, group_of_expert));
  MOE_RETURN_IF_ERROR(Take<int32_t>(std::ssize(rows), -1, last_token));
  const int groups = plan_.ranks_ / group_ranks;
  ForEachExpert(
      [&](int c, int r, int64_t e) { group_of_expert[e] = c * groups + r / group_ranks; });
  return TokensByGroup{.group_of_expert = group_of_expert.data(),
                       .last_token = last_token.data(),
                       .rows = rows.data(),
                       .begin = nullptr,
                       .value = nullptr};
}

absl::StatusOr<DispatchPlanBuilder::SendOrder> DispatchPlanBuilder::StartSendOrder(
    absl::Span<int32_t> to_rank, absl::Span<int32_t> to_node) {
  SendOrder order = {};
  if (sends_once()) {
    MOE_ASSIGN_OR_RETURN(order.to_rank, StartTokens(1, to_rank));
  }
  if (relays()) {
    MOE_ASSIGN_OR_RETURN(order.to_node, StartTokens(options_.node_size, to_node));
  }
  return order;
}

absl::Status DispatchPlanBuilder::TakeValues(absl::Span<const int32_t> counts, TokensByGroup& rows,
                                             absl::Span<int32_t>& values) {
  absl::Span<int64_t> begin;
  MOE_RETURN_IF_ERROR(Take(std::ssize(counts), begin));
  int64_t all = 0;
  for (size_t group = 0; group < counts.size(); ++group) {
    begin[group] = all;
    all += counts[group];
  }
  MOE_RETURN_IF_ERROR(Take(all, values));
  rows.begin = begin.data();
  rows.value = values.data();
  return absl::OkStatus();
}

absl::Status DispatchPlanBuilder::CountSlots() {
  const Slots slots = slots_;
  const int32_t experts = routing_.num_experts;
  absl::Span<int32_t> rail_sent;
  if (relays()) {
    const int64_t nodes = plan_.ranks_ / options_.node_size;
    MOE_RETURN_IF_ERROR(Take<int32_t>(plan_.chunks_ * nodes, 0, rail_sent));
    plan_.rail_sent_ = rail_sent;
  }
  const WorkspaceScope scope(workspace_);
  MOE_ASSIGN_OR_RETURN(const SendOrder send, StartSendOrder(send_counts_, rail_sent));
  for (int64_t b = 0; b < micro_batches_; ++b) {
    int32_t* const kept = &kept_[b * routed_];
    for (int64_t t = micro_batch_begin(b); t < micro_batch_end(b); ++t) {
      for (int64_t s = slots.offset[t]; s < slots.offset[t + 1]; ++s) {
        const int32_t e = slots.expert[s];
        if (e < 0 || e >= experts) {
          return Invalid(
              absl::StrCat("slot ", s, " names expert ", e, ", expected 0 .. ", experts - 1));
        }
        if (!slots.kept(s)) continue;
        ++kept[e];
        if (send.sends_once()) send.PlaceOf(e, static_cast<int32_t>(t));
      }
    }
  }
  return CheckPadding();
}

absl::Status DispatchPlanBuilder::CountPadding() {
  if (routing_.padding.empty()) return absl::OkStatus();
  absl::Span<int32_t> travel;
  MOE_RETURN_IF_ERROR(Take(std::ssize(kept_), travel));
  std::copy(kept_.begin(), kept_.end(), travel.begin());
  plan_.kept_slots_ = travel;
  for (size_t i = 0; i < kept_.size(); ++i) kept_[i] += routing_.padding[i];
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

absl::Status DispatchPlanBuilder::OrderHomeRows() {
  absl::Span<int64_t> start;
  absl::Span<int32_t> home_row_of_slot, home_slot, values, next, exchange;
  absl::Span<int32_t> rows_to_rank, rows_to_node, send_token, places;
  MOE_RETURN_IF_ERROR(Take(routed_, start));
  MOE_RETURN_IF_ERROR(Take<int32_t>(std::ssize(send_counts_), 0, rows_to_rank));
  MOE_RETURN_IF_ERROR(Take<int32_t>(std::ssize(plan_.rail_sent_), 0, rows_to_node));
  MOE_RETURN_IF_ERROR(Take(routed_, next));
  MOE_RETURN_IF_ERROR(Take<int32_t>(routed_, 0, exchange));
  const auto my_rows = [&](int64_t expert) {
    int64_t rows = 0;
    for (int64_t b = 0; b < micro_batches_; ++b) rows += OwnRows(b, expert);
    return rows;
  };
  int64_t rows = 0;
  ForEachExpert([&](int, int, int64_t e) {
    start[e] = rows;
    rows += my_rows(e);
  });
  int64_t value = 0;
  for (int32_t e = 0; e < routed_; ++e) {
    next[e] = static_cast<int32_t>(start[e]);
    if (exchanges()) exchange[e] = static_cast<int32_t>(value - start[e]);
    value += my_rows(e);
  }
  MOE_RETURN_IF_ERROR(Take(routing_.slots(), home_row_of_slot));
  MOE_RETURN_IF_ERROR(Take(rows, home_slot));
  MOE_RETURN_IF_ERROR(Take(rows, values));
  MOE_ASSIGN_OR_RETURN(SendOrder send, StartSendOrder(rows_to_rank, rows_to_node));
  if (relays()) {
    MOE_RETURN_IF_ERROR(TakeValues(plan_.rail_sent_, send.to_node, send_token));
  }
  if (sends_once()) {
    MOE_RETURN_IF_ERROR(TakeValues(send_counts_, send.to_rank, relays() ? places : send_token));
  }
  if (padded()) {  // some places stay empty
    std::fill(home_slot.begin(), home_slot.end(), -1);
    std::fill(values.begin(), values.end(), -1);
  }
  const HomeOrder home = {.next = next.data(),
                          .exchange = exchange.data(),
                          .row_of_slot = home_row_of_slot.data(),
                          .slot_of_row = home_slot.data(),
                          .value = values.data()};
  for (int64_t b = 0; b < micro_batches_; ++b) {
    for (int32_t e = 0; padded() && e < routed_; ++e) {
      next[e] = static_cast<int32_t>(start[e]);
      start[e] += OwnRows(b, e);
    }
    PlaceSlots(micro_batch_begin(b), micro_batch_end(b), home, send);
  }
  plan_.home_row_of_slot_ = home_row_of_slot;
  plan_.home_slot_ = home_slot;
  values_ = values;
  places_ = places;
  if (sends_once()) plan_.send_token_ = send_token;
  if (!exchanges()) (plan_.ranks_ == 1 ? plan_.expert_token_ : plan_.send_token_) = values_;
  return absl::OkStatus();
}

void DispatchPlanBuilder::PlaceSlots(int64_t begin, int64_t end, HomeOrder home,
                                     SendOrder send) const {
  const Slots slots = slots_;
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t s = slots.offset[t]; s < slots.offset[t + 1]; ++s) {
      if (!slots.kept(s)) {
        home.row_of_slot[s] = -1;
        continue;
      }
      const int32_t e = slots.expert[s];
      const int32_t row = home.next[e]++;
      const auto token = static_cast<int32_t>(t);
      home.row_of_slot[s] = row;
      PutInTurn(static_cast<int32_t>(s), home.slot_of_row + row);
      PutInTurn(send.sends_once() ? send.PlaceOf(e, token) : token,
                home.value + row + home.exchange[e]);
    }
  }
}

}  // namespace moe
