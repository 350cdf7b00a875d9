// The rest of a plan: what ranks tell each other, and this rank's rows as the experts' rank.
#include <algorithm>
#include <limits>
#include <numeric>

#include <absl/strings/str_cat.h>

#include "dispatch/dispatch_plan_builder.h"
#include "kernels/base/status_macros.h"

namespace moe {

int64_t DispatchPlanBuilder::SegmentRows(int source, int64_t b, int64_t expert) const {
  if (padded()) return routing_.padded_rows;
  const int64_t pairs = int64_t{plan_.chunks_} * plan_.ranks_;
  return messages_[source * plan_.send_stride_ + kHeaderSize + pairs + b * routed_ + expert];
}

absl::Status DispatchPlanBuilder::GatherCounts(Stream& stream) {
  message_[kTokens] = static_cast<int32_t>(plan_.tokens_);
  message_[kPaddedRows] = static_cast<int32_t>(routing_.padded_rows);
  message_[kChunks] = plan_.chunks_;
  message_[kReturnRows] = static_cast<int32_t>(plan_.return_rows());
  const auto length = static_cast<int64_t>(message_.size());
  absl::Span<int32_t> messages;
  MOE_RETURN_IF_ERROR(Take<int32_t>(length * plan_.ranks_, 0, messages));
  MOE_RETURN_IF_ERROR(Exchange(message_, messages, stream, [&](auto send, auto recv) {
    return comm_.AllGather<int32_t>(send, recv, stream);
  }));
  messages_ = messages;
  plan_.send_stride_ = length;
  plan_.send_table_ = messages_.subspan(kHeaderSize);
  return CheckAgreement();
}

absl::Status DispatchPlanBuilder::CheckAgreement() const {
  for (int r = 0; r < plan_.ranks_; ++r) {
    const auto other = messages_.subspan(r * plan_.send_stride_, kHeaderSize);
    for (const Header field : {kPaddedRows, kChunks}) {
      // Against rank 0, so that all ranks say the same.
      if (other[field] == messages_[field]) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "DispatchPlan: ", field == kChunks ? "overlap degree " : "padded_rows ", other[field],
          " on rank ", r, ", expected ", messages_[field], " as on rank 0"));
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
    const auto other = messages_.subspan(r * plan_.send_stride_, kHeaderSize);
    plan_.max_tokens_ = std::max<int64_t>(plan_.max_tokens_, other[kTokens]);
    plan_.max_return_rows_ = std::max<int64_t>(plan_.max_return_rows_, other[kReturnRows]);
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
  const int64_t pairs = int64_t{plan_.chunks_} * plan_.ranks_;
  absl::Span<int32_t> expert_table;
  absl::Span<int64_t> peer_home_row, recv_begin;
  MOE_RETURN_IF_ERROR(Take<int32_t>(plan_.ranks_ * pairs, 0, expert_table));
  MOE_RETURN_IF_ERROR(Take<int64_t>(local * plan_.ranks_, 0, peer_home_row));
  MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.chunks_ + 1, 0, recv_begin));
  for (int source = 0; source < plan_.ranks_; ++source) {
    int64_t home_row = 0;
    ForEachExpert([&](int c, int r, int64_t e) {
      if (r == plan_.rank_) peer_home_row[(e - first) * plan_.ranks_ + source] = home_row;
      const int64_t rows = RowsOf(source, e);
      expert_table[source * pairs + c * plan_.ranks_ + r] += static_cast<int32_t>(rows);
      home_row += rows;
    });
  }
  for (int c = 0; c < plan_.chunks_; ++c) {
    recv_begin[c + 1] = recv_begin[c];
    for (int r = 0; r < plan_.ranks_; ++r) {
      recv_begin[c + 1] += plan_.SendRows(c, r, plan_.rank_);
    }
  }
  plan_.expert_table_ = expert_table;
  plan_.peer_home_row_ = peer_home_row;
  plan_.recv_begin_ = recv_begin;
  return absl::OkStatus();
}

// Tells every expert's rank the token of each row it will get, by (expert, token, choice).
absl::Status DispatchPlanBuilder::ExchangeTokens(Stream& stream) {
  absl::Span<int64_t> send_counts, recv_counts;
  MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.ranks_, 0, send_counts));
  MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.ranks_, 0, recv_counts));
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), expert_source_));
  for (int r = 0; r < plan_.ranks_; ++r) {
    for (int c = 0; c < plan_.chunks_; ++c) {
      send_counts[r] += plan_.ExpertRows(c, plan_.rank_, r);
      recv_counts[r] += plan_.ExpertRows(c, r, plan_.rank_);
    }
  }
  return Exchange(home_source_, expert_source_, stream, [&](auto send, auto recv) {
    return comm_.AllToAllV<int32_t>(send, send_counts, recv, recv_counts, stream);
  });
}

