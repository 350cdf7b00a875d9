// The peer memory of the local backend: ranks are threads, and a peer's pointer is good here if
// this rank's device can read the peer's.

#include <algorithm>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/types/span.h>

#include "comm/local/local_group.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

class LocalPeerBuffer final : public PeerBuffer {
 public:
  LocalPeerBuffer(std::vector<std::shared_ptr<const Buffer>> buffers, int rank)
      : buffers_(std::move(buffers)), rank_(rank) {}

  absl::Span<std::byte> local() const override { return buffers_[rank_]->span<std::byte>(); }
  const std::byte* peer(int r) const override { return buffers_[r]->data(); }

 private:
  const std::vector<std::shared_ptr<const Buffer>> buffers_;  // [R], shared: a peer may still read
  const int rank_;
};

bool Same(Device a, Device b) {
  return a.kind == b.kind && a.index == b.index;
}

// Lets the device of `rank` read those of all ranks; the first that it cannot.
absl::Status ReadAll(int rank, absl::Span<const Device> devices) {
  for (const Device& device : devices) {
    if (device.kind != devices[rank].kind) {
      return absl::UnimplementedError("memory of the host and of CUDA devices");
    }
    if (Same(device, devices[rank])) continue;
    MOE_RETURN_IF_ERROR(EnablePeerAccess(devices[rank].index, device.index));
  }
  return absl::OkStatus();
}

// ReadAll of every rank; on all of them the first error in the order of ranks.
absl::Status OpenToAll(LocalGroup& group, const LocalCaller& caller,
                       absl::Span<const Device> devices) {
  const auto here = [&](const Device& device) {
    return Same(device, devices[0]);
  };
  if (std::all_of(devices.begin(), devices.end(), here)) return absl::OkStatus();
  absl::Status mine = ReadAll(caller.rank, devices);
  absl::Status first;
  MOE_RETURN_IF_ERROR(group.HostExchange(caller, &mine, [&](absl::Span<void* const> all) {
    for (void* const value : all) {
      const auto& status = *static_cast<const absl::Status*>(value);
      if (status.ok() || !first.ok()) continue;
      first = {status.code(), absl::StrCat("AllocatePeerBuffer: ", status.message())};
    }
  }));
  return first;
}

}  // namespace

absl::StatusOr<std::shared_ptr<PeerBuffer>> AllocateLocalPeerBuffer(LocalGroup& group,
                                                                    const LocalCaller& caller,
                                                                    int64_t bytes,
                                                                    MemoryResource& memory) {
  absl::StatusOr<Buffer> own = Buffer::Allocate(bytes, memory, "memory that peers read");
  const absl::Status allocated = own.status();
  // null tells the others that this rank has no memory: none of them gets a buffer.
  struct Part {
    Device device;
    std::shared_ptr<const Buffer> buffer;
  };
  Part mine = {.device = memory.device(), .buffer = nullptr};
  if (allocated.ok()) mine.buffer = std::make_shared<const Buffer>(*std::move(own));
  std::vector<std::shared_ptr<const Buffer>> buffers(group.size());
  std::vector<Device> devices(group.size());
  MOE_RETURN_IF_ERROR(group.HostExchange(caller, &mine, [&](absl::Span<void* const> all) {
    for (int r = 0; r < group.size(); ++r) {
      const auto& part = *static_cast<const Part*>(all[r]);
      buffers[r] = part.buffer;
      devices[r] = part.device;
    }
  }));
  MOE_RETURN_IF_ERROR(OpenToAll(group, caller, devices));
  MOE_RETURN_IF_ERROR(allocated);
  for (int r = 0; r < group.size(); ++r) {
    if (buffers[r] != nullptr) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "AllocatePeerBuffer: rank ", group.world_rank(r), " is out of memory for its part"));
  }
  return std::make_shared<LocalPeerBuffer>(std::move(buffers), caller.rank);
}

}  // namespace moe
