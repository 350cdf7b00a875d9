// What one rank needs to run a model: its mesh, streams, scratch memory and clock.
#ifndef MOE_MOE_CONTEXT_H_
#define MOE_MOE_CONTEXT_H_

#include <cstdint>

#include "comm/mesh.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"
#include "moe/phase_clock.h"

namespace moe {

// fast: float32 gradient sums, weight gradients merged over the rows of a call.
// layout-invariant: the same bits for any number of ranks, split, transport and overlap.
enum class Numerics : uint8_t { kFast, kLayoutInvariant };

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

// Runs `body`, which enqueues work on `stream`: its time in the stream counts as `work.phase`, and
// it is a piece of the time line if one is recorded, with the layer and step of the mesh's phase.
template <typename Body>
absl::Status Timed(const Context& context, const Work& work, Stream& stream, Body body) {
  if (context.clock == nullptr) return body();
  PhaseClock& clock = *context.clock;
  TraceEvent* const event = clock.recorder() == nullptr
                                ? nullptr
                                : clock.Open(work, context.mesh->world().phase(), stream);
  const ExchangeBytes before =
      event != nullptr && work.moved != nullptr ? *work.moved : ExchangeBytes();
  MOE_RETURN_IF_ERROR(clock.Start(work.phase, event, stream));
  MOE_RETURN_IF_ERROR(body());
  if (event != nullptr && work.moved != nullptr) {
    event->bytes_self = work.moved->self - before.self;
    event->bytes =
        work.moved->same_node + work.moved->cross_node - before.same_node - before.cross_node;
  }
  return clock.Stop(work.phase, event, stream);
}

}  // namespace moe

#endif  // MOE_MOE_CONTEXT_H_
