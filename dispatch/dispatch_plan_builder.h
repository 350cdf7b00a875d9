// Builds a DispatchPlan. Internal: callers use DispatchPlan::Build.
#ifndef MOE_DISPATCH_DISPATCH_PLAN_BUILDER_H_
#define MOE_DISPATCH_DISPATCH_PLAN_BUILDER_H_

#include <algorithm>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "dispatch/dispatch_plan.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/status_macros.h"

namespace moe {

// B: no offsets are one micro-batch.
inline int64_t MicroBatches(absl::Span<const int64_t> micro_batch_offsets) {
  return std::max<int64_t>(1, static_cast<int64_t>(micro_batch_offsets.size()) - 1);
}

// Steps run in the order they are declared in. Until GatherCounts this rank works alone; from then
// on every count of every rank is known here.
class DispatchPlanBuilder {
 public:
  // staging: of the device of a CUDA stream.
  DispatchPlanBuilder(const Routing& routing, absl::Span<const int64_t> micro_batch_offsets,
                      const ExpertPlacement& placement, Communicator& comm, Workspace& workspace,
                      Workspace* staging);

  // Sizes, of the routing alone and of all.
  static absl::Status CheckRouting(const Routing& routing,
                                   absl::Span<const int64_t> micro_batch_offsets);
  absl::Status Check(const DispatchPlanOptions& options) const;
  absl::Status CheckSlotOffsets() const;
  absl::Status StartMessage(const DispatchPlanOptions& options);
  absl::Status CountKeptSlots();  // checks ids too
  absl::Status OrderHomeRows();
  absl::Status OrderSendRows();
  absl::Status GatherCounts(Stream& stream);
  absl::Status SumCounts();
  absl::Status ExchangeTokens(Stream& stream);
  absl::Status OrderExpertRows();
  absl::Status FindHomeSources();

  // For a group of one rank, instead of the steps after SumCounts.
  absl::Status OrderRowsOfOneRank();

  DispatchPlan plan() const { return plan_; }

 private:
  // Routing's slots without the bounds checks of its spans: loops copy it, so that what they write
  // cannot change it.
  struct Slots {
    const int64_t* offset;
    const int32_t* expert;
    const uint8_t* dropped;  // nullptr = none
    int32_t routed;

    bool kept(int64_t s) const {
      return expert[s] < routed && (dropped == nullptr || dropped[s] == 0);
    }
    int64_t FirstOf(int64_t token) const { return offset == nullptr ? 0 : offset[token]; }
  };
  // Home rows while slots are placed.
  struct HomeOrder {
    int32_t* next;            // [E] the next row of each expert
    const int32_t* exchange;  // [E] from there to its place in the token exchange
    int32_t *row_of_slot, *slot_of_row, *token;
  };
  // What a rank tells all others, as int32: these, then SendRows by (chunk, destination), then kept
  // slots by (micro-batch, expert).
  enum Header : int { kTokens, kPaddedRows, kChunks, kReturnRows, kHeaderSize };

  int64_t chunk_first(int rank, int chunk) const {
    return int64_t{placement_.LocalExperts(rank)} * chunk / plan_.chunks_;
  }
  // Calls visit(chunk, rank, expert) in the order of home rows.
  template <typename Visit>
  void ForEachExpert(Visit visit) const {
    for (int c = 0; c < plan_.chunks_; ++c) {
      for (int r = 0; r < plan_.ranks_; ++r) {
        const int64_t base = placement_.FirstExpert(r);
        for (int64_t l = chunk_first(r, c); l < chunk_first(r, c + 1); ++l) visit(c, r, base + l);
      }
    }
  }
  template <typename T>
  absl::Status Take(int64_t count, absl::Span<T>& array) {  // to be written whole
    MOE_ASSIGN_OR_RETURN(array, workspace_.Array<T>(count));
    return absl::OkStatus();
  }
  template <typename T>
  absl::Status Take(int64_t count, T fill, absl::Span<T>& array) {
    MOE_RETURN_IF_ERROR(Take(count, array));
    std::fill(array.begin(), array.end(), fill);
    return absl::OkStatus();
  }
  // collective(send, recv), both where `stream` computes; blocks the host.
  template <typename Collective>
  absl::Status Exchange(absl::Span<const int32_t> send, absl::Span<int32_t> recv, Stream& stream,
                        Collective collective) {
    if (!IsCuda(stream)) {
      MOE_RETURN_IF_ERROR(collective(send, recv));
      return stream.Synchronize();
    }
    const WorkspaceScope scope(*staging_);
    const auto received = static_cast<int64_t>(recv.size());
    MOE_ASSIGN_OR_RETURN(const auto from, UploadArray(send, *staging_, stream));
    MOE_ASSIGN_OR_RETURN(const auto to, staging_->Array<int32_t>(received));
    MOE_RETURN_IF_ERROR(collective(from, to));
    MOE_RETURN_IF_ERROR(
        stream.CopyBytes(to.data(), recv.data(), received * static_cast<int64_t>(sizeof(int32_t))));
    return stream.Synchronize();
  }
  bool padded() const { return routing_.padded_rows > 0; }
  int64_t micro_batch_begin(int64_t b) const { return offsets_.empty() ? 0 : offsets_[b]; }
  int64_t micro_batch_end(int64_t b) const {
    return offsets_.empty() ? plan_.tokens_ : offsets_[b + 1];
  }
  // Rows of `source` for `expert`, in one micro-batch and in all.
  int64_t SegmentRows(int source, int64_t b, int64_t expert) const;
  int64_t RowsOf(int source, int64_t expert) const {
    return rows_[source * int64_t{routed_} + expert];
  }

  static absl::Status BadSlotOffsets(const Routing& routing);
  absl::Status CheckPadding() const;
  void PlaceSlots(int64_t begin, int64_t end, HomeOrder order) const;  // of tokens
  template <typename Visit>
  void ForEachSendRow(absl::Span<const int32_t> pair_of_expert, absl::Span<int32_t> last_token,
                      Visit visit) const;
  absl::Status OrderPaddedSendRows();
  absl::Status CheckAgreement() const;
  absl::Status OrderSegments();
  absl::Status SumPairs();
  absl::Status FindExpertSources();
  void FindChunkSources(int chunk, absl::Span<int32_t> mark);
  absl::Status FindSourcesOfOneRank(absl::Span<const int32_t> place);

  const Routing& routing_;
  const absl::Span<const int64_t> offsets_;
  const ExpertPlacement& placement_;
  Communicator& comm_;
  Workspace& workspace_;
  Workspace* const staging_;
  const int32_t routed_;  // E of the routed experts
  const Slots slots_;
  const int64_t micro_batches_;  // B

  DispatchPlan plan_;
  absl::Span<int32_t> message_;             // what this rank tells
  absl::Span<int32_t> send_counts_, kept_;  // its two tables
  absl::Span<const int32_t> messages_;      // [R] messages
  absl::Span<int64_t> rows_;                // [R * E] RowsOf
  // [E] where this rank's rows of an expert start: in home rows; in the token exchange (by id).
  absl::Span<int64_t> home_start_, exchange_start_;
  // Written at first as buffers of the token exchange, then as the plan's arrays of that name.
  absl::Span<int32_t> home_source_, expert_source_;
  absl::Span<int32_t> expert_token_;
};

}  // namespace moe

#endif  // MOE_DISPATCH_DISPATCH_PLAN_BUILDER_H_
