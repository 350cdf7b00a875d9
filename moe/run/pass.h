// What one call down a model is given.
#ifndef MOE_MOE_RUN_PASS_H_
#define MOE_MOE_RUN_PASS_H_

#include <cstdint>

#include <absl/status/status.h>

#include "comm/site.h"
#include "gating/routing.h"
#include "kernels/base/stream.h"
#include "moe/run/context.h"
#include "moe/run/phase_clock.h"

namespace moe {

// Built by whoever runs rounds, handed down from module to module. It never outlives the call: what
// is enqueued copies what it needs.
struct Pass {
  const Context& context;
  Batch batch = {};
  Site site = {};
  // The gradient of the whole loss by one of its terms, that of a router or of a token: the loss
  // scale, or 0 where a router's own loss is no term.
  float d_loss = 1;

  // The same pass in layer `layer` of a model.
  Pass InLayer(int32_t layer) const {
    Pass pass = *this;
    pass.site.layer = layer;
    return pass;
  }
  // The same pass with other workspaces.
  Pass In(const Context& other) const { return {other, batch, site, d_loss}; }
};

// Timed at the site of `pass`.
template <typename Body>
absl::Status Timed(const Pass& pass, const Work& work, Stream& stream, Body body) {
  return Timed(pass.context, pass.site, work, stream, body);
}

}  // namespace moe

#endif  // MOE_MOE_RUN_PASS_H_
