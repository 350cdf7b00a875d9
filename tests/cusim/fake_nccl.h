// The functions of NCCL that this project calls, on a CPU, in streams of the fake runtime: what a
// build with simulated devices links in place of the library. Ranks are threads of one process.
//
// A call puts one kernel into its stream. When the stream comes to it the kernel begins: what it
// will receive becomes NaN, and it waits for its peers' kernels. Data moves at some moment between
// the last one's begin and the first one's end, so that a missing event edge shows under some
// seeds. Kernels of one communicator run one after the other. Calls of a non-blocking communicator
// are in progress for a random number of polls, and only then go into the stream.
//
// What NCCL's documentation forbids is printed, naming the rule, and ends the process: ranks whose
// n-th collectives (or splits) of a communicator differ, counts that differ, two threads inside one
// communicator, a call while the last one is in progress, work put into the stream meanwhile, a
// call after abort or destroy, memory that is no device's, buffers that others change while a
// kernel uses them, splitting or destroying with work under way, a group that is not ended.
#ifndef MOE_TESTS_CUSIM_FAKE_NCCL_H_
#define MOE_TESTS_CUSIM_FAKE_NCCL_H_

#include <cstdint>

#include <nccl.h>

#include "tests/cusim/cusim.h"

namespace cusim {

// What goes wrong.
struct NcclFaults {
  int version = NCCL_VERSION_CODE;  // what ncclGetVersion says
  bool init_hangs = false;          // nobody ever joins
  // Ranks whose calls or counts differ wait for ever, as NCCL's may, instead of ending the process.
  bool mismatch_hangs = false;
  int dies_in_group =
      -1;  // this rank's next group of sends and receives moves half of them, no more
};
NcclFaults Set(const NcclFaults& now);
using ScopedNccl = Scoped<NcclFaults>;

// `error` becomes the state of every communicator that rank `rank` has, as when its network fails.
void RaiseInNccl(int rank, ncclResult_t error);

// Communicators that were neither destroyed nor aborted.
int64_t NcclCommunicators();

// Calls until now by threads whose current device was not the communicator's: allowed, but what
// NCCL allocates meanwhile lies on the other device.
int64_t NcclCallsFromOtherDevices();

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_FAKE_NCCL_H_
