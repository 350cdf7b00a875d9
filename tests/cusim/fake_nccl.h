// The functions of NCCL that this project calls, on a CPU, in streams of the fake runtime: a build
// with simulated devices links them in place of the library. Ranks are threads of one process.
//
// A call enqueues one kernel in its stream. When the stream reaches it, the kernel begins: its
// receive buffer becomes NaN, and it waits for its peers' kernels. Data moves at some moment
// between the last one's begin and the first one's end, so that a missing event edge is visible
// under some seeds. Kernels of one communicator run one after the other. Calls of a non-blocking
// communicator are in progress for a random number of polls, and only then are enqueued.
//
// What NCCL's documentation forbids is printed, naming the rule, and ends the process: ranks whose
// n-th collectives (or splits) of a communicator differ, counts that differ, two threads inside one
// communicator, a call while the last one is in progress, work enqueued in the stream meanwhile, a
// call after abort or destroy, memory that is not a device's, buffers that change while a kernel
// uses them, splitting or destroying with work in flight, a group that is not ended.
#ifndef MOE_TESTS_CUSIM_FAKE_NCCL_H_
#define MOE_TESTS_CUSIM_FAKE_NCCL_H_

#include <cstdint>

#include <nccl.h>

#include "tests/cusim/cusim.h"

namespace cusim {

// Faults to inject.
struct NcclFaults {
  int version = NCCL_VERSION_CODE;  // returned by ncclGetVersion
  bool init_hangs = false;          // no rank ever joins
  // If set, ranks whose calls or counts differ wait forever, as NCCL's may, instead of ending the
  // process.
  bool mismatch_hangs = false;
  int dies_in_group =
      -1;                // this rank's next group of sends and receives moves half of them, no more
  int abort_hangs = -1;  // this rank's aborts do not return until the fault is removed
};
NcclFaults Set(const NcclFaults& now);
using ScopedNccl = Scoped<NcclFaults>;

// Sets `error` as the state of every communicator of rank `rank`, as when its network fails.
void RaiseInNccl(int rank, ncclResult_t error);

// Number of communicators that were neither destroyed nor aborted.
int64_t NcclCommunicators();

// Number of calls so far by threads whose current device was not the communicator's: allowed, but
// NCCL's allocations in such a call are on the other device.
int64_t NcclCallsFromOtherDevices();

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_FAKE_NCCL_H_
