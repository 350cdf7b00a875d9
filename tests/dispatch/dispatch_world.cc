#include "tests/dispatch/dispatch_world.h"

#include <algorithm>
#include <set>

#include "kernels/base/rng.h"

namespace moe::testing {

Routing World::view(int rank) const {
  const RankRouting& r = routing[rank];
  return {.slot_offset = r.slot_offset,
          .expert = r.expert,
          .weight = r.weight,
          .dropped = r.dropped,
          .num_experts = num_experts,
          .num_routed_experts = experts,
          .padded_rows = padded_rows};
}

bool World::Kept(int rank, int64_t slot) const {
  return routing[rank].dropped[slot] == 0 && routing[rank].expert[slot] < experts;
}

int32_t World::FirstExpert(int rank) const {
  int32_t first = 0;
  for (int r = 0; r < rank; ++r) first += experts / ranks + (r < experts % ranks ? 1 : 0);
  return first;
}

int World::Owner(int32_t expert) const {
  int rank = 0;
  while (FirstExpert(rank + 1) <= expert) ++rank;
  return rank;
}

int World::ChunkOf(int32_t expert) const {
  const int owner = Owner(expert);
  const int32_t first = FirstExpert(owner), local = FirstExpert(owner + 1) - first;
  for (int c = 0;; ++c) {
    if (expert - first < local * (c + 1) / chunks) return c;
  }
}

std::vector<std::vector<OracleRow>> World::Segments(int32_t expert, int source) const {
  const RankRouting& r = routing[source];
  std::vector<std::vector<OracleRow>> segments(micro_batches);
  for (int64_t b = 0; b < micro_batches; ++b) {
    for (int64_t t = r.micro_batch_offsets[b]; t < r.micro_batch_offsets[b + 1]; ++t) {
      for (int64_t s = r.slot_offset[t]; s < r.slot_offset[t + 1]; ++s) {
        if (Kept(source, s) && r.expert[s] == expert) segments[b].push_back({source, t, s});
      }
    }
    if (padded_rows > 0) segments[b].resize(padded_rows, {source, -1, -1});
  }
  return segments;
}

std::vector<OracleRow> World::ExpertRows(int rank) const {
  std::vector<OracleRow> rows;
  for (int32_t e = FirstExpert(rank); e < FirstExpert(rank + 1); ++e) {
    for (int source = 0; source < ranks; ++source) {
      for (const auto& segment : Segments(e, source)) {
        rows.insert(rows.end(), segment.begin(), segment.end());
      }
    }
  }
  return rows;
}

std::vector<int64_t> World::SendTokens(int chunk, int source, int destination) const {
  std::vector<int64_t> tokens;
  for (int32_t e = FirstExpert(destination); e < FirstExpert(destination + 1); ++e) {
    if (ChunkOf(e) != chunk) continue;
    for (const auto& segment : Segments(e, source)) {
      for (const OracleRow& row : segment) tokens.push_back(row.token);
    }
  }
  if (padded_rows > 0) return tokens;
  const std::set<int64_t> distinct(tokens.begin(), tokens.end());
  return {distinct.begin(), distinct.end()};
}

std::vector<OracleRow> World::HomeRows(int home) const {
  std::vector<OracleRow> rows;
  for (int c = 0; c < chunks; ++c) {
    for (int32_t e = 0; e < experts; ++e) {  // ascending experts are ascending ranks
      if (ChunkOf(e) != c) continue;
      for (const auto& segment : Segments(e, home)) {
        rows.insert(rows.end(), segment.begin(), segment.end());
      }
    }
  }
  return rows;
}

int64_t World::HomeBegin(int home, int32_t expert) const {
  int64_t rows = 0;
  for (int32_t e = 0; e < experts; ++e) {
    const int chunk = ChunkOf(e), wanted = ChunkOf(expert);
    if (chunk > wanted || (chunk == wanted && e >= expert)) continue;
    for (const auto& segment : Segments(e, home)) rows += static_cast<int64_t>(segment.size());
  }
  return rows;
}

World MakeWorld(const WorldCase& c) {
  World w{.experts = c.experts,
          .num_experts = c.experts + c.identity_experts,
          .ranks = c.ranks,
          .micro_batches = c.micro_batches};
  w.chunks = std::max(1, std::min(c.overlap, w.experts / w.ranks + (w.experts % w.ranks > 0)));
  for (int r = 0; r < c.ranks; ++r) {
    RankRouting rank;
    const int64_t tokens = c.tokens[r % c.tokens.size()];
    rank.slot_offset.push_back(0);
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<int32_t> ids(w.num_experts);
      for (int32_t e = 0; e < w.num_experts; ++e) ids[e] = e;
      const RandomKey key = {.seed = c.seed, .step = uint64_t(r), .item = static_cast<uint64_t>(t)};
      uint32_t draw = 0;
      for (int32_t k = 0; k < c.top_k; ++k) {  // a partial shuffle: K distinct experts
        const auto left = static_cast<uint32_t>(w.num_experts - k);
        std::swap(ids[k], ids[k + static_cast<int32_t>(Random4(key, draw++)[0] % left)]);
      }
      if (c.only_expert >= 0) {
        std::swap(ids[0], *std::find(ids.begin(), ids.end(), c.only_expert));
      }
      for (int32_t k = 0; k < c.top_k; ++k) {
        rank.expert.push_back(ids[k]);
        rank.dropped.push_back(Uniform(key, 1000 + static_cast<uint32_t>(k)) < c.drop ? 1 : 0);
        rank.weight.push_back(rank.dropped.back() ? 0.0f
                                                  : static_cast<float>(Normal(key, 500 + k)));
      }
      rank.slot_offset.push_back(static_cast<int64_t>(rank.expert.size()));
    }
    // Uneven micro-batches: the first is empty on odd ranks, the rest as even as they come.
    for (int64_t b = 0; b <= c.micro_batches; ++b) {
      const int64_t even = tokens * b / c.micro_batches;
      rank.micro_batch_offsets.push_back(r % 2 == 1 && b == 1 && c.micro_batches > 1 ? 0 : even);
    }
    w.routing.push_back(std::move(rank));
  }
  if (!c.padded) return w;
  size_t most = 0;
  for (int r = 0; r < c.ranks; ++r) {
    for (int32_t e = 0; e < w.experts; ++e) {
      for (const auto& segment : w.Segments(e, r)) most = std::max(most, segment.size());
    }
  }
  w.padded_rows = static_cast<int64_t>(most) + 1;  // every segment has an empty place
  return w;
}

