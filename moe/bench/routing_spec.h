// How skewed the traffic of a benchmark is: what --routing says.
#ifndef MOE_MOE_BENCH_ROUTING_SPEC_H_
#define MOE_MOE_BENCH_ROUTING_SPEC_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/bench/replay.h"

namespace moe::bench {

struct RoutingSpec {
  enum Kind : uint8_t {
    kUniform,    // every pair the same
    kZipf,       // expert e is chosen with probability proportional to 1 / (e + 1)^S
    kHotExpert,  // expert 0 gets a share P, the other experts the rest evenly
    kHotRank,    // rank 0 gets a share P, the other ranks the rest evenly
    kRagged,     // ranks have 0 .. all of the tokens, at random; destinations are even
    kZeroRank,   // the last rank has no tokens; destinations are even
    kMatrix,     // given shares
    kTrace,      // recorded by moe train --record-routing, call by call
  };
  Kind kind = kUniform;
  double parameter = 0;                  // S or P
  std::string path;                      // of the matrix or trace
  std::vector<double> weights;           // [R][R] of the matrix, source by source
  std::shared_ptr<const Replay> replay;  // of the trace; shared by the ranks of a process
  std::string text = "uniform";
};

// "uniform", "zipf:S" (S >= 0), "hot_expert:P", "hot_rank:P" (0 <= P <= 1), "ragged", "zero_rank",
// "matrix:FILE" (read it with ParseTrafficMatrix), "trace:FILE" (ParseRoutingTrace, then Replay).
// kInvalidArgument for all else.
absl::StatusOr<RoutingSpec> ParseRouting(absl::string_view text);

// Calls that differ: the records of a trace, else one.
int64_t CallsOf(const RoutingSpec& routing);

// R lines of R numbers >= 0: line s, column d is what rank s has for rank d, in any unit. Numbers
// are separated by blanks or commas; '#' starts a comment. kInvalidArgument with line and reason.
absl::StatusOr<std::vector<double>> ParseTrafficMatrix(absl::string_view text, int ranks);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_ROUTING_SPEC_H_
