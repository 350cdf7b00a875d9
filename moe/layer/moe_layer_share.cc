// What a rank of a tensor group needs of the others to decide about its own rows.
#include <algorithm>

#include "kernels/base/status_macros.h"
#include "moe/layer/moe_layer.h"

namespace moe {

template <typename T>
absl::Status MoeLayer<T>::TakeOwnSlots(const Pass& pass, Saved& saved) const {
  const Routing& all = saved.router.on_device;
  saved.own = all;
  if (!share_.cut() || all.slot_offset.empty()) return absl::OkStatus();
  const OwnRows& rows = saved.rows;
  const auto first = static_cast<size_t>(all.slot_offset[rows.begin()]);
  const auto count = static_cast<size_t>(all.slot_offset[rows.end()]) - first;
  MOE_ASSIGN_OR_RETURN(const auto offsets, pass.kept_host().Array<int64_t>(rows.count() + 1));
  for (size_t t = 0; t < offsets.size(); ++t) {
    offsets[t] = all.slot_offset[rows.begin() + t] - all.slot_offset[rows.begin()];
  }
  saved.own.slot_offset = offsets;
  saved.own.expert = all.expert.subspan(first, count);
  saved.own.weight = all.weight.subspan(first, count);
  if (!all.dropped.empty()) saved.own.dropped = all.dropped.subspan(first, count);
  return absl::OkStatus();
}

template <typename T>
absl::Status MoeLayer<T>::GatherLogits(const Pass& pass, const Saved& saved) const {
  const MatrixView<float> all = saved.router.logits;
  if (!share_.cut() || all.rows() == 0) return absl::OkStatus();
  return TensorExchange(pass.context, pass.site.Named("router logits"),
                        [&](Communicator& group, const Site& at) {
                          return AllGatherRows<float>(saved.rows.Of(all), all, saved.rows.offsets,
                                                      group, *pass.context.compute, at);
                        });
}

template <typename T>
absl::Status MoeLayer<T>::GatherSlots(const Pass& pass, const Saved& saved,
                                      absl::Span<float> values) const {
  const Routing& all = saved.router.on_device;
  if (!share_.cut() || all.slot_offset.empty()) return absl::OkStatus();
  RankCounts slots;
  for (const int64_t row : share_.RowsOf(all.tokens())) slots.push_back(all.slot_offset[row]);
  const MatrixView<float> column(values.data(), std::ssize(values), 1);
  return TensorExchange(
      pass.context, pass.site.Named("combine weights"), [&](Communicator& group, const Site& at) {
        return AllGatherRows<float>(RowsOfRank(column, slots, share_.index), column, slots, group,
                                    *pass.context.compute, at);
      });
}

template <typename T>
absl::Status MoeLayer<T>::FindIdentities(const Pass& pass, Saved& saved) const {
  const Routing& routing = share_.cut() ? saved.own : saved.router.routing;
  if (routing.num_routed_experts == routing.num_experts) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(const auto row, pass.kept_host().Array<int32_t>(routing.slots()));
  for (int64_t t = 0; t < routing.tokens(); ++t) {
    for (int64_t s = routing.slot_offset[t]; s < routing.slot_offset[t + 1]; ++s) {
      row[s] = routing.expert[s] < routing.num_routed_experts ? -1 : static_cast<int32_t>(t);
    }
  }
  MOE_ASSIGN_OR_RETURN(saved.identity_row, KeptOnDevice<int32_t>(row, pass));
  return absl::OkStatus();
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
  template absl::Status MoeLayer<T>::TakeOwnSlots(const Pass&, MoeLayer<T>::Saved&) const;       \
  template absl::Status MoeLayer<T>::GatherLogits(const Pass&, const MoeLayer<T>::Saved&) const; \
  template absl::Status MoeLayer<T>::GatherSlots(const Pass&, const MoeLayer<T>::Saved&,         \
                                                 absl::Span<float>) const;                       \
  template absl::Status MoeLayer<T>::FindIdentities(const Pass&, MoeLayer<T>::Saved&) const;     \
  template absl::StatusOr<GroupOffsets> MoeLayer<T>::SegmentsOf(const DispatchPlan&, Workspace&) \
      const;                                                                                     \
  template absl::Status MoeLayer<T>::GatherCounts(const Pass&, MoeLayer<T>::Saved&) const;
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
