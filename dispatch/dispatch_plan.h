// Where every row of one batch goes and comes back. Built once, used four times:
// dispatch and combine, forward and backward.
#ifndef MOE_DISPATCH_DISPATCH_PLAN_H_
#define MOE_DISPATCH_DISPATCH_PLAN_H_

#include <cstdint>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "dispatch/placement.h"
#include "gating/routing.h"
#include "kernels/base/group_offsets.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"

namespace moe {

struct DispatchPlanOptions {
  // d of --moe-overlap-degree: local experts are cut into this many chunks, each exchanged and
  // computed on its own. At most the largest LocalExperts count; more are cut to that.
  int overlap_degree = 1;
  // For kDirect: rows are read in peers' memory, neither sent nor received.
  bool reads_peers = false;
  // For kHierarchical: ranks of a node, a divisor of R; rank r is on node r / node_size. Rows are
  // relayed: a token is sent once to each node, to the rank of the sender's rail there
  // (two_hop_exchange.h), which sends it on to the ranks that need it. 0: rows go straight to them.
  int node_size = 0;
};

// A rank's arguments for its plan; borrowed. Every rank of `comm`, the expert-parallel group,
// passes the same number of micro-batches B, the same options, padding and E.
struct DispatchPlanInputs {
  const Routing& routing;
  // [B + 1] over its T tokens, empty ones allowed; an empty span is one micro-batch.
  absl::Span<const int64_t> micro_batch_offsets = {};
  ExpertPlacement placement;  // routed experts alone
  DispatchPlanOptions options = {};
  Communicator& comm;
  Site site = {};
};

// The permutation, and its split over ranks and chunks, that `Routing` implies.
//
// Chunk c of rank r is its local experts [L_r * c / d, L_r * (c + 1) / d).
//   slots          (token, choice) pairs of this rank, in token order: Routing's own order
//   send rows      one per distinct (chunk, destination rank, token): a token whose experts share a
//                  rank (and chunk) travels there once. Sorted by (chunk, destination, token).
//                  With padding to capacity they are home rows, so that shapes are static: one per
//                  (chunk, destination, expert, micro-batch, place in capacity), -1 for an empty
//                  place. So they are counted where peers are read, or there is one rank. Of ranks
//                  that share a micro-batch (Routing::padding) those of all are static.
//                  Relayed, without padding: one per distinct (chunk, destination's node, token),
//                  sorted so.
//   received rows  sorted by (chunk, source rank, ...) as they arrive; sources are in the order of
//                  ranks, or with node_size by (local rank, node)
//   expert rows    one per kept slot of all ranks for my experts (capacity places when padded),
//                  sorted by (expert, source rank, token, choice) = (expert, global token, choice).
//                  This is what Experts reads; chunks are contiguous in it.
//   return rows    expert rows on their way home: sorted by (chunk, source = home rank, expert,
//                  token, choice) at the expert's rank; ranks are in their own order
//   home rows      the same rows as they arrive at home, by (chunk, expert's rank, expert, token,
//                  choice)
// docs/dispatch.md draws them. Slots of identity experts (ids >= num_routed_experts) and dropped
// slots have no row anywhere. A plan has the arrays that its dispatchers read; others are empty.
//
// Immutable. Its arrays but slot_offset live in the workspace given to Build: host memory. A plan
// of OnDevice or BuildOnDevice has those marked (device) in memory of a stream's device, for
// kernels alone to read. Copies are views of the same arrays.
// Layout after Lepikhin et al., "GShard" (2020), arXiv:2006.16668, without its capacity limit;
// the dropless form follows Gale et al., "MegaBlocks" (2022), arXiv:2211.15841.
class DispatchPlan {
 public:
  // Collective. Costs an AllGather of 5E + R int32, where B is above 4 another one, and one
  // all-to-all of one int32 per expert row: the place of its token among the rows that its rank
  // has for this one (with padding it is known), or to read peers the token. Relayed rows have one
  // int32 each in the same all-to-all: which row that comes over the rail each is a copy of.
  // `stream`, of the CPU, is synchronised; nothing else of the group may be under way. The slots
  // are read twice. A group of one rank exchanges nothing; arrays that are equal are one: four
  // int32 a slot, where every slot is kept.
  // Errors: kInvalidArgument, before anything is sent, if the routing's shapes disagree, an id is
  // out of range, an expert has more kept slots in a micro-batch than padded_rows or node_size does
  // not divide R; after the AllGather, on all ranks alike, if ranks disagree on B, d, padded_rows
  // or node_size, or an expert rank would hold 2^31 rows; any error of the communicator.
  static absl::StatusOr<DispatchPlan> Build(const DispatchPlanInputs& inputs, Workspace& workspace,
                                            Stream& stream);

