// p2p: every rank to every other, one pair at a time.
#ifndef MOE_MOE_BENCH_PAIR_BENCH_H_
#define MOE_MOE_BENCH_PAIR_BENCH_H_

#include <vector>

#include <absl/status/statusor.h>

#include "moe/bench/bench_row.h"
#include "moe/bench/collectives.h"

namespace moe::bench {

// A row for every ordered pair, [source][destination], of transfers of spec.size_bytes (its source
// and destination are not looked at); the diagonal is a copy inside the rank. All other ranks wait
// in a barrier, the two ends alone are in times and waits. options.budget is shared by the pairs.
// Collective; the same result on every rank.
absl::StatusOr<std::vector<BenchRow>> MeasurePairs(const CaseSpec& spec,
                                                   const MeasureOptions& options,
                                                   const WorldFacts& facts, Communicator& comm,
                                                   Stream& stream);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_PAIR_BENCH_H_
