// What rank 0 tells the others before there is a world: its id, or why there is none.
#ifndef MOE_COMM_NCCL_NCCL_ANNOUNCEMENT_H_
#define MOE_COMM_NCCL_NCCL_ANNOUNCEMENT_H_

#include <array>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "comm/nccl/nccl_world.h"

namespace moe {

// Travels as it lies in memory.
struct NcclAnnouncement {
  int32_t code = 0;                    // absl::StatusCode
  std::array<char, 508> message = {};  // the end of a longer one is left out
  NcclId id = {};
};

inline NcclAnnouncement Announce(const absl::StatusOr<NcclId>& made) {
  NcclAnnouncement said;
  said.code = static_cast<int32_t>(made.status().code());
  const absl::string_view message = made.status().message();
  message.copy(said.message.data(), said.message.size());
  if (made.ok()) said.id = *made;
  return said;
}

inline absl::StatusOr<NcclId> IdOf(const NcclAnnouncement& said) {
  if (said.code == 0) return said.id;
  const absl::string_view message(said.message.data(), said.message.size());
  return absl::Status(static_cast<absl::StatusCode>(said.code),
                      message.substr(0, message.find('\0')));
}

}  // namespace moe

#endif  // MOE_COMM_NCCL_NCCL_ANNOUNCEMENT_H_
