#include "comm/mesh.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"

namespace moe {

absl::StatusOr<std::unique_ptr<Mesh>> Mesh::Create(std::unique_ptr<Communicator> world,
                                                   int expert_parallel_size) {
  const int rank = world->rank();
  if (expert_parallel_size < 1 || world->size() % expert_parallel_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("Mesh: expert-parallel size ",
                                                   expert_parallel_size, ", expected a divisor of ",
                                                   world->size(), " ranks"));
  }
  const int edp_index = rank / expert_parallel_size;
  const int ep_index = rank % expert_parallel_size;
  std::unique_ptr<Mesh> mesh(new Mesh);
  MOE_ASSIGN_OR_RETURN(mesh->expert_parallel_, world->Split(edp_index, rank));
  MOE_ASSIGN_OR_RETURN(mesh->expert_data_parallel_, world->Split(ep_index, rank));
  MOE_ASSIGN_OR_RETURN(mesh->world_gradients_, world->Split(0, rank));
  MOE_ASSIGN_OR_RETURN(mesh->expert_gradients_, world->Split(ep_index, rank));
  mesh->world_ = std::move(world);
  return mesh;
}

void Mesh::SetPhase(const CommPhase& phase) {
  for (Communicator* comm : {world_.get(), expert_parallel_.get(), expert_data_parallel_.get(),
                             world_gradients_.get(), expert_gradients_.get()}) {
    comm->SetPhase(phase);
  }
}

void Mesh::Abort(absl::Status reason) {
  // The others share its fate.
  Caught([&] {
    world_->Abort(std::move(reason));
    return absl::OkStatus();
  }).IgnoreError();
}

}  // namespace moe
