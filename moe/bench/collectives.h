// Measures and checks one collective at one size.
#ifndef MOE_MOE_BENCH_COLLECTIVES_H_
#define MOE_MOE_BENCH_COLLECTIVES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "kernels/base/trace.h"
#include "moe/bench/bench_row.h"
#include "moe/bench/collective_case.h"
#include "moe/bench/timing.h"

namespace moe::bench {

enum class Check : uint8_t { kNo, kYes };

struct MeasureOptions {
  int iterations = 20;  // at least; the first batch
  int warmup = 5;       // calls before the first timed one, neither timed nor checked
  Check check = Check::kYes;
  // Batches follow, each as long as all before it, until the samples' cv is at most this ...
  double max_noise_pct = 5;
  // ... or the timed calls of a row, with what stands between them, have taken this long.
  absl::Duration budget = absl::Seconds(1);
  // Of this rank, with one lane or, for layers, without any: gets every timed call.
  TraceRecorder* trace = nullptr;
};

// Of a world, found once.
struct WorldFacts {
  int hosts = 1;
  ClocksShared clocks = ClocksShared::kYes;
  std::string transport;
};

// Collective. Ranks are of one host when they read the same boot id, which also means one clock.
//   mpi  name of the MPI that "mpi" communicators use
absl::StatusOr<WorldFacts> FindWorldFacts(absl::string_view mpi, Communicator& comm);

// A stream for timed collectives: on the CPU the caller runs them. Errors as MakeStream.
absl::StatusOr<std::unique_ptr<Stream>> StreamOfCalls(Device device);

// The stamps of calls first .. first + n - 1 on every rank, [R][n]: TurnTo, Prepare, Barrier,
// stamp, Call, stamp, check. The barrier keeps the check of one rank out of the time of another.
// Collective; the same result on every rank.
absl::StatusOr<std::vector<CallStamps>> TimeCalls(CollectiveCase& timed, int64_t first,
                                                  int64_t calls, Check check, int64_t& wrong,
                                                  Communicator& comm);

// Measures until options say stop; after every batch, a batch of at most options.iterations
// memcpys of the same size sees the same neighbours; in a CUDA stream they are copies inside the
// device, and a call's time ends when the host has seen the stream empty. Collective; every rank
// decides on the same numbers, so all stop together, and all get the same row.
//
// Errors: those of CollectiveCase::Create and of the collective. Wrong elements are no error here:
// BenchRow::wrong counts them.
absl::StatusOr<BenchRow> MeasureCollective(const CaseSpec& spec, const MeasureOptions& options,
                                           const WorldFacts& facts, Communicator& comm,
                                           Stream& stream);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_COLLECTIVES_H_
