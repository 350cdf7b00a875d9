// What a rank of a tensor group needs of the others to decide about its own rows.
#include <algorithm>

#include "kernels/base/status_macros.h"
#include "moe/layer/moe_layer.h"

namespace moe {
namespace {

// Rows of padding that this rank sends. The last one of a tensor group sends those of all behind
// its own, so that experts have the rows in the order of one rank.
absl::StatusOr<absl::Span<const int32_t>> PaddingOf(const Routing& all, const TensorShare& share,
                                                    Workspace& host) {
  if (all.padded_rows == 0) return absl::Span<const int32_t>();
  const bool last = share.index + 1 == share.ranks;
  MOE_ASSIGN_OR_RETURN(const auto padding, host.Array<int32_t>(all.num_routed_experts));
  std::fill(padding.begin(), padding.end(), last ? static_cast<int32_t>(all.padded_rows) : 0);
  for (size_t s = 0; last && s < all.expert.size(); ++s) {
    const bool kept = all.dropped.empty() || all.dropped[s] == 0;
    if (kept && all.expert[s] < all.num_routed_experts) --padding[all.expert[s]];
  }
  return padding;
}

}  // namespace

template <typename T>
absl::StatusOr<Routing> MoeLayer<T>::TakeOwnSlots(const Pass& pass, Saved& saved) const {
  const Routing& all = saved.router.routing;  // in memory of the host where ranks share rows
  saved.own = saved.router.on_device;
  if (!share_.cut()) return plans_on_device_ ? saved.own : all;
  Routing planned = all;
  MOE_ASSIGN_OR_RETURN(planned.padding, PaddingOf(all, share_, pass.kept_host()));
  if (all.slot_offset.empty()) return planned;
  const OwnRows& rows = saved.rows;
  const auto first = static_cast<size_t>(all.slot_offset[rows.begin()]);
  const auto count = static_cast<size_t>(all.slot_offset[rows.end()]) - first;
  MOE_ASSIGN_OR_RETURN(const auto offsets, pass.kept_host().Array<int64_t>(rows.count() + 1));
  for (size_t t = 0; t < offsets.size(); ++t) {
    offsets[t] = all.slot_offset[rows.begin() + t] - all.slot_offset[rows.begin()];
  }
  const auto part = [&](Routing of, absl::Span<const int64_t> own_offsets) {
    of.slot_offset = own_offsets;
    of.expert = of.expert.subspan(first, count);
    of.weight = of.weight.subspan(first, count);
    if (!of.dropped.empty()) of.dropped = of.dropped.subspan(first, count);
    return of;
  };
  MOE_ASSIGN_OR_RETURN(const auto on_device, KeptOnDevice<int64_t>(offsets, pass));
  saved.own = part(saved.own, on_device);
  return part(planned, offsets);
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
  const Routing& all = saved.router.routing;
  if (!share_.cut() || all.slot_offset.empty()) return absl::OkStatus();
  RankCounts slots;
  for (const int64_t row : saved.rows.offsets) slots.push_back(all.slot_offset[row]);
  const MatrixView<float> column(values.data(), std::ssize(values), 1);
  return TensorExchange(
      pass.context, pass.site.Named("combine weights"), [&](Communicator& group, const Site& at) {
        return AllGatherRows<float>(RowsOfRank(column, slots, share_.index), column, slots, group,
                                    *pass.context.compute, at);
      });
}

template <typename T>
absl::Status MoeLayer<T>::FindIdentities(const Pass& pass, const Routing& own, Saved& saved) const {
  if (own.num_routed_experts == own.num_experts) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(const auto row, pass.kept_host().Array<int32_t>(own.slots()));
  for (int64_t t = 0; t < own.tokens(); ++t) {
    for (int64_t s = own.slot_offset[t]; s < own.slot_offset[t + 1]; ++s) {
      row[s] = own.expert[s] < own.num_routed_experts ? -1 : static_cast<int32_t>(t);
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
  MOE_ASSIGN_OR_RETURN(saved.gathered,
                       GatheredRows::Create({.segments = plan.segment_offsets().host(),
                                             .sources = plan.ranks(),
                                             .together = share_.ranks,
                                             .first_network = plan.chunk_first_expert(),
                                             .share = experts_share_},
                                            pass));
  return absl::OkStatus();
}

#define MOE_INSTANTIATE(T)                                                                       \
  template absl::StatusOr<Routing> MoeLayer<T>::TakeOwnSlots(const Pass&, MoeLayer<T>::Saved&)   \
      const;                                                                                     \
  template absl::Status MoeLayer<T>::GatherLogits(const Pass&, const MoeLayer<T>::Saved&) const; \
  template absl::Status MoeLayer<T>::GatherSlots(const Pass&, const MoeLayer<T>::Saved&,         \
                                                 absl::Span<float>) const;                       \
  template absl::Status MoeLayer<T>::FindIdentities(const Pass&, const Routing&,                 \
                                                    MoeLayer<T>::Saved&) const;                  \
  template absl::StatusOr<GroupOffsets> MoeLayer<T>::SegmentsOf(const DispatchPlan&, Workspace&) \
      const;                                                                                     \
  template absl::Status MoeLayer<T>::GatherCounts(const Pass&, MoeLayer<T>::Saved&) const;
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
