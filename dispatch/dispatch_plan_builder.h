// Builds a DispatchPlan. Internal: callers use DispatchPlan::Build.
#ifndef MOE_DISPATCH_DISPATCH_PLAN_BUILDER_H_
#define MOE_DISPATCH_DISPATCH_PLAN_BUILDER_H_

#include <algorithm>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "dispatch/dispatch_plan.h"
#include "kernels/base/status_macros.h"
#include "kernels/expert_sort/expert_run.h"

namespace moe {

// B, the number of micro-batches; 1 without offsets.
inline int64_t MicroBatches(absl::Span<const int64_t> micro_batch_offsets) {
  return std::max<int64_t>(1, static_cast<int64_t>(micro_batch_offsets.size()) - 1);
}

// Steps run in the order they are declared in. Until GatherCounts this rank works alone; from then
// on every count of every rank is known here.
class DispatchPlanBuilder {
 public:
  // device: memory of the device of the steps' stream, where the plan's (device) arrays and those
  // of `routing` are; nullptr: all is the host's.
  DispatchPlanBuilder(const DispatchPlanInputs& inputs, Workspace& workspace, Workspace* device);

  // Check sizes: of the routing alone, and of all inputs.
  static absl::Status CheckRouting(const Routing& routing,
                                   absl::Span<const int64_t> micro_batch_offsets);
  absl::Status Check() const;
  absl::Status CheckSlotOffsets() const;
  absl::Status StartMessage();
  absl::Status CountSlots();  // checks ids too
  absl::Status CountPadding();
  absl::Status OrderHomeRows();
  absl::Status SortHomeRows(Stream& stream);  // on the device, instead of those three
  absl::Status GatherCounts(Stream& stream);
  absl::Status SumCounts();
  absl::Status OrderExpertRows(Stream& stream);

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
  };
  // Rows of tokens while slots are counted or placed, each token once in each group of experts.
  struct TokensByGroup {
    const int32_t* group_of_expert;  // [E]; nullptr: there are no such rows
    int32_t* last_token;             // [groups] last token that has a row there
    int32_t* rows;                   // [groups] rows so far
    const int64_t* begin;            // [groups] where the group's rows begin in `value`
    int32_t* value;                  // nullptr: rows are only counted

    // Which of the group's rows is token t's for expert e: the last one, or a new one with the
    // value of make_value().
    template <typename MakeValue>
    int32_t PlaceOf(int32_t e, int32_t t, MakeValue make_value) const {
      const int32_t group = group_of_expert[e];
      if (last_token[group] == t) return rows[group] - 1;
      last_token[group] = t;
      const int32_t made = make_value();
      if (value != nullptr) value[begin[group] + rows[group]] = made;
      return rows[group]++;
    }
  };
  // Rows by (chunk, destination), and where they are relayed by (chunk, destination's node): the
  // value of one of the first is then its place among the second, of the others it is the token.
  struct SendOrder {
    TokensByGroup to_rank, to_node;

    bool sends_once() const { return to_rank.group_of_expert != nullptr; }
    int32_t PlaceOf(int32_t e, int32_t t) const {
      return to_rank.PlaceOf(e, t, [this, e, t] {
        if (to_node.group_of_expert == nullptr) return t;
        return to_node.PlaceOf(e, t, [t] { return t; });
      });
    }
  };
  // Home rows while slots are placed.
  struct HomeOrder {
    int32_t* next;            // [E] the next row of each expert
    const int32_t* exchange;  // [E] distance from a row to its value
    int32_t *row_of_slot, *slot_of_row, *value;
  };
  // Message of a rank to all others, as int32: this header; SendRows by (chunk, destination), with
  // room for most chunks; kept slots by (micro-batch, expert), with room for kMicroBatchesAtOnce.
  // So first messages have one length, also from ranks that disagree; more micro-batches come in a
  // second.
  enum Header : int { kTokens, kMicroBatches, kPaddedRows, kChunks, kNodeSize, kHeaderSize };
  static constexpr int64_t kMicroBatchesAtOnce = 4;

