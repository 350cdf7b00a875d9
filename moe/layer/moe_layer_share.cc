// The rows of a batch that each rank of a tensor group dispatches, and what they tell each other.
#include <algorithm>

#include "kernels/base/status_macros.h"
#include "moe/layer/moe_layer.h"

namespace moe {

template <typename T>
absl::Status MoeLayer<T>::TakeOwnRows(const Pass& pass, Saved& saved) const {
  const Routing& all = saved.router.on_device;
  saved.own = all;
  saved.begin = 0;
  saved.end = saved.x.rows();
  if (!share_.cut() || all.slot_offset.empty()) return absl::OkStatus();
  const RankCounts rows = share_.RowsOf(saved.x.rows());
  saved.begin = rows[share_.index];
  saved.end = rows[share_.index + 1];
  const auto first = static_cast<size_t>(all.slot_offset[saved.begin]);
  const auto count = static_cast<size_t>(all.slot_offset[saved.end]) - first;
  MOE_ASSIGN_OR_RETURN(const auto offsets,
                       pass.kept_host().Array<int64_t>(saved.end - saved.begin + 1));
  for (size_t t = 0; t < offsets.size(); ++t) {
    offsets[t] = all.slot_offset[saved.begin + t] - all.slot_offset[saved.begin];
  }
  saved.own.slot_offset = offsets;
  saved.own.expert = all.expert.subspan(first, count);
  saved.own.weight = all.weight.subspan(first, count);
  if (!all.dropped.empty()) saved.own.dropped = all.dropped.subspan(first, count);
  return absl::OkStatus();
}

template <typename T>
absl::Status MoeLayer<T>::GatherOwnRows(const Pass& pass, MatrixView<T> rows) const {
  if (!share_.cut() || rows.rows() == 0) return absl::OkStatus();
  return TensorExchange(
      pass.context, pass.site.Named("tensor rows"), [&](Communicator& group, const Site& at) {
        return AllGatherRows(rows, share_.RowsOf(rows.rows()), group, *pass.context.compute, at);
      });
}

template <typename T>
absl::Status MoeLayer<T>::GatherOwnSlots(const Pass& pass, const Routing& all,
                                         absl::Span<float> values) const {
  if (!share_.cut() || all.slot_offset.empty()) return absl::OkStatus();
  RankCounts slots = share_.RowsOf(all.tokens());
  for (int64_t& row : slots) row = all.slot_offset[row];
  const MatrixView<float> column(values.data(), std::ssize(values), 1);
  return TensorExchange(pass.context, pass.site.Named("combine weights"),
                        [&](Communicator& group, const Site& at) {
                          return AllGatherRows(column, slots, group, *pass.context.compute, at);
                        });
}

template <typename T>
absl::StatusOr<GroupOffsets> MoeLayer<T>::SegmentsOf(const DispatchPlan& plan,
                                                     Workspace& host) const {
  if (!share_.cut() || experts_share_.cut()) return plan.segment_offsets();
  // Sources are in the order of ranks, so that those of a tensor group are neighbours, and their
  // rows are those of a micro-batch in ascending order.
  const auto apart = plan.segment_offsets().host();
  const auto step = static_cast<size_t>(share_.ranks);
  MOE_ASSIGN_OR_RETURN(const auto together,
                       host.Array<int64_t>(std::ssize(apart) / share_.ranks + 1));
  for (size_t s = 0; s < together.size(); ++s) together[s] = apart[s * step];
  return GroupOffsets(together);
}

template <typename T>
absl::Status MoeLayer<T>::GatherCounts(const Pass& pass, Saved& saved) const {
  if (!experts_share_.cut()) return absl::OkStatus();
  const DispatchPlan& plan = *saved.plan;
  MOE_ASSIGN_OR_RETURN(
      saved.gathered,
      GatheredRows::Create({.segments = plan.segment_offsets().host(),
                            .sources = plan.ranks(),
                            .together = share_.ranks,
                            .first_network = plan.chunk_first_expert(),
                            .share = experts_share_},
                           pass.context, pass.kept_host(), pass.site.Named("plan")));
  return absl::OkStatus();
}

#define MOE_INSTANTIATE(T)                                                                       \
  template absl::Status MoeLayer<T>::TakeOwnRows(const Pass&, MoeLayer<T>::Saved&) const;        \
  template absl::Status MoeLayer<T>::GatherOwnRows(const Pass&, MatrixView<T>) const;            \
  template absl::Status MoeLayer<T>::GatherOwnSlots(const Pass&, const Routing&,                 \
                                                    absl::Span<float>) const;                    \
  template absl::StatusOr<GroupOffsets> MoeLayer<T>::SegmentsOf(const DispatchPlan&, Workspace&) \
      const;                                                                                     \
  template absl::Status MoeLayer<T>::GatherCounts(const Pass&, MoeLayer<T>::Saved&) const;
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
