// The rest of a plan: what ranks tell each other, and this rank's rows as the experts' rank.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>

#include "dispatch/dispatch_plan_builder.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/status_macros.h"
#include "kernels/expert_sort/expert_rows.h"

namespace moe {

int32_t DispatchPlanBuilder::KeptSlots(int source, int64_t b, int64_t expert) const {
  const int64_t more = b - kMicroBatchesAtOnce;
  if (more >= 0) {
    const int64_t batches = micro_batches_ - kMicroBatchesAtOnce;
    return more_kept_[(source * batches + more) * routed_ + expert];
  }
  return messages_[source * first_length() + kHeaderSize + most_pairs() + b * routed_ + expert];
}

absl::Status DispatchPlanBuilder::Gather(absl::Span<const int32_t> send,
                                         absl::Span<const int32_t>& gathered, Stream& stream) {
  const int64_t length = std::ssize(send) * plan_.ranks_;
  absl::Span<int32_t> all;
  MOE_RETURN_IF_ERROR(TakeRows(length, all));
  MOE_RETURN_IF_ERROR(comm_.AllGather<int32_t>(send, all, stream, site_));
  gathered = all;
  if (device_ != nullptr) {
    MOE_ASSIGN_OR_RETURN(gathered, DownloadArray<int32_t>(all, workspace_, stream));
  }
  return stream.Synchronize();
}

absl::Status DispatchPlanBuilder::GatherCounts(Stream& stream) {
  MOE_RETURN_IF_ERROR(Gather(told_.first(first_length()), messages_, stream));
  MOE_RETURN_IF_ERROR(CheckAgreement());
  if (micro_batches_ > kMicroBatchesAtOnce) {
    MOE_RETURN_IF_ERROR(Gather(told_.subspan(first_length()), more_kept_, stream));
  }
  if (device_ == nullptr) return absl::OkStatus();
  for (int64_t i = 0; i < std::ssize(kept_); ++i) {
    kept_[i] = KeptSlots(plan_.rank_, i / routed_, i % routed_);
  }
  return absl::OkStatus();
}

absl::Status DispatchPlanBuilder::CheckAgreement() const {
  constexpr std::pair<Header, absl::string_view> kAlike[] = {{kMicroBatches, "micro-batches"},
                                                             {kPaddedRows, "padded_rows"},
                                                             {kChunks, "overlap degree"},
                                                             {kNodeSize, "node size"}};
  for (int r = 0; r < plan_.ranks_; ++r) {
    const auto other = messages_.subspan(r * first_length(), kHeaderSize);
    for (const auto& [field, name] : kAlike) {
      // Against rank 0, so that all ranks say the same.
      if (other[field] == messages_[field]) continue;
      return absl::InvalidArgumentError(absl::StrCat("DispatchPlan: ", name, " ", other[field],
                                                     " on rank ", r, ", expected ",
                                                     messages_[field], " as on rank 0"));
    }
  }
  return absl::OkStatus();
}

absl::Status DispatchPlanBuilder::SumCounts() {
  const int64_t experts = routed_;
  MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.ranks_ * experts, 0, rows_));
  for (int r = 0; r < plan_.ranks_; ++r) {
    for (int64_t b = 0; b < micro_batches_; ++b) {
      for (int64_t e = 0; e < experts; ++e) rows_[r * experts + e] += SegmentRows(r, b, e);
    }
  }
  for (int r = 0; r < plan_.ranks_; ++r) {
    const auto home = rows_.subspan(r * experts, experts);
    plan_.max_return_rows_ =
        std::max(plan_.max_return_rows_, std::accumulate(home.begin(), home.end(), int64_t{0}));
    plan_.max_tokens_ = std::max<int64_t>(plan_.max_tokens_, Tokens(r));
    int64_t rows = 0;
    for (int64_t e = placement_.FirstExpert(r); e < placement_.FirstExpert(r + 1); ++e) {
      for (int source = 0; source < plan_.ranks_; ++source) rows += RowsOf(source, e);
    }
    plan_.max_expert_rows_ = std::max(plan_.max_expert_rows_, rows);
  }
  if (plan_.max_expert_rows_ > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("DispatchPlan: ", plan_.max_expert_rows_,
                                                   " rows for the experts of one rank, expected "
                                                   "fewer than 2^31"));
  }
  MOE_RETURN_IF_ERROR(OrderSegments());
  return SumPairs();
}

