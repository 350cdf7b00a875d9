// Routings of a whole group and where their rows must end up, by brute force: every rank of a test
// sees all ranks' choices and works out the answer without exchanging anything.
#ifndef MOE_TESTS_DISPATCH_DISPATCH_WORLD_H_
#define MOE_TESTS_DISPATCH_DISPATCH_WORLD_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <absl/time/time.h>

#include "gating/routing.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/rng.h"

namespace moe::testing {

inline constexpr absl::Duration kTimeout = absl::Seconds(20);

struct WorldCase {
  std::string name;
  int ranks = 1;
  int32_t experts = 4;           // routed
  int32_t identity_experts = 0;  // ids above the routed ones
  int32_t top_k = 2;
  std::vector<int64_t> tokens = {8};  // rank r: tokens[r % size]
  int64_t micro_batches = 1;
  int overlap = 1;
  double drop = 0;           // share of slots dropped
  int32_t only_expert = -1;  // >= 0: every first choice is this one
  bool padded = false;
  uint64_t seed = 1;
};
inline std::ostream& operator<<(std::ostream& out, const WorldCase& c) {
  return out << c.name << ", " << c.ranks << " ranks, overlap " << c.overlap;
}

// One rank's routing with its memory.
struct RankRouting {
  std::vector<int64_t> slot_offset, micro_batch_offsets;
  std::vector<int32_t> expert;
  std::vector<float> weight;
  std::vector<uint8_t> dropped;

  int64_t tokens() const { return static_cast<int64_t>(slot_offset.size()) - 1; }
};

// A row for an expert; token -1 = an empty place of capacity padding.
struct OracleRow {
  int source = 0;
  int64_t token = -1;
  int64_t slot = -1;
  bool operator==(const OracleRow&) const = default;
};

struct World {
  int32_t experts = 0, num_experts = 0;  // routed, all
  int ranks = 0, chunks = 1;
  int64_t micro_batches = 1, padded_rows = 0;
  std::vector<RankRouting> routing;  // [R]

  Routing view(int rank) const {
    const RankRouting& r = routing[rank];
    return {.slot_offset = r.slot_offset,
            .expert = r.expert,
            .weight = r.weight,
            .dropped = r.dropped,
            .num_experts = num_experts,
            .num_routed_experts = experts,
            .padded_rows = padded_rows};
  }

  // view(rank) with its arrays in `workspace`, memory of the stream's device.
  absl::StatusOr<Routing> OnDevice(int rank, Workspace& workspace, Stream& stream) const {
    Routing there = view(rank);
    MOE_ASSIGN_OR_RETURN(there.slot_offset, UploadArray(there.slot_offset, workspace, stream));
    MOE_ASSIGN_OR_RETURN(there.expert, UploadArray(there.expert, workspace, stream));
    MOE_ASSIGN_OR_RETURN(there.dropped, UploadArray(there.dropped, workspace, stream));
    return there;
  }

  bool Kept(int rank, int64_t slot) const {
    return routing[rank].dropped[slot] == 0 && routing[rank].expert[slot] < experts;
  }

  // Contiguous blocks, the first E mod R one longer.
  int32_t FirstExpert(int rank) const {
    int32_t first = 0;
    for (int r = 0; r < rank; ++r) first += experts / ranks + (r < experts % ranks ? 1 : 0);
    return first;
  }

  int Owner(int32_t expert) const {
    int rank = 0;
    while (FirstExpert(rank + 1) <= expert) ++rank;
    return rank;
  }

  int ChunkOf(int32_t expert) const {
    const int owner = Owner(expert);
    const int32_t first = FirstExpert(owner), local = FirstExpert(owner + 1) - first;
    for (int c = 0;; ++c) {
      if (expert - first < local * (c + 1) / chunks) return c;
    }
  }

  // Rows of `expert` from `source`, micro-batch by micro-batch.
  std::vector<std::vector<OracleRow>> Segments(int32_t expert, int source) const {
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

  // All rows that `rank`'s experts read, in order.
  std::vector<OracleRow> ExpertRows(int rank) const {
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

  // Tokens that `source` sends to `destination` in `chunk`; -1 = an empty place.
  std::vector<int64_t> SendTokens(int chunk, int source, int destination) const {
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

  // Rows for `home`'s slots in the order in which they come home.
  std::vector<OracleRow> HomeRows(int home) const {
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

  // First row for `expert` in HomeRows(home).
  int64_t HomeBegin(int home, int32_t expert) const {
    int64_t rows = 0;
    for (int32_t e = 0; e < experts; ++e) {
      const int chunk = ChunkOf(e), wanted = ChunkOf(expert);
      if (chunk > wanted || (chunk == wanted && e >= expert)) continue;
      for (const auto& segment : Segments(e, home)) rows += static_cast<int64_t>(segment.size());
    }
    return rows;
  }
};

inline World MakeWorld(const WorldCase& c) {
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

// An array of the stream's device.
template <typename T>
std::vector<T> ReadArray(absl::Span<const T> array, Stream& stream) {
  Workspace host;
  const auto copy = DownloadArray(array, host, stream);
  if (!copy.ok() || !stream.Synchronize().ok()) return {T{-99}};
  return {copy->begin(), copy->end()};
}

// The cases that every test of plans and dispatchers goes through, by group size, up to `max`.
inline std::map<int, std::vector<WorldCase>> WorldCases(int max_ranks) {
  std::map<int, std::vector<WorldCase>> cases;
  uint64_t seed = 0;
  for (const int ranks : {1, 2, 3, 4, 5, 6, 8}) {
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

#endif  // MOE_TESTS_DISPATCH_DISPATCH_WORLD_H_
