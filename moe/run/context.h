// What one rank needs to run a model: its mesh, streams, scratch memory and clock.
#ifndef MOE_MOE_RUN_CONTEXT_H_
#define MOE_MOE_RUN_CONTEXT_H_

#include <cstdint>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/mesh/mesh.h"
#include "kernels/base/buffer.h"
#include "kernels/base/choice.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/nvtx_range.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"
#include "kernels/grouped_gemm/gemm_options.h"
#include "moe/run/phase_clock.h"

namespace moe {

class DeferredGradients;  // moe/run/deferred_gradients.h
class FirstNonFinite;     // moe/run/finite.h
class StashPool;          // moe/run/stash.h
class Turns;              // moe/run/turns.h

// layout-invariant, the default: the same bits for any number of ranks, split, transport, overlap.
// fast: float32 gradient sums, weight gradients merged over the rows of a call.
enum class Numerics : uint8_t { kFast, kLayoutInvariant };
inline constexpr Choice<Numerics> kNumericsWords[] = {
    {"fast", Numerics::kFast}, {"layout-invariant", Numerics::kLayoutInvariant}};

// Makes later work in `later` wait for the work that is now in `earlier`; no effect when they are
// the same stream.
inline absl::Status JoinStreams(Stream& later, Stream& earlier) {
  if (&later == &earlier) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(const Event done, earlier.Record());
  return later.WaitFor(done);
}

// Borrowed by layers for their lifetime. On the CPU `compute` runs inline; `exchange` is the same
// stream unless exchanges overlap computation, then a queue.
//
// Where `compute` is a stream of a CUDA device, parameters, rows and gradients are memory of that
// device, and what the host computes itself (routing, plans, totals) goes through `host` in
// `host_workspace`. On the CPU these are `compute` and `workspace` themselves.
struct Context {
  Mesh* mesh = nullptr;
  Stream* compute = nullptr;
  Stream* exchange = nullptr;  // stream of the same device
  // Of the communicators for what runs on `exchange`.
  MeshLane exchange_lane = MeshLane::kForward;
  Stream* host = nullptr;  // inline stream of the CPU
  Workspace* workspace = nullptr;
  // Scratch of `exchange`. On a CUDA device it is not `workspace`: both streams queue there, and
  // memory that one still uses must not be given to the other.
  Workspace* exchange_workspace = nullptr;
  Workspace* host_workspace = nullptr;
  MemoryResource* memory = nullptr;  // memory of compute's device, for what outlives a round
  StashPool* stashes = nullptr;      // memory of micro-batches in flight
  // Where a pass that waits for an exchange lets another one run; nullptr: there is none.
  Turns* turns = nullptr;
  // Where weight gradients of a backward are left for later; nullptr: they are computed in it.
  DeferredGradients* later = nullptr;
  FirstNonFinite* non_finite = nullptr;  // of backward passes; nullptr: nothing is noted
  GemmOptions gemm = {};                 // for products on `compute`
  PhaseClock* clock = nullptr;
  Numerics numerics = Numerics::kLayoutInvariant;
  // Leaves of products whose reduced index tensor ranks may share; 1: chains.
  int tensor_leaves = 1;
};

inline bool OnCuda(const Context& context) {
  return IsCuda(*context.compute);
}

// `array`, memory of the host, in memory of context.compute's device: itself on a CPU, otherwise a
// copy in context.workspace, enqueued on that stream.
template <typename T>
absl::StatusOr<absl::Span<const T>> OnDevice(absl::Span<const T> array, const Context& context) {
  if (!OnCuda(context)) return array;
  return UploadArray(array, *context.workspace, *context.compute);
}

// The reverse, in context.host_workspace. Blocks the host.
template <typename T>
absl::StatusOr<absl::Span<const T>> OnHost(absl::Span<const T> array, const Context& context) {
  if (!OnCuda(context)) return array;
  MOE_ASSIGN_OR_RETURN(const absl::Span<T> copy,
                       DownloadArray(array, *context.host_workspace, *context.compute));
  MOE_RETURN_IF_ERROR(context.compute->Synchronize());
  return copy;
}

// Runs `body`, which enqueues work on `stream`. The rank comes to `site` under the name of the work
// (Communicator::Mark); its time in the stream counts as `work.phase`, and
// it is an event of the time line, if one is recorded, with the layer, round and step of `site`.
template <typename Body>
absl::Status Timed(const Context& context, const Site& site, const Work& work, Stream& stream,
                   Body body) {
  const NvtxRange range(work.name);
  if (context.mesh != nullptr) context.mesh->world().Mark(site.Named(work.name));
  if (context.clock == nullptr) return body();
  PhaseClock& clock = *context.clock;
  TraceEvent* const event = clock.recorder() == nullptr ? nullptr : clock.Open(work, site, stream);
  const ExchangeBytes before =
      event != nullptr && work.moved != nullptr ? *work.moved : ExchangeBytes();
  const int64_t sent = work.group == nullptr ? 0 : work.group->bytes_sent();
  MOE_RETURN_IF_ERROR(clock.Start(work.phase, event, stream));
  MOE_RETURN_IF_ERROR(body());
  if (event != nullptr && work.moved != nullptr) {
    event->bytes_self = work.moved->self - before.self;
    event->bytes =
        work.moved->same_node + work.moved->cross_node - before.same_node - before.cross_node;
  }
  if (event != nullptr && work.group != nullptr) event->bytes = work.group->bytes_sent() - sent;
  return clock.Stop(work.phase, event, stream);
}

}  // namespace moe

#endif  // MOE_MOE_RUN_CONTEXT_H_
