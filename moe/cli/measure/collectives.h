// Measures and checks one collective at one size.
#ifndef MOE_MOE_CLI_MEASURE_COLLECTIVES_H_
#define MOE_MOE_CLI_MEASURE_COLLECTIVES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "kernels/base/trace.h"
#include "moe/cli/measure/bench_row.h"
#include "moe/cli/measure/collective_case.h"
#include "moe/cli/measure/statistics.h"

namespace moe::measure {

// One call on one rank, by MonotonicNs (kernels/base/trace.h), which all ranks of a host share.
struct CallStamps {
  int64_t enter_ns = 0;
  int64_t leave_ns = 0;
};

// Timing of n calls from R ranks' stamps. In call i rank r enters at a[r] and leaves at b[r]; the
// last one enters at A = max a. No collective can end before A, so a rank that entered earlier has
// waited for the last one; what remains is transfer, with the waits inside of the algorithm:
//   time of r     t[r] = b[r] - a[r]
//   wait of r     w[r] = min(A, b[r]) - a[r]       (min: a sender may leave before a peer enters)
//   time_us       max over r of the mean over i of t[r]
//   samples       per call, max over r of t[r]: what min, median, p99 and cv are of
//   wait_pct      100 * sum w / sum t over all ranks and calls
//   slow_rank     argmax over r of the mean over i of (a[r] + b[r]): the rank that enters and
//                 leaves the latest, together; -1 unless it is later than the next one beyond
//                 noise (the 0.95 interval of their difference, by SampleOfSeries: of 20 calls or
//                 more)
// A barrier precedes every call, so entries differ by what the barrier and the scheduler leave:
// wait_pct is the share of that and does not measure skew. A rank with more to move than others
// makes them wait after the last entry, inside of the algorithm.
struct TimingSummary {
  int64_t calls = 0;
  double time_us = 0;
  Statistics samples_us;
  double wait_pct = 0;
  int slow_rank = -1;
};

// stamps [R][n], rank by rank. If the clocks are those of several hosts, stamps of different ranks
// do not compare: pass clocks_shared = kNo, which leaves wait_pct NaN and makes the slow rank the
// one with the longest mean time, likewise beyond noise.
enum class ClocksShared : uint8_t { kNo, kYes };
TimingSummary Summarise(absl::Span<const CallStamps> stamps, int ranks,
                        ClocksShared clocks = ClocksShared::kYes);

enum class Check : uint8_t { kNo, kYes };

struct MeasureOptions {
  int iterations = 20;  // at least; the first batch
  int warmup = 5;       // calls before the first timed one, neither timed nor checked
  Check check = Check::kYes;
  // Batches follow, each as long as all before it, until the samples' cv is at most this ...
  double max_noise_pct = 5;
  // ... or the timed calls of a row, with what is between them, have taken this long.
  absl::Duration budget = absl::Seconds(1);
  // This rank's recorder of every timed call, with one lane or, for layers, without any.
  TraceRecorder* trace = nullptr;
};

// Facts of a world, found once.
struct WorldFacts {
  int hosts = 1;
  ClocksShared clocks = ClocksShared::kYes;
  std::string transport;
};

// Collective. Ranks with the same boot id are of one host, and so have one clock.
absl::StatusOr<WorldFacts> FindWorldFacts(Communicator& comm);

// A stream for timed collectives: on the CPU the caller runs them. Errors as MakeStream.
absl::StatusOr<std::unique_ptr<Stream>> StreamOfCalls(Device device);

// Measures until `options` ends it. After every batch comes a batch of at most options.iterations
// memcpys of CollectiveCase::CopiedBytes, which are checked as the calls are, have the same
// neighbours and leave the same caches. The fastest of them, of the slowest rank in each, is the
// limit (none where nothing need be moved). In a CUDA stream they are copies inside the device, and
// a call's time ends when the host has seen the stream empty. Collective; every rank decides on the
// same numbers, so all stop together with the same row.
//
// Errors: those of CollectiveCase::Create and of the collective. Wrong elements are no error here:
// BenchRow::wrong counts them.
absl::StatusOr<BenchRow> MeasureCollective(const CaseSpec& spec, const MeasureOptions& options,
                                           const WorldFacts& facts, Communicator& comm,
                                           Stream& stream);

// The rows of one size: MeasureCollective's row; for p2p a row for every ordered pair,
// [source][destination], of transfers of spec.size_bytes (spec's source and destination are not
// read). The diagonal is a copy inside the rank. All other ranks wait in a barrier; times and waits
// are those of the two ends alone. The pairs share options.budget. Collective; the same result on
// every rank.
absl::StatusOr<std::vector<BenchRow>> MeasureRows(const CaseSpec& spec,
                                                  const MeasureOptions& options,
                                                  const WorldFacts& facts, Communicator& comm,
                                                  Stream& stream);

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_COLLECTIVES_H_
