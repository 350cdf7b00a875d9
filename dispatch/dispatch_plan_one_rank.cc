// The rest of a plan for a group of one rank: nothing is sent, home rows are expert rows.
#include <algorithm>
#include <numeric>

#include <absl/strings/str_cat.h>

#include "dispatch/dispatch_plan_builder.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/status_macros.h"
#include "kernels/expert_sort/expert_sort.h"

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

// A CUDA device may order the rows: one rank's chunks, home rows and expert rows are all in the
// order of its experts, so that one sort of the slots gives every array.
absl::StatusOr<DispatchPlan> DispatchPlan::BuildOnDevice(
    const Routing& routing, absl::Span<const int64_t> micro_batch_offsets,
    const DispatchPlanOptions& options, Communicator& comm, Workspace& host_workspace, Stream& host,
    Workspace& workspace, Stream& stream) {
  if (comm.size() != 1) {
    return absl::InvalidArgumentError(absl::StrCat("DispatchPlan::BuildOnDevice: a group of ",
                                                   comm.size(), " ranks, expected one"));
  }
  const ExpertPlacement placement(routing.num_routed_experts, 1);
  DispatchPlanBuilder builder(routing, micro_batch_offsets, placement, comm, host_workspace);
  MOE_RETURN_IF_ERROR(builder.Check(options));
  MOE_RETURN_IF_ERROR(builder.StartMessage(options));
  MOE_RETURN_IF_ERROR(builder.SortOnDevice(workspace, stream));
  MOE_RETURN_IF_ERROR(builder.GatherCounts(host));
  MOE_RETURN_IF_ERROR(builder.SumCounts());
  return builder.plan();
}

absl::Status DispatchPlanBuilder::SortOnDevice(Workspace& workspace, Stream& stream) {
  MOE_ASSIGN_OR_RETURN(const SortedSlots sorted, SortByExpert({.slot_offset = routing_.slot_offset,
                                                               .expert = routing_.expert,
                                                               .dropped = routing_.dropped,
                                                               .micro_batch_offsets = offsets_,
                                                               .num_experts = routed_,
                                                               .padded_rows = routing_.padded_rows},
                                                              workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto count, DownloadArray(sorted.count, workspace_, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  std::copy(count.begin(), count.end(), kept_.begin());
  MOE_RETURN_IF_ERROR(CheckPadding());

  MOE_ASSIGN_OR_RETURN(const int64_t rows, StartHomeRows());
  for (int c = 0; c < plan_.chunks_; ++c) {
    send_counts_[c] = static_cast<int32_t>(plan_.home_begin_[c + 1] - plan_.home_begin_[c]);
  }
  plan_.names_peers_ = false;
  plan_.send_begin_ = plan_.home_begin_;
  plan_.home_row_of_slot_ = sorted.row_of_slot;
  plan_.home_slot_ = sorted.slot_of_row.first(rows);
  plan_.expert_token_ = sorted.token_of_row.first(rows);
  plan_.return_order_ = sorted.own_row.first(rows);
  return absl::OkStatus();
}

}  // namespace moe