  // This plan with its (device) arrays in `workspace`, memory of the stream's device; enqueues
  // their copies. On a CPU: this plan.
  absl::StatusOr<DispatchPlan> OnDevice(Workspace& workspace, Stream& stream) const;

  // The same plan for staged dispatchers, built by the device of `stream`, whose memory `comm`
  // moves: (device) arrays and those of `routing` are memory of that device. The slots are sorted
  // there (kernels/expert_sort) into `workspace`; `host_workspace` is for tables. No row have ids
  // out of range, as those of identity experts, and an expert's slots beyond padded_rows;
  // slot_offset must ascend from 0 to the slots, which the host does not see.
  // Several ranks: the exchanges are enqueued. The host waits once, for the counts; with B above 4
  // twice.
  // One rank: enqueues; the host does not wait and does not learn how many slots travel. So the
  // plan has one chunk with a row for every slot, of which those that no slot takes are last and
  // empty: -1 as their token and slot. Without padding, offsets and counts are on the device only.
  // Errors: as Build, but for these; kInvalidArgument if E or d*R are above kMaxSortedExperts;
  // kUnimplemented with reads_peers or node_size.
  static absl::StatusOr<DispatchPlan> BuildOnDevice(const DispatchPlanInputs& inputs,
                                                    Workspace& host_workspace, Workspace& workspace,
                                                    Stream& stream);

  int chunks() const { return chunks_; }                        // d
  int ranks() const { return ranks_; }                          // R
  int rank() const { return rank_; }                            // the rank whose plan this is
  bool reads_peers() const { return reads_peers_; }             // as in the options
  int node_size() const { return node_size_; }                  // as in the options
  int64_t tokens() const { return tokens_; }                    // T
  int64_t slots() const { return Size(home_row_of_slot_); }     // slots of the routing
  int64_t send_rows() const { return send_begin_.back(); }      // S, all chunks
  int64_t recv_rows() const { return recv_begin_.back(); }      // received rows, all chunks
  int64_t expert_rows() const { return expert_begin_.back(); }  // N, all chunks
  int64_t return_rows() const {
    return Size(home_slot_);
  }  // rows that come home = kept slots (or padded)
  // [d + 1] local expert ids
  absl::Span<const int32_t> chunk_first_expert() const { return chunk_first_expert_; }

  // [L + 1] expert l reads expert rows expert_offsets[l] .. expert_offsets[l + 1].
  const GroupOffsets& expert_offsets() const { return expert_offsets_; }
  // [L * G + 1] row offsets per (local expert, segment); G = R * B segments, one per (source rank,
  // micro-batch), ascending: a weight gradient's partials run over exactly one of these.
  const GroupOffsets& segment_offsets() const { return segment_offsets_; }
  int64_t segments() const { return segments_; }  // G

  // [B, E of the routed experts] slots of this rank that travel, by micro-batch and expert; memory
  // of the device for BuildOnDevice of one rank.
  absl::Span<const int32_t> kept_slots() const { return kept_slots_; }