// Row offsets of this rank's experts and of their segments.
absl::Status DispatchPlanBuilder::OrderSegments() {
  const int64_t first = placement_.FirstExpert(plan_.rank_);
  const int64_t local = placement_.LocalExperts(plan_.rank_);
  absl::Span<int32_t> chunk_first_expert;
  absl::Span<int64_t> expert_offsets, segment_offsets, expert_begin;
  MOE_RETURN_IF_ERROR(Take<int32_t>(plan_.chunks_ + 1, 0, chunk_first_expert));
  MOE_RETURN_IF_ERROR(Take(plan_.chunks_ + 1, expert_begin));
  MOE_RETURN_IF_ERROR(Take<int64_t>(local + 1, 0, expert_offsets));
  MOE_RETURN_IF_ERROR(Take<int64_t>(local * plan_.segments_ + 1, 0, segment_offsets));
  for (int c = 0; c <= plan_.chunks_; ++c) {
    chunk_first_expert[c] = static_cast<int32_t>(chunk_first(plan_.rank_, c));
  }
  int64_t segment = 0;
  for (int64_t l = 0; l < local; ++l) {
    for (int r = 0; r < plan_.ranks_; ++r) {
      for (int64_t b = 0; b < micro_batches_; ++b, ++segment) {
        segment_offsets[segment + 1] = segment_offsets[segment] + SegmentRows(r, b, first + l);
      }
    }
    expert_offsets[l + 1] = segment_offsets[segment];
  }
  for (int c = 0; c <= plan_.chunks_; ++c) expert_begin[c] = expert_offsets[chunk_first_expert[c]];
  plan_.chunk_first_expert_ = chunk_first_expert;
  plan_.expert_begin_ = expert_begin;
  plan_.expert_offsets_ = expert_offsets;
  plan_.segment_offsets_ = segment_offsets;
  return absl::OkStatus();
}

// Rows between every pair of ranks; where every source's home rows for my experts start.
absl::Status DispatchPlanBuilder::SumPairs() {
  const int64_t first = placement_.FirstExpert(plan_.rank_);
  const int64_t local = placement_.LocalExperts(plan_.rank_);
  const auto pairs = std::ssize(send_counts_);
  absl::Span<int32_t> expert_table, send_table;
  absl::Span<int64_t> peer_home_row;
  MOE_RETURN_IF_ERROR(Take<int32_t>(plan_.ranks_ * pairs, 0, expert_table));
  MOE_RETURN_IF_ERROR(Take<int64_t>(local * plan_.ranks_, 0, peer_home_row));
  for (int source = 0; source < plan_.ranks_; ++source) {
    int64_t home_row = 0;
    ForEachExpert([&](int c, int r, int64_t e) {
      if (r == plan_.rank_) peer_home_row[(e - first) * plan_.ranks_ + source] = home_row;
      const int64_t rows = RowsOf(source, e);
      expert_table[source * pairs + c * plan_.ranks_ + r] += static_cast<int32_t>(rows);
      home_row += rows;
    });
  }
  plan_.send_table_ = plan_.expert_table_ = expert_table;
  plan_.peer_home_row_ = peer_home_row;
  if (sends_once()) {
    MOE_RETURN_IF_ERROR(Take(plan_.ranks_ * pairs, send_table));
    for (int r = 0; r < plan_.ranks_; ++r) {
      const auto counts = messages_.subspan(r * first_length() + kHeaderSize, pairs);
      std::copy(counts.begin(), counts.end(), send_table.begin() + r * pairs);
    }
    plan_.send_table_ = send_table;
  }
  // Where each chunk's rows begin.
  absl::Span<int64_t> send_begin, recv_begin, home_begin;
  for (absl::Span<int64_t>* const begin : {&send_begin, &recv_begin, &home_begin}) {
    MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.chunks_ + 1, 0, *begin));
  }
  for (int c = 0; c < plan_.chunks_; ++c) {
    send_begin[c + 1] = send_begin[c];
    recv_begin[c + 1] = recv_begin[c];
    home_begin[c + 1] = home_begin[c];
    for (const int32_t rows : plan_.rail_sent(c)) send_begin[c + 1] += rows;
    for (int r = 0; r < plan_.ranks_; ++r) {
      if (!relays()) send_begin[c + 1] += plan_.SendRows(c, plan_.rank_, r);
      recv_begin[c + 1] += plan_.SendRows(c, r, plan_.rank_);
      home_begin[c + 1] += plan_.ExpertRows(c, plan_.rank_, r);
    }
  }
  // A device has room for every slot.
  plan_.home_slot_ = plan_.home_slot_.first(home_begin.back());
  if (sends_once()) plan_.send_token_ = plan_.send_token_.first(send_begin.back());
  plan_.send_begin_ = send_begin;
  plan_.recv_begin_ = recv_begin;
  plan_.home_begin_ = home_begin;
  return absl::OkStatus();
}

