#include "moe/context.h"

#include "kernels/base/status_macros.h"

namespace moe {

absl::Status JoinStreams(Stream& later, Stream& earlier) {
  if (&later == &earlier) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(const Event done, earlier.Record());
  return later.WaitFor(done);
}

}  // namespace moe
