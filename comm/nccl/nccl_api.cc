#include "comm/nccl/nccl_api.h"

#include <cstdlib>

#include <absl/strings/str_cat.h>
#include <dlfcn.h>

#include "comm/nccl/nccl_world.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int kOldest = NCCL_VERSION(2, 27, 0);
constexpr int kNewest = NCCL_VERSION(2, 30, 99);
static_assert(NCCL_VERSION_CODE >= kOldest, "nccl.h of NCCL 2.27 or later is needed");

std::string VersionText(int code) {
  return absl::StrCat(code / 10000, ".", code / 100 % 100, ".", code % 100);
}

template <typename Function>
absl::Status Find(void* library, const char* file, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function != nullptr) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("NCCL: ", file, " has no ", name,
                   ", expected NCCL 2.27 to 2.30: put the folder of such "
                   "a libnccl.so.2 in LD_LIBRARY_PATH"));
}

#if defined(MOE_NCCL_LINKED)
absl::StatusOr<NcclApi> Load() {
  NcclApi api;
#define MOE_LINK(name) api.name = &::name;
  MOE_NCCL_FUNCTIONS_OF_ANY_VERSION(MOE_LINK)
  MOE_NCCL_FUNCTIONS(MOE_LINK)
#undef MOE_LINK
  return api;
}
#else
absl::StatusOr<NcclApi> Load() {
  return OpenNccl("libnccl.so.2");
}
#endif

}  // namespace

absl::StatusOr<NcclApi> OpenNccl(const char* file) {
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("NCCL: ", dlerror(),
                     ": put the folder of libnccl.so.2 (NCCL 2.27 to 2.30) in "
                     "LD_LIBRARY_PATH, or take another backend: local or mpi"));
  }
  NcclApi api;
#define MOE_FIND(name) MOE_RETURN_IF_ERROR(Find(library, file, #name, api.name));
  MOE_NCCL_FUNCTIONS_OF_ANY_VERSION(MOE_FIND)
  MOE_RETURN_IF_ERROR(NcclVersionOf(api).status());
  MOE_NCCL_FUNCTIONS(MOE_FIND)
#undef MOE_FIND
  return api;
}

void PrepareForNccl() {
  constexpr const char* kVariables[][2] = {
      // Loading a kernel takes locks that the GPUs of a process share: a thread that waits for its
      // own NCCL kernel holds up the thread that would launch the peer's.
      {"CUDA_MODULE_LOADING", "EAGER"},
      // Work of different communicators is ordered as the host enqueues it.
      {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"},
      // Host threads that enqueue at the same time are no error; their work has no order.
      {"NCCL_LAUNCH_RACE_FATAL", "0"},
  };
  for (const auto& [name, value] : kVariables) (void)::setenv(name, value, 0);
}

const absl::StatusOr<NcclApi>& NcclLibrary() {
  static const auto* const library = [] {
    PrepareForNccl();
    return new absl::StatusOr<NcclApi>(Load());
  }();
  return *library;
}

absl::StatusOr<std::string> NcclVersionOf(const NcclApi& api) {
  int version = 0;
  MOE_RETURN_IF_ERROR(NcclStatus(api, api.ncclGetVersion(&version), "ncclGetVersion"));
  if (version >= kOldest && version <= kNewest) return VersionText(version);
  return absl::UnimplementedError(absl::StrCat(
      "NCCL: the library is of version ", VersionText(version),
      ", expected 2.27 to 2.30: put the folder of such a libnccl.so.2 in LD_LIBRARY_PATH"));
}

absl::Status NcclStatus(const NcclApi& api, ncclResult_t result, absl::string_view what) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const char* const detail = api.ncclGetLastError(nullptr);
  const std::string text = absl::StrCat(what, ": NCCL: ", api.ncclGetErrorString(result),
                                        detail != nullptr && *detail != '\0' ? ": " : "",
                                        detail != nullptr ? detail : "");
  switch (result) {
    case ncclSystemError:
    case ncclRemoteError:
      return absl::UnavailableError(text);
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return absl::InvalidArgumentError(text);
    default:
      return absl::InternalError(text);
  }
}

}  // namespace moe
