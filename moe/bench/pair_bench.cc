#include "moe/bench/pair_bench.h"

#include <utility>

#include "kernels/base/status_macros.h"

namespace moe::bench {

absl::StatusOr<std::vector<BenchRow>> MeasurePairs(const CaseSpec& spec,
                                                   const MeasureOptions& options,
                                                   const WorldFacts& facts, Communicator& comm,
                                                   Stream& stream) {
  const int ranks = comm.size();
  MeasureOptions of_pair = options;
  of_pair.budget = options.budget / (int64_t{ranks} * ranks);
  std::vector<BenchRow> rows;
  for (int source = 0; source < ranks; ++source) {
    for (int destination = 0; destination < ranks; ++destination) {
      CaseSpec pair = spec;
      pair.op = Op::kPointToPoint;
      pair.source = source;
      pair.destination = destination;
      MOE_ASSIGN_OR_RETURN(BenchRow row, MeasureCollective(pair, of_pair, facts, comm, stream));
      row.source = source;
      row.destination = destination;
      rows.push_back(std::move(row));
    }
  }
  // The machine's limit, for a pair: what its source copies inside itself.
  for (BenchRow& row : rows) {
    row.memcpy_gbytes_per_s = rows[row.source * ranks + row.source].algbw();
  }
  return rows;
}

}  // namespace moe::bench