std::map<int, std::vector<WorldCase>> WorldCases(int max_ranks) {
  std::map<int, std::vector<WorldCase>> cases;
  uint64_t seed = 0;
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    if (ranks > max_ranks) continue;
    const auto add = [&](WorldCase c) {
      c.ranks = ranks;
      c.seed = ++seed;
      cases[ranks].push_back(std::move(c));
    };
    add({.name = "even", .experts = 2 * ranks, .tokens = {16}});
    add({.name = "uneven experts and tokens", .experts = 13, .top_k = 3, .tokens = {9, 0, 17, 4}});
    add({.name = "more ranks than experts", .experts = 3, .tokens = {5, 7}});
    add({.name = "every expert", .experts = 6, .top_k = 6, .tokens = {4, 3}, .overlap = 2});
    add({.name = "one hot expert", .experts = 5, .top_k = 1, .tokens = {11}, .only_expert = 3});
    add({.name = "drops and identity experts",
         .experts = 7,
         .identity_experts = 3,
         .top_k = 4,
         .tokens = {12, 5},
         .drop = 0.3});
    add({.name = "everything dropped", .experts = 4, .tokens = {6}, .drop = 1.1});
    add({.name = "no tokens at all", .experts = 4, .tokens = {0}, .micro_batches = 2});
    for (const int overlap : {1, 2, 4}) {
      add({.name = "micro-batches",
           .experts = 4 * ranks + 1,
           .top_k = 4,
           .tokens = {20, 13, 0},
           .micro_batches = 3,
           .overlap = overlap});
      add({.name = "padded",
           .experts = 2 * ranks + 1,
           .top_k = 2,
           .tokens = {10, 0, 7},
           .micro_batches = 2,
           .overlap = overlap,
           .drop = 0.2,
           .padded = true});
    }
  }
  return cases;
}

}  // namespace moe::testing
