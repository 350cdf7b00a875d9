// The rows that a rank relays in hierarchical dispatch: from the ranks of its rail, one on each
// node, to the ranks of its node.
#include <algorithm>

#include "dispatch/dispatch_plan_builder.h"
#include "kernels/base/status_macros.h"

namespace moe {

int64_t DispatchPlanBuilder::RelayedRows(int chunk, int source, int relay) const {
  const int node_size = options_.node_size;
  if (!relays() || source % node_size != relay % node_size) return 0;
  const int first = relay / node_size * node_size;
  int64_t rows = 0;
  for (int r = first; r < first + node_size; ++r) rows += plan_.SendRows(chunk, source, r);
  return rows;
}

// The values for each rank, and behind those for a rank of the rail the places of the rows that it
// relays, by (chunk, local rank of the destination, token).
absl::StatusOr<absl::Span<const int32_t>> DispatchPlanBuilder::WithPlaces(
    absl::Span<const int32_t> values) {
  absl::Span<int32_t> message;
  absl::Span<int64_t> next;  // [d] of the places for the next node
  MOE_RETURN_IF_ERROR(Take(std::ssize(values) + std::ssize(places_), message));
  MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.chunks_, 0, next));
  for (int c = 1; c < plan_.chunks_; ++c) {
    next[c] = next[c - 1];
    for (int r = 0; r < plan_.ranks_; ++r) next[c] += plan_.SendRows(c - 1, plan_.rank_, r);
  }
  auto value = values.begin();
  auto to = message.begin();
  for (int r = 0; r < plan_.ranks_; ++r) {
    for (int c = 0; c < plan_.chunks_; ++c) {
      const int64_t rows = plan_.ExpertRows(c, plan_.rank_, r);
      to = std::copy_n(value, rows, to);
      value += rows;
    }
    for (int c = 0; c < plan_.chunks_; ++c) {
      const int64_t rows = RelayedRows(c, plan_.rank_, r);
      to = std::copy_n(places_.begin() + next[c], rows, to);
      next[c] += rows;
    }
  }
  return message;
}

absl::Status DispatchPlanBuilder::OrderRelays() {
  const int node_size = options_.node_size, me = plan_.rank_;
  const int nodes = plan_.ranks_ / node_size, local = me % node_size, node = me / node_size;
  absl::Span<int32_t> received, source, first_row;
  absl::Span<int64_t> begin, next;  // next: [nodes] of the places in received_
  MOE_RETURN_IF_ERROR(Take(int64_t{plan_.chunks_} * nodes, received));
  MOE_RETURN_IF_ERROR(Take<int64_t>(plan_.chunks_ + 1, 0, begin));
  MOE_RETURN_IF_ERROR(Take(nodes, next));
  MOE_RETURN_IF_ERROR(Take(nodes, first_row));
  int64_t place = 0;
  for (int r = 0; r < plan_.ranks_; ++r) {
    for (int c = 0; c < plan_.chunks_; ++c) place += plan_.ExpertRows(c, r, me);
    if (r % node_size == local) next[r / node_size] = place;
    for (int c = 0; c < plan_.chunks_; ++c) {
      place += RelayedRows(c, r, me);
      begin[c + 1] += RelayedRows(c, r, me);
    }
  }
  for (int c = 0; c < plan_.chunks_; ++c) begin[c + 1] += begin[c];
  MOE_RETURN_IF_ERROR(Take(begin.back(), source));
  auto to = source.begin();
  for (int c = 0; c < plan_.chunks_; ++c) {
    int32_t row = 0;
    for (int m = 0; m < nodes; ++m) {
      // Each row that comes is relayed, so that the last one's place tells how many do.
      const int64_t relayed = RelayedRows(c, m * node_size + local, me);
      int32_t rows = 0;
      for (const int32_t at : received_.subspan(next[m], relayed)) {
        MOE_CHECK(at >= 0 && at < relayed);  // a peer sent it
        rows = std::max(rows, at + 1);
      }
      received[int64_t{c} * nodes + m] = rows;
      first_row[m] = row;
      row += rows;
    }
    for (int r = node * node_size; r < (node + 1) * node_size; ++r) {
      for (int m = 0; m < nodes; ++m) {
        const int64_t rows = plan_.SendRows(c, m * node_size + local, r);
        for (const int32_t at : received_.subspan(next[m], rows)) *to++ = first_row[m] + at;
        next[m] += rows;
      }
    }
  }
  plan_.rail_received_ = received;
  plan_.relay_source_ = source;
  plan_.relay_begin_ = begin;
  return absl::OkStatus();
}

}  // namespace moe