absl::Status DispatchPlanBuilder::OrderExpertRows() {
  const int64_t local = placement_.LocalExperts(plan_.rank_);
  absl::Span<int32_t> peer, home_row, return_order, return_place;
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), expert_token_));
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), peer));
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), home_row));
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), return_order));
  MOE_RETURN_IF_ERROR(Take(plan_.expert_rows(), return_place));
  // Tokens came by (source, expert); experts want (expert, source).
  int64_t from = 0;
  for (int r = 0; r < plan_.ranks_; ++r) {
    for (int64_t l = 0; l < local; ++l) {
      const int64_t first = plan_.SourceBegin(l, r), end = plan_.SourceBegin(l, r + 1);
      std::copy_n(expert_source_.begin() + from, end - first, expert_token_.begin() + first);
      std::iota(home_row.begin() + first, home_row.begin() + end,
                static_cast<int32_t>(plan_.PeerHomeRow(l, r)));
      std::fill(peer.begin() + first, peer.begin() + end, r);
      from += end - first;
    }
  }
  int64_t to = 0;
  for (int c = 0; c < plan_.chunks_; ++c) {
    for (int r = 0; r < plan_.ranks_; ++r) {
      for (int64_t l = chunk_first(plan_.rank_, c); l < chunk_first(plan_.rank_, c + 1); ++l) {
        const int64_t first = plan_.SourceBegin(l, r), end = plan_.SourceBegin(l, r + 1);
        std::iota(return_place.begin() + first, return_place.begin() + end,
                  static_cast<int32_t>(to - plan_.expert_begin(c)));
        std::iota(return_order.begin() + to, return_order.begin() + to + end - first,
                  static_cast<int32_t>(first));
        to += end - first;
      }
    }
  }
  plan_.expert_token_ = expert_token_;
  plan_.expert_peer_ = peer;
  plan_.expert_home_row_ = home_row;
  plan_.return_order_ = return_order;
  plan_.return_place_ = return_place;
  return FindExpertSources();
}

absl::Status DispatchPlanBuilder::FindExpertSources() {
  const WorkspaceScope scope(workspace_);
  absl::Span<int32_t> mark;
  MOE_RETURN_IF_ERROR(Take(plan_.max_tokens_, mark));
  for (int c = 0; c < plan_.chunks_; ++c) FindChunkSources(c, mark);
  plan_.expert_source_ = expert_source_;
  return absl::OkStatus();
}

// A source's received rows are the distinct tokens of the chunk's expert rows, ascending.
void DispatchPlanBuilder::FindChunkSources(int chunk, absl::Span<int32_t> mark) {
  const int64_t begin = chunk_first(plan_.rank_, chunk), end = chunk_first(plan_.rank_, chunk + 1);
  // Plain pointers: what peers sent is checked once.
  const int32_t* const token_of = expert_token_.data();
  int32_t* const source_of = expert_source_.data();
  int32_t received = 0;
  for (int r = 0; r < plan_.ranks_; ++r) {
    const auto for_each_row = [&](auto visit) {
      for (int64_t l = begin; l < end; ++l) {
        const int64_t last = plan_.SourceBegin(l, r + 1);
        for (int64_t n = plan_.SourceBegin(l, r); n < last; ++n) visit(n);
      }
    };
    if (padded()) {
      for_each_row([&](int64_t n) { source_of[n] = received++; });
      continue;
    }
    if (plan_.SendRows(chunk, r, plan_.rank_) == 0) continue;
    int32_t* const tokens = mark.data();
    const int64_t count = messages_[r * plan_.send_stride_ + kTokens];
    std::fill_n(tokens, count, 0);
    for_each_row([=](int64_t n) {
      MOE_CHECK(token_of[n] >= 0 && token_of[n] < count);  // a peer sent it
      tokens[token_of[n]] = 1;
    });
    for (int64_t t = 0; t < count; ++t) {  // one that did not come gets a number nobody reads
      received += tokens[t];
      tokens[t] = received - 1;
    }
    for_each_row([=](int64_t n) { source_of[n] = tokens[token_of[n]]; });
  }
  MOE_CHECK(received == plan_.recv_begin(chunk + 1) - plan_.recv_begin(chunk));
}

// Which expert row, at its rank, each home row is.
absl::Status DispatchPlanBuilder::FindHomeSources() {
  absl::Span<int32_t> peer;
  MOE_RETURN_IF_ERROR(Take(plan_.return_rows(), peer));
  WorkspaceScope scope(workspace_);
  absl::Span<int64_t> remote;
  MOE_RETURN_IF_ERROR(Take<int64_t>(routed_, 0, remote));
  for (int r = 0; r < plan_.ranks_; ++r) {
    int64_t rows = 0;
    for (int64_t e = placement_.FirstExpert(r); e < placement_.FirstExpert(r + 1); ++e) {
      for (int source = 0; source < plan_.ranks_; ++source) {
        if (source == plan_.rank_) remote[e] = rows;
        rows += RowsOf(source, e);
      }
    }
  }
  int64_t home_row = 0;
  ForEachExpert([&](int, int r, int64_t e) {
    const int64_t end = home_row + RowsOf(plan_.rank_, e);
    std::fill(peer.begin() + home_row, peer.begin() + end, r);
    std::iota(home_source_.begin() + home_row, home_source_.begin() + end,
              static_cast<int32_t>(remote[e]));
    home_row = end;
  });
  plan_.home_peer_ = peer;
  plan_.home_source_ = home_source_;
  return absl::OkStatus();
}

}  // namespace moe
