// What the flight recorder costs: small all-reduces of threads, with and without it, in turns.
//
//   flight_bench [RANKS, 1] [CALLS of a turn, 20000] [TURNS, 21]
//
// Prints the median of the turns' nanoseconds a call without and with it, and their difference. One
// rank waits for nobody: the difference is then the recorder's own.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "comm/create.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/trace.h"

namespace moe {
namespace {

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Nanoseconds of an all-reduce of four bytes on this rank.
absl::StatusOr<double> NanosecondsOf(Communicator& comm, Stream& stream, int calls) {
  const int64_t begin = MonotonicNs();
  for (int i = 0; i < calls; ++i) {
    int32_t sum = 1;
    MOE_RETURN_IF_ERROR(comm.AllReduce<int32_t>(absl::MakeSpan(&sum, 1), ReduceOp::kSum, stream,
                                                {.name = "bench"}));
  }
  return static_cast<double>(MonotonicNs() - begin) / calls;
}

absl::Status Run(int ranks, int calls, int turns) {
  ProcessWatch watch({});
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const auto stream = MakeInlineStream();
    MOE_ASSIGN_OR_RETURN(const auto watched, world->Split(0, world->rank()));
    watched->Attach(watch.Of(world->rank(), ranks), "world");
    std::vector<double> without, with;
    for (int turn = 0; turn < turns; ++turn) {
      MOE_ASSIGN_OR_RETURN(without.emplace_back(), NanosecondsOf(*world, *stream, calls));
      MOE_ASSIGN_OR_RETURN(with.emplace_back(), NanosecondsOf(*watched, *stream, calls));
    }
    if (world->rank() != 0) return absl::OkStatus();
    const double off = Median(without), on = Median(with);
    std::printf("%d ranks: %.0f ns a call without, %.0f ns with, %+.0f ns\n", ranks, off, on,
                on - off);
    return absl::OkStatus();
  };
  return RunRanks({.plan = {.ranks = ranks}}, body);
}

}  // namespace
}  // namespace moe

int main(int argc, char** argv) {
  const auto number = [&](int i, int fallback) {
    return argc > i ? std::max(1, std::atoi(argv[i])) : fallback;
  };
  const absl::Status status = moe::Run(number(1, 1), number(2, 20000), number(3, 21));
  if (!status.ok()) std::fprintf(stderr, "flight_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