  int64_t most_pairs() const { return int64_t{placement_.LocalExperts(0)} * plan_.ranks_; }
  int64_t first_length() const {
    return kHeaderSize + most_pairs() + kMicroBatchesAtOnce * routed_;
  }
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
  // An array of the host or of the device, to be written whole.
  absl::Status TakeRows(int64_t count, absl::Span<int32_t>& rows) {
    MOE_ASSIGN_OR_RETURN(rows, (device_ == nullptr ? workspace_ : *device_).Array<int32_t>(count));
    return absl::OkStatus();
  }
  // send: where `stream` computes; gathered: in memory of the host, which waits.
  absl::Status Gather(absl::Span<const int32_t> send, absl::Span<const int32_t>& gathered,
                      Stream& stream);
  bool padded() const { return routing_.padded_rows > 0; }
  // Whether every rank has as many rows for each expert and micro-batch.
  bool even() const { return padded() && routing_.padding.empty(); }
  // A token travels once to each pair, and not once for each place of padding, or read by peers.
  bool sends_once() const { return plan_.ranks_ > 1 && !plan_.reads_peers_ && !padded(); }
  bool relays() const { return sends_once() && options_.node_size > 0; }
  // Whether a value of each row is sent to the rank of the row's expert.
  bool exchanges() const { return sends_once() || (plan_.ranks_ > 1 && plan_.reads_peers_); }
  int64_t micro_batch_begin(int64_t b) const { return offsets_.empty() ? 0 : offsets_[b]; }
  int64_t micro_batch_end(int64_t b) const {
    return offsets_.empty() ? plan_.tokens_ : offsets_[b + 1];
  }
  // Rows of `source` for `expert`, in one micro-batch and in all.
  int64_t SegmentRows(int source, int64_t b, int64_t expert) const {
    return even() ? routing_.padded_rows : KeptSlots(source, b, expert);
  }
  int64_t OwnRows(int64_t b, int64_t expert) const {
    return even() ? routing_.padded_rows : kept_[b * routed_ + expert];
  }
  int32_t KeptSlots(int source, int64_t b, int64_t expert) const;  // with Routing::padding
  int64_t Tokens(int source) const { return messages_[source * first_length() + kTokens]; }
  int64_t RowsOf(int source, int64_t expert) const {
    return rows_[source * int64_t{routed_} + expert];
  }

  static absl::Status BadSlotOffsets(const Routing& routing);
  absl::Status CheckPadding() const;
  // Counts rows by (chunk, R / group_ranks groups of ranks) in `rows`.
  absl::StatusOr<TokensByGroup> StartTokens(int group_ranks, absl::Span<int32_t> rows);
  absl::StatusOr<SendOrder> StartSendOrder(absl::Span<int32_t> to_rank,
                                           absl::Span<int32_t> to_node);
  // Gives `rows`, which have been counted, an array of values.
  absl::Status TakeValues(absl::Span<const int32_t> counts, TokensByGroup& rows,
                          absl::Span<int32_t>& values);
  // Places the slots of tokens [begin, end).
  void PlaceSlots(int64_t begin, int64_t end, HomeOrder home, SendOrder send) const;
  absl::Status CheckAgreement() const;
  absl::Status OrderSegments();
  absl::Status SumPairs();
  absl::Status ExchangeValues(Stream& stream);
  // Of ranks that relay: rows of `source` that `relay` sends on, 0 where it is not of its rail;
  // places_ in the messages to them; what they make of the places that they received.
  int64_t RelayedRows(int chunk, int source, int relay) const;
  absl::StatusOr<absl::Span<const int32_t>> WithPlaces(absl::Span<const int32_t> values);
  absl::Status OrderRelays();
  // The rank whose rows are the i-th to arrive.
  int SourceAt(int i) const {
    if (options_.node_size == 0) return i;
    const int nodes = plan_.ranks_ / options_.node_size;
    return i % nodes * options_.node_size + i / nodes;
  }
  absl::StatusOr<absl::Span<const ExpertRun>> Runs();  // in the order of return rows
  absl::Status OrderReturns(absl::Span<const ExpertRun> runs, Stream& stream);
  absl::Status FindPeers(absl::Span<const ExpertRun> runs);
  absl::Status FindHomeSources();
  absl::Status OrderRowsOfOneRank();

  const Routing& routing_;
  const absl::Span<const int64_t> offsets_;
  const ExpertPlacement placement_;
  const DispatchPlanOptions options_;
  Communicator& comm_;
  const Site site_;
  Workspace& workspace_;
  Workspace* const device_;
  const int32_t routed_;  // E of the routed experts
  const Slots slots_;
  const int64_t micro_batches_;  // B

  DispatchPlan plan_;
  absl::Span<int32_t> message_;             // message of this rank
  absl::Span<int32_t> send_counts_, kept_;  // its two tables
  absl::Span<const int32_t> told_;          // the message, where the steps' stream computes
  absl::Span<const int32_t> messages_;      // [R] first messages
  absl::Span<const int32_t> more_kept_;     // [R, B - kMicroBatchesAtOnce, E] second messages
  absl::Span<int64_t> rows_;                // [R * E] RowsOf
  // Values of the home rows by (expert, token, choice): the token of a row, or, where tokens are
  // sent once, the position of the token among the rows for the expert's pair. received_: values of
  // the expert rows by (source, expert), from their sources; behind those of a source whose rows
  // this rank relays, the places of these rows by (chunk, local rank of the destination, token).
  absl::Span<const int32_t> values_;
  absl::Span<int32_t> received_;
  // Places of the rows by (chunk, destination, token) among those by (chunk, node, token).
  absl::Span<const int32_t> places_;
};

}  // namespace moe

#endif  // MOE_DISPATCH_DISPATCH_PLAN_BUILDER_H_
