// What one call down a model is given.
#ifndef MOE_MOE_RUN_PASS_H_
#define MOE_MOE_RUN_PASS_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/site.h"
#include "gating/router_stats.h"
#include "gating/routing.h"
#include "kernels/base/stream.h"
#include "moe/run/context.h"
#include "moe/run/phase_clock.h"
#include "moe/run/stash.h"

namespace moe {

class WeightSource;  // moe/state/weight_lease.h

// Built by whoever runs rounds, handed down from module to module. It never outlives the call: what
// is enqueued copies what it needs.
struct Pass {
  const Context& context;
  Batch batch = {};
  Stash* stash = nullptr;  // of the micro-batch; nullptr: nothing is kept for a backward
  Site site = {};
  // Overwritten by the routers below, one for each MoE layer in forward order; empty: not wanted.
  // On a CUDA device they arrive later (RouterStats::Wait).
  absl::Span<RouterStats> router_stats = {};
  // Where modules lease the values of their parameters; nullptr: all values are resident.
  WeightSource* weights = nullptr;
  // false: this forward is computed again, and what it routes was counted before.
  bool counts = true;
  // The gradient of the whole loss by one of its terms, that of a router or of a token: the loss
  // scale, or 0 where a router's own loss is no term.
  float d_loss = 1;

  // Memory for what a backward reads: the stash's or, without one, the context's scratch.
  Workspace& kept() const { return stash != nullptr ? stash->device() : *context.workspace; }
  Workspace& kept_host() const {
    return stash != nullptr ? stash->host() : *context.host_workspace;
  }
  // The same pass in layer `layer` of a model.
  Pass InLayer(int32_t layer) const {
    Pass pass = *this;
    pass.site.layer = layer;
    return pass;
  }
  // The same pass on another context.
  Pass On(const Context& other) const {
    return {other, batch, stash, site, router_stats, weights, counts, d_loss};
  }
  // The same pass, of which nothing is kept.
  Pass WithoutStash() const {
    return {context, batch, nullptr, site, router_stats, weights, counts, d_loss};
  }
};

// OnDevice, where `pass` keeps what a backward reads.
template <typename T>
absl::StatusOr<absl::Span<const T>> KeptOnDevice(absl::Span<const T> array, const Pass& pass) {
  if (!OnCuda(pass.context)) return array;
  return UploadArray(array, pass.kept(), *pass.context.compute);
}

// Timed at the site of `pass`.
template <typename Body>
absl::Status Timed(const Pass& pass, const Work& work, Stream& stream, Body body) {
  return Timed(pass.context, pass.site, work, stream, body);
}

}  // namespace moe

#endif  // MOE_MOE_RUN_PASS_H_
