// The functions of NCCL that this project calls, found in the library when they are first needed,
// so that programs start without it.
#ifndef MOE_COMM_NCCL_NCCL_API_H_
#define MOE_COMM_NCCL_NCCL_API_H_

#include <string>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include <nccl.h>

namespace moe {

#define MOE_NCCL_FUNCTIONS_OF_ANY_VERSION(F) \
  F(ncclGetVersion) F(ncclGetErrorString) F(ncclGetLastError)
#define MOE_NCCL_FUNCTIONS(F) \
  F(ncclGetUniqueId)          \
  F(ncclCommInitRankConfig)   \
  F(ncclCommSplit)            \
  F(ncclCommGetAsyncError)    \
  F(ncclCommFinalize)         \
  F(ncclCommDestroy)          \
  F(ncclCommAbort)            \
  F(ncclGroupStart)           \
  F(ncclGroupEnd)             \
  F(ncclReduce)               \
  F(ncclSend) F(ncclRecv) F(ncclAllReduce) F(ncclReduceScatter) F(ncclAllGather) F(ncclBroadcast)

struct NcclApi {
#define MOE_DECLARE(name) decltype(&::name) name = nullptr;
  MOE_NCCL_FUNCTIONS_OF_ANY_VERSION(MOE_DECLARE)
  MOE_NCCL_FUNCTIONS(MOE_DECLARE)
#undef MOE_DECLARE
};

// The functions of library `file`, which stays open. kUnimplemented, with the remedy: there is no
// such library, it is of a version that NcclVersionOf refuses, or lacks one of them.
absl::StatusOr<NcclApi> OpenNccl(const char* file);

// libnccl.so.2, opened by the first call, after PrepareForNccl(). A build with simulated devices
// has a NCCL of its own.
const absl::StatusOr<NcclApi>& NcclLibrary();

// "2.28.9". kUnimplemented, naming the version found, unless it is 2.27 to 2.30: a later one may
// have changed what its calls promise.
absl::StatusOr<std::string> NcclVersionOf(const NcclApi& api);

// `result` of `what`, with NCCL's text for it; OK for ncclSuccess and ncclInProgress.
//   a lost connection or an error of the system     kUnavailable
//   what NCCL refuses (one GPU for two ranks)       kInvalidArgument
//   all others                                      kInternal
absl::Status NcclStatus(const NcclApi& api, ncclResult_t result, absl::string_view what);

}  // namespace moe

#endif  // MOE_COMM_NCCL_NCCL_API_H_
