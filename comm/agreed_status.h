// One outcome of what every rank did on its own: so that all go on, or all stop.
#ifndef MOE_COMM_AGREED_STATUS_H_
#define MOE_COMM_AGREED_STATUS_H_

#include <absl/status/status.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"

namespace moe {

// `status` becomes that of rank `root`, with its payloads. Collective, blocks the host. Returns the
// errors of the communicator.
absl::Status BroadcastStatus(absl::Status& status, int root, Communicator& world, Stream& stream,
                             const Site& site = {});

// OK if `mine` is on every rank; else the status of the first rank where it is not, on all of them
// and with its payloads, as "rank 3: <message>" unless that is rank 0, whose error is usually that
// of all. Collective, blocks the host; one all-reduce of 8 bytes where all is well. Errors of the
// communicator alone may differ between ranks.
absl::Status AgreedStatus(const absl::Status& mine, Communicator& world, Stream& stream,
                          const Site& site = {});

}  // namespace moe

#endif  // MOE_COMM_AGREED_STATUS_H_
