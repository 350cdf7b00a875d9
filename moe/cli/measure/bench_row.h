// One result of a benchmark, the formulas of its figures, and the tables that people read.
#ifndef MOE_MOE_CLI_MEASURE_BENCH_ROW_H_
#define MOE_MOE_CLI_MEASURE_BENCH_ROW_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/types/span.h>

#include "kernels/base/choice.h"
#include "kernels/base/dtype.h"
#include "moe/cli/measure/statistics.h"
#include "moe/cli/measure/tables.h"

namespace moe::measure {

enum class Op : uint8_t {
  kAllToAll,
  kAllToAllV,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kPointToPoint,
  kMemcpy,
};
inline constexpr Choice<Op> kOpWords[] = {{"alltoall", Op::kAllToAll},
                                          {"alltoallv", Op::kAllToAllV},
                                          {"allreduce", Op::kAllReduce},
                                          {"allgather", Op::kAllGather},
                                          {"reducescatter", Op::kReduceScatter},
                                          {"p2p", Op::kPointToPoint},
                                          {"memcpy", Op::kMemcpy}};
inline const char* NameOf(Op op) {
  return NameOf(op, kOpWords);
}

// Bytes per second that the caller sees: size_bytes / time. GB = 1e9 bytes; 0 in no time; NaN in
// unknown time.
double AlgorithmBandwidth(int64_t size_bytes, double time_us);

// busbw = algbw * BusFactor: what would cross a link of each rank if every algorithm moved the
// least that it must, so that figures of different rank counts compare (nccl-tests,
// doc/PERFORMANCE.md).
//   alltoall, alltoallv, allgather, reducescatter   (n - 1) / n
//   allreduce                                       2 (n - 1) / n
//   p2p, memcpy                                     1
double BusFactor(Op op, int ranks);

// Unknown or not applicable figures are NaN (JSON: null), unknown counts -1 (null).
struct BenchRow {
  Op op = Op::kAllToAll;
  std::string algorithm;  // "staged", "ring", ...
  std::string backend;    // "local", "mpi"
  std::string transport;  // what carries the bytes: "memory", "openmpi", "mpich"
  int ranks = 1;
  int hosts = 1;  // groups of --node-size ranks, if given
  std::string routing = "uniform";
  uint64_t seed = 0;
  DType dtype = DType::kFloat32;
  // Per rank, its own part included; skewed traffic: max over ranks of max(sent, received).
  int64_t size_bytes = 0;
  int64_t count = 0;  // elements, as nccl-tests counts: of one peer's block, allreduce: of all
  int64_t iterations = 0;
  double time_us = 0;     // max over ranks of the mean
  Statistics samples_us;  // per call, of the slowest rank
  int64_t wrong = -1;     // elements, over all ranks and checked calls; -1: not checked
  double imbalance_sent = 1, imbalance_received = 1;
  // The ranks with the most bytes; -1: all have the same.
  int busiest_sender = -1, busiest_receiver = -1;
  double wait_pct = kNone;
  int slow_rank = -1;  // TimingSummary::slow_rank
  // Bytes of one call, summed over ranks. -1: the backend's library decides how they travel.
  int64_t bytes_self = -1, bytes_same_host = -1, bytes_cross_host = -1;
  // size_bytes over the time of the memcpy that bounds a call (MeasureCollective).
  double memcpy_gbytes_per_s = kNone;
  int source = -1, destination = -1;  // p2p
  bool in_place = false;
  // The call in nccl-tests' other form (Form::kOther), measured for --format nccl alone.
  double other_time_us = kNone;
  int64_t other_wrong = -1;

  double algbw() const { return AlgorithmBandwidth(size_bytes, time_us); }
  double busbw() const { return algbw() * BusFactor(op, ranks); }
  double memcpy_pct() const { return 100 * algbw() / memcpy_gbytes_per_s; }
  const char* status() const { return wrong > 0 ? "wrong" : "ok"; }
};

// The JSON object, CSV line and Markdown row of a result. docs/bench.md defines the keys.
Fields BenchFields(const BenchRow& row);

// The first nine columns have nccl-tests' widths. Then come min, max, p99 and cv of the samples,
// the imbalances, wait, slowest rank and share of memcpy (moe bench --help has the formulas).
std::string BenchHead();
std::string BenchLine(const BenchRow& row, double max_noise_pct);

// nccl-tests' thirteen columns, out of place and in place; N/A is what was not measured or checked.
std::string NcclHead();
std::string NcclLine(const BenchRow& row);

// Text after the last row: what nccl-tests prints there, and the algorithm and bytes by distance of
// the largest row of `rows`.
std::string BenchFoot(absl::Span<const BenchRow> rows);
// nccl-tests' two lines of BenchFoot alone. The average is over all halves that were measured,
// without copies inside a rank (p2p) if there are other rows.
std::string NcclFoot(absl::Span<const BenchRow> rows);

struct HeatMap {
  int ranks = 0;
  std::vector<double> gbytes_per_s;  // [R][R], source by source; NaN: not measured
  std::string title;
  double at(int source, int destination) const {
    return gbytes_per_s[source * ranks + destination];
  }
};

// A line per source, a column per destination. A block beside each number is the darker the nearer
// the number is to the largest one off the diagonal (memcpy's is not comparable).
std::string HeatText(const HeatMap& map);

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_BENCH_ROW_H_