// Tells every expert's rank the value of each row it will get, by (expert, token, choice), and
// every rank that relays the places of the rows that it will send on.
absl::Status DispatchPlanBuilder::ExchangeValues(Stream& stream) {
  if (!exchanges()) return absl::OkStatus();
  absl::Span<int64_t> send_counts, recv_counts;
  MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.ranks_, 0, send_counts));
  MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.ranks_, 0, recv_counts));
  for (int r = 0; r < plan_.ranks_; ++r) {
    for (int c = 0; c < plan_.chunks_; ++c) {
      send_counts[r] += plan_.ExpertRows(c, plan_.rank_, r) + RelayedRows(c, plan_.rank_, r);
      recv_counts[r] += plan_.ExpertRows(c, r, plan_.rank_) + RelayedRows(c, r, plan_.rank_);
    }
  }
  MOE_RETURN_IF_ERROR(
      TakeRows(std::accumulate(recv_counts.begin(), recv_counts.end(), int64_t{0}), received_));
  absl::Span<const int32_t> send = values_.first(plan_.return_rows());
  if (relays()) {
    MOE_ASSIGN_OR_RETURN(send, WithPlaces(send));
  }
  MOE_RETURN_IF_ERROR(
      comm_.AllToAllV<int32_t>(send, send_counts, received_, recv_counts, stream, site_));
  return device_ != nullptr ? absl::OkStatus() : stream.Synchronize();
}

absl::StatusOr<absl::Span<const ExpertRun>> DispatchPlanBuilder::Runs() {
  const int64_t local = placement_.LocalExperts(plan_.rank_);
  absl::Span<ExpertRun> runs;
  absl::Span<int32_t> received;    // [R] the next of each source
  absl::Span<int32_t> source_row;  // [R] as in ExpertRun; with padding the next of each source
  MOE_RETURN_IF_ERROR(Take(local * plan_.ranks_, runs));
  MOE_RETURN_IF_ERROR(Take(plan_.ranks_, source_row));
  MOE_RETURN_IF_ERROR(Take<int32_t>(plan_.ranks_, 0, received));
  for (int r = 1; r < plan_.ranks_; ++r) {
    received[r] = received[r - 1];
    for (int c = 0; c < plan_.chunks_; ++c) {
      received[r] += static_cast<int32_t>(plan_.ExpertRows(c, r - 1, plan_.rank_) +
                                          RelayedRows(c, r - 1, plan_.rank_));
    }
  }
  auto run = runs.begin();
  int32_t return_row = 0;
  for (int c = 0; c < plan_.chunks_; ++c) {
    int32_t arrived = 0;
    for (int i = 0; i < plan_.ranks_; ++i) {
      source_row[SourceAt(i)] = arrived;
      arrived += static_cast<int32_t>(plan_.SendRows(c, SourceAt(i), plan_.rank_));
    }
    for (int r = 0; r < plan_.ranks_; ++r) {
      const auto sent = static_cast<int32_t>(plan_.SendRows(c, r, plan_.rank_));
      for (int64_t l = chunk_first(plan_.rank_, c); l < chunk_first(plan_.rank_, c + 1); ++l) {
        const int64_t first = plan_.SourceBegin(l, r);
        const auto rows = static_cast<int32_t>(plan_.SourceBegin(l, r + 1) - first);
        MOE_CHECK(rows == 0 || sent > 0);  // a peer told it
        *run++ = {.source = r,
                  .local = static_cast<int32_t>(l),
                  .rows = rows,
                  .expert_row = static_cast<int32_t>(first),
                  .return_row = return_row,
                  .chunk_row = static_cast<int32_t>(plan_.expert_begin(c)),
                  .received = received[r],
                  .source_row = source_row[r],
                  .source_rows = sent};
        return_row += rows;
        received[r] += rows;
        if (padded()) source_row[r] += rows;
      }
    }
  }
  return runs;
}

absl::Status DispatchPlanBuilder::OrderExpertRows(Stream& stream) {
  if (plan_.ranks_ == 1) return OrderRowsOfOneRank();
  MOE_RETURN_IF_ERROR(ExchangeValues(stream));
  MOE_ASSIGN_OR_RETURN(const auto runs, Runs());
  if (relays()) {
    MOE_RETURN_IF_ERROR(OrderRelays());
  }
  if (!plan_.reads_peers_) return OrderReturns(runs, stream);
  MOE_RETURN_IF_ERROR(FindPeers(runs));
  return FindHomeSources();
}

