#include "moe/run/deferred_gradients.h"

#include <algorithm>

namespace moe {

absl::StatusOr<GroupOffsets> DeferredGradients::Keep(const GroupOffsets& offsets) const {
  const auto host = offsets.host(), device = offsets.device();
  MOE_ASSIGN_OR_RETURN(const auto on_host,
                       stash_->host().Array<int64_t>(static_cast<int64_t>(host.size())));
  std::copy(host.begin(), host.end(), on_host.begin());
  if (device.empty()) return GroupOffsets(on_host);
  MOE_ASSIGN_OR_RETURN(
      const auto on_device,
      Keep(MatrixView<const int64_t>(device.data(), 1, static_cast<int64_t>(device.size()))));
  return GroupOffsets::OnDevice({on_device.data(), device.size()}, on_host);
}

absl::Status DeferredGradients::Run() {
  for (HostTask& task : tasks_) MOE_RETURN_IF_ERROR(task());
  tasks_.clear();
  return absl::OkStatus();
}

}  // namespace moe
