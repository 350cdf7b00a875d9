// What a build without NCCL has in place of nccl_communicator.cc and nccl_store.cc.
#include "comm/nccl/nccl_store.h"
#include "comm/nccl/nccl_world.h"

namespace moe {
namespace {

absl::Status NoNccl() {
  return absl::UnimplementedError(
      "this build has no backend nccl: configure where CUDA and nccl.h (NCCL 2.27 or later) are, "
      "or "
      "take another backend: local or mpi");
}

}  // namespace

bool HasNccl() {
  return false;
}
void PrepareForNccl() {}
absl::StatusOr<std::string> NcclVersion() {
  return NoNccl();
}
absl::StatusOr<NcclId> MakeNcclId() {
  return NoNccl();
}
absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(const NcclRankOptions&) {
  return NoNccl();
}
absl::StatusOr<std::unique_ptr<Communicator>> JoinNcclOver(Communicator&, NcclRankOptions) {
  return NoNccl();
}
absl::StatusOr<std::unique_ptr<Communicator>> JoinNcclByTcp(NcclRankOptions, const NcclStore&) {
  return NoNccl();
}

}  // namespace moe
