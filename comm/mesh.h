// How the ranks of a world share the work: expert-data-parallel x expert-parallel.
#ifndef MOE_COMM_MESH_H_
#define MOE_COMM_MESH_H_

#include <memory>

#include <absl/status/statusor.h>

#include "comm/communicator.h"

namespace moe {

// world rank = edp_index * expert_parallel_size + ep_index.
//   expert_parallel       ranks that together hold every expert once (contiguous in the world)
//   expert_data_parallel  ranks that hold the same experts (stride = expert_parallel_size)
// Dense parameters are replicated over the world. Every group comes twice, so that gradients can
// be reduced on a second stream while the first still exchanges tokens.
class Mesh {
 public:
  // Collective over `world`. kInvalidArgument unless expert_parallel_size divides world.size().
  static absl::StatusOr<std::unique_ptr<Mesh>> Create(std::unique_ptr<Communicator> world,
                                                      int expert_parallel_size);

  int expert_parallel_size() const { return expert_parallel_->size(); }
  int expert_data_parallel_size() const { return expert_data_parallel_->size(); }

  Communicator& world() { return *world_; }
  Communicator& expert_parallel() { return *expert_parallel_; }
  Communicator& expert_data_parallel() { return *expert_data_parallel_; }
  // For gradient reduction, on the reducer's stream.
  Communicator& world_gradients() { return *world_gradients_; }
  Communicator& expert_gradients() { return *expert_gradients_; }  // expert-data-parallel

  // Sets the phase on every group.
  void SetPhase(const CommPhase& phase);
  // Aborts every group.
  void Abort(absl::Status reason);

 private:
  Mesh() = default;

  std::unique_ptr<Communicator> world_, expert_parallel_, expert_data_parallel_, world_gradients_,
      expert_gradients_;
};

}  // namespace moe

#endif  // MOE_COMM_MESH_H_