  // (device) [T + 1] slots of each token: the routing's own, borrowed from it unless copied to a
  // device; for one rank.
  absl::Span<const int64_t> slot_offset() const { return slot_offset_; }
  // (device) [slots] row of home_rows where the slot's expert row comes back; -1 = dropped or
  // identity.
  absl::Span<const int32_t> home_row_of_slot() const { return home_row_of_slot_; }

  // --- What dispatchers move by. Rows of a chunk are [begin(c), begin(c + 1)) of their kind.

  int64_t send_begin(int chunk) const { return At(send_begin_, chunk); }
  int64_t recv_begin(int chunk) const { return At(recv_begin_, chunk); }
  int64_t expert_begin(int chunk) const { return At(expert_begin_, chunk); }
  int64_t home_begin(int chunk) const { return At(home_begin_, chunk); }

  // (device) [home rows of the chunk] slot of each, -1 = an empty place.
  absl::Span<const int32_t> home_slot(int chunk) const {
    return Part(home_slot_, home_begin(chunk), home_begin(chunk + 1));
  }
  absl::Span<const int32_t> home_slot() const { return home_slot_; }  // all chunks

  // For several ranks that read no peers: what is sent and what is received.
  // (device) [send rows of the chunk] token that each carries; -1 = an empty place.
  absl::Span<const int32_t> send_token(int chunk) const {
    return Part(send_token_, send_begin(chunk), send_begin(chunk + 1));
  }
  // (device) [expert rows of the chunk] row among the chunk's received rows that each is a copy of.
  absl::Span<const int32_t> expert_source(int chunk) const {
    return Part(expert_source_, expert_begin(chunk), expert_begin(chunk + 1));
  }
  // (device) [expert rows of the chunk] the chunk's return row that carries each home.
  absl::Span<const int32_t> return_place(int chunk) const {
    return Part(return_place_, expert_begin(chunk), expert_begin(chunk + 1));
  }
  // Its inverse, for one rank too: (device) [return rows of the chunk] expert row (of all N) that
  // each carries home.
  absl::Span<const int32_t> return_order(int chunk) const {
    return Part(return_order_, expert_begin(chunk), expert_begin(chunk + 1));
  }

  // Where rows are relayed, empty otherwise: [R / node_size] rows that this rank sends to each
  // node, and that come to it from each, which it relays.
  absl::Span<const int32_t> rail_sent(int chunk) const { return OfNodes(rail_sent_, chunk); }
  absl::Span<const int32_t> rail_received(int chunk) const {
    return OfNodes(rail_received_, chunk);
  }
  // [rows of the chunk that this rank relays, by (local rank of the destination, source's node,
  // token)] row among those that came, by node, that each is a copy of.
  absl::Span<const int32_t> relay_source(int chunk) const {
    if (relay_source_.empty()) return relay_source_;
    return Part(relay_source_, At(relay_begin_, chunk), At(relay_begin_, chunk + 1));
  }

  // To read peers, or for one rank: (device) [expert rows of the chunk] token that each is at the
  // rank it comes from; -1 = an empty place.
  absl::Span<const int32_t> expert_token(int chunk) const {
    return Part(expert_token_, expert_begin(chunk), expert_begin(chunk + 1));
  }
  // To read peers: the rank that each comes from, and the home row to which it returns there.
  absl::Span<const int32_t> expert_peer(int chunk) const {
    return Part(expert_peer_, expert_begin(chunk), expert_begin(chunk + 1));
  }
  absl::Span<const int32_t> expert_home_row(int chunk) const {
    return Part(expert_home_row_, expert_begin(chunk), expert_begin(chunk + 1));
  }
  // (device) [home rows of the chunk] rank that computes each, and the expert row it is there (of
  // all N).
  absl::Span<const int32_t> home_peer(int chunk) const {
    return Part(home_peer_, home_begin(chunk), home_begin(chunk + 1));
  }
  absl::Span<const int32_t> home_source(int chunk) const {
    return Part(home_source_, home_begin(chunk), home_begin(chunk + 1));
  }

