// Routings of a whole group and where their rows must end up, by brute force: every rank of a test
// sees all ranks' choices and works out the answer without exchanging anything.
#ifndef MOE_TESTS_DISPATCH_DISPATCH_WORLD_H_
#define MOE_TESTS_DISPATCH_DISPATCH_WORLD_H_

#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "gating/routing.h"

namespace moe::testing {

struct WorldCase {
  std::string name;
  int ranks = 1;
  int32_t experts = 4;           // routed
  int32_t identity_experts = 0;  // ids above the routed ones
  int32_t top_k = 2;
  std::vector<int64_t> tokens = {8};  // of rank r: tokens[r % size]
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

  Routing view(int rank) const;
  bool Kept(int rank, int64_t slot) const;
  int32_t FirstExpert(int rank) const;  // contiguous blocks, the first E mod R one longer
  int Owner(int32_t expert) const;
  int ChunkOf(int32_t expert) const;

  // Rows of `expert` from `source`, micro-batch by micro-batch.
  std::vector<std::vector<OracleRow>> Segments(int32_t expert, int source) const;
  // All rows that `rank`'s experts read, in order.
  std::vector<OracleRow> ExpertRows(int rank) const;
  // Tokens that `source` sends to `destination` in `chunk`; -1 = an empty place.
  std::vector<int64_t> SendTokens(int chunk, int source, int destination) const;
  // Rows for `home`'s slots in the order in which they come home.
  std::vector<OracleRow> HomeRows(int home) const;
  // Where those for `expert` begin in it.
  int64_t HomeBegin(int home, int32_t expert) const;
};

World MakeWorld(const WorldCase& c);

// The cases that every test of plans and dispatchers goes through, by group size, up to `max`.
std::map<int, std::vector<WorldCase>> WorldCases(int max_ranks);

}  // namespace moe::testing

#endif  // MOE_TESTS_DISPATCH_DISPATCH_WORLD_H_