absl::Status DispatchPlanBuilder::OrderReturns(absl::Span<const ExpertRun> runs, Stream& stream) {
  absl::Span<int32_t> source, order, place;
  MOE_RETURN_IF_ERROR(TakeRows(plan_.expert_rows(), order));
  MOE_RETURN_IF_ERROR(TakeRows(plan_.expert_rows(), place));
  // Places of padding are received, and in the order of return rows where they take one hop.
  const bool differs = sends_once() || options_.node_size > 0;
  MOE_RETURN_IF_ERROR(TakeRows(differs ? plan_.expert_rows() : 0, source));
  plan_.return_order_ = order;
  plan_.return_place_ = place;
  plan_.expert_source_ = differs ? source : place;
  if (device_ != nullptr) {
    return moe::OrderExpertRows({.runs = runs,
                                 .received = received_,
                                 .return_order = order,
                                 .return_place = place,
                                 .source = source},
                                *device_, stream);
  }
  for (const ExpertRun& run : runs) {
    const auto returns = order.subspan(run.return_row, run.rows);
    const auto places = place.subspan(run.expert_row, run.rows);
    std::iota(returns.begin(), returns.end(), run.expert_row);
    std::iota(places.begin(), places.end(), run.return_row - run.chunk_row);
    if (!differs) continue;
    if (padded()) {
      const auto rows = source.subspan(run.expert_row, run.rows);
      std::iota(rows.begin(), rows.end(), run.source_row);
      continue;
    }
    const int32_t* const sent = received_.data() + run.received;
    int32_t* const row = source.data() + run.expert_row;
    for (int32_t i = 0; i < run.rows; ++i) {
      MOE_CHECK(sent[i] >= 0 && sent[i] < run.source_rows);  // a peer sent it
      row[i] = run.source_row + sent[i];
    }
  }
  return absl::OkStatus();
}

absl::Status DispatchPlanBuilder::FindPeers(absl::Span<const ExpertRun> runs) {
  absl::Span<int32_t> token, peer, home_row;
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), token));
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), peer));
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), home_row));
  for (const ExpertRun& run : runs) {
    const int64_t tokens = Tokens(run.source);
    const int32_t least = padded() ? -1 : 0;
    for (int32_t i = 0; i < run.rows; ++i) {
      const int32_t t = received_[run.received + i];
      MOE_CHECK(t >= least && t < tokens);  // a peer sent it
      token[run.expert_row + i] = t;
    }
    const auto fill = [&](absl::Span<int32_t> rows) {
      return rows.subspan(run.expert_row, run.rows);
    };
    const auto peers = fill(peer), home = fill(home_row);
    std::fill(peers.begin(), peers.end(), run.source);
    std::iota(home.begin(), home.end(),
              static_cast<int32_t>(plan_.PeerHomeRow(run.local, run.source)));
  }
  plan_.expert_token_ = token;
  plan_.expert_peer_ = peer;
  plan_.expert_home_row_ = home_row;
  return absl::OkStatus();
}

// Which expert row, at its rank, each home row is.
absl::Status DispatchPlanBuilder::FindHomeSources() {
  absl::Span<int32_t> peer, source;
  MOE_RETURN_IF_ERROR(Take(plan_.return_rows(), peer));
  MOE_RETURN_IF_ERROR(Take(plan_.return_rows(), source));
  const WorkspaceScope scope(workspace_);
  absl::Span<int64_t> remote;
  MOE_RETURN_IF_ERROR(Take<int64_t>(routed_, 0, remote));
  for (int r = 0; r < plan_.ranks_; ++r) {
    int64_t rows = 0;
    for (int64_t e = placement_.FirstExpert(r); e < placement_.FirstExpert(r + 1); ++e) {
      for (int from = 0; from < plan_.ranks_; ++from) {
        if (from == plan_.rank_) remote[e] = rows;
        rows += RowsOf(from, e);
      }
    }
  }
  int64_t home_row = 0;
  ForEachExpert([&](int, int r, int64_t e) {
    const int64_t end = home_row + RowsOf(plan_.rank_, e);
    std::fill(peer.begin() + home_row, peer.begin() + end, r);
    std::iota(source.begin() + home_row, source.begin() + end, static_cast<int32_t>(remote[e]));
    home_row = end;
  });
  plan_.home_peer_ = peer;
  plan_.home_source_ = source;
  return absl::OkStatus();
}

// Nothing is exchanged: home rows are expert rows.
absl::Status DispatchPlanBuilder::OrderRowsOfOneRank() {
  absl::Span<int32_t> own_row, own_rank;
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), own_row));
  std::iota(own_row.begin(), own_row.end(), 0);
  if (!plan_.reads_peers_) {
    plan_.return_order_ = own_row;
    plan_.slot_offset_ = routing_.slot_offset;
    return absl::OkStatus();
  }
  MOE_RETURN_IF_ERROR(Take<int32_t>(plan_.expert_rows(), 0, own_rank));
  plan_.home_source_ = plan_.expert_home_row_ = own_row;
  plan_.home_peer_ = plan_.expert_peer_ = own_rank;
  return absl::OkStatus();
}

}  // namespace moe
