// What one rank needs to run a model: its mesh, streams, scratch memory and clock.
#ifndef MOE_MOE_CONTEXT_H_
#define MOE_MOE_CONTEXT_H_

#include <array>
#include <chrono>
#include <cstdint>

#include "comm/mesh.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"

namespace moe {

// fast: float32 gradient sums, weight gradients merged over the rows of a call.
// layout-invariant: the same bits for any number of ranks, split, transport and overlap.
enum class Numerics : uint8_t { kFast, kLayoutInvariant };

enum class Phase : uint8_t {
  kGate,
  kPlan,
  kDispatch,
  kExpert,
  kCombine,
  kDense,  // attention, norms, embedding, output layer, loss
  kAllReduce,
  kOptimizer,
  kCount,
};
const char* NameOf(Phase phase);

// Seconds per phase of one rank. Phases on two streams may overlap, so the sum can exceed the
// wall time. Each phase is timed by one stream at a time.
class PhaseClock {
 public:
  // Enqueues the start and the end of `phase` around whatever is enqueued between the two calls.
  absl::Status Start(Phase phase, Stream& stream);
  absl::Status Stop(Phase phase, Stream& stream);
  // Adds time measured by the caller.
  void Add(Phase phase, double seconds) { seconds_[static_cast<size_t>(phase)] += seconds; }
  // Call with the streams idle.
  double seconds(Phase phase) const { return seconds_[static_cast<size_t>(phase)]; }
  void Reset() { seconds_ = {}; }

 private:
  using Clock = std::chrono::steady_clock;
  std::array<double, static_cast<size_t>(Phase::kCount)> seconds_ = {};
  std::array<Clock::time_point, static_cast<size_t>(Phase::kCount)> started_ = {};
};

// Holds back later work in `later` until what is now in `earlier` has run. Nothing to do when they
// are the same stream.
absl::Status JoinStreams(Stream& later, Stream& earlier);

// Borrowed by layers for their whole life. On the CPU `compute` runs inline; `exchange` is the same
// stream when nothing is to overlap, else a queue.
struct Context {
  Mesh* mesh = nullptr;
  Stream* compute = nullptr;
  Stream* exchange = nullptr;
  Workspace* workspace = nullptr;
  PhaseClock* clock = nullptr;
  Numerics numerics = Numerics::kFast;
};

}  // namespace moe

#endif  // MOE_MOE_CONTEXT_H_