  // First expert row of local expert `expert` that comes from `source`; SourceBegin(expert, R) is
  // the first expert row of the next expert.
  int64_t SourceBegin(int64_t expert, int source) const {
    return At(segment_offsets_.host(), expert * segments_ + source * (segments_ / ranks_));
  }
  // Home row, at rank `source`, of its first row for local expert `expert`; the others follow it.
  int64_t PeerHomeRow(int64_t expert, int source) const {
    return At(peer_home_row_, expert * ranks_ + source);
  }

  // Rows that `destination` receives of `source` in this chunk (known for every pair), and expert
  // rows of `destination` that come from `source`; as many return from there.
  int64_t SendRows(int chunk, int source, int destination) const {
    return At(send_table_, PairAt(chunk, source, destination));
  }
  int64_t ExpertRows(int chunk, int source, int destination) const {
    return At(expert_table_, PairAt(chunk, source, destination));
  }

  // The largest T, return_rows() and expert_rows() of any rank: the size of peer memory.
  int64_t max_tokens() const { return max_tokens_; }
  int64_t max_return_rows() const { return max_return_rows_; }
  int64_t max_expert_rows() const { return max_expert_rows_; }

 private:
  friend class DispatchPlanBuilder;
  DispatchPlan() = default;
  static absl::StatusOr<DispatchPlan> OneRankOnDevice(const DispatchPlanInputs& inputs,
                                                      Workspace& host_workspace,
                                                      Workspace& workspace, Stream& stream);

  int64_t PairAt(int chunk, int source, int destination) const {
    return (int64_t{source} * chunks_ + chunk) * ranks_ + destination;
  }
  template <typename T>
  static T At(absl::Span<const T> values, int64_t i) {
    return values[static_cast<size_t>(i)];
  }
  template <typename T>
  static int64_t Size(absl::Span<T> all) {
    return static_cast<int64_t>(all.size());
  }
  static absl::Span<const int32_t> Part(absl::Span<const int32_t> all, int64_t begin, int64_t end) {
    if (all.empty()) return all;
    return all.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  }

  absl::Span<const int32_t> OfNodes(absl::Span<const int32_t> counts, int chunk) const {
    if (counts.empty()) return counts;
    const int nodes = ranks_ / node_size_;
    return Part(counts, int64_t{chunk} * nodes, int64_t{chunk + 1} * nodes);
  }

  int chunks_ = 1, ranks_ = 1, rank_ = 0, node_size_ = 0;
  bool reads_peers_ = false;
  int64_t tokens_ = 0, segments_ = 0;
  int64_t max_tokens_ = 0, max_return_rows_ = 0, max_expert_rows_ = 0;
  absl::Span<const int32_t> chunk_first_expert_;
  absl::Span<const int64_t> send_begin_, recv_begin_, home_begin_, expert_begin_;  // [d + 1]
  absl::Span<const int64_t> slot_offset_;
  GroupOffsets expert_offsets_, segment_offsets_;
  absl::Span<const int64_t> peer_home_row_;
  absl::Span<const int32_t> home_row_of_slot_, home_slot_, home_peer_, home_source_;
  absl::Span<const int32_t> send_token_, expert_source_, expert_peer_, expert_token_,
      expert_home_row_, return_order_, return_place_;
  absl::Span<const int32_t> kept_slots_, send_table_, expert_table_;  // tables: [R, d, R]
  absl::Span<const int32_t> rail_sent_, rail_received_;               // [d, R / node_size]
  absl::Span<const int32_t> relay_source_;
  absl::Span<const int64_t> relay_begin_;  // [d + 1]
};

}  // namespace moe

#endif  // MOE_DISPATCH_DISPATCH_PLAN_H_
