// What is planned, and one way to lay it out over ranks.
#ifndef MOE_MOE_PLAN_LAYOUT_H_
#define MOE_MOE_PLAN_LAYOUT_H_

#include <algorithm>
#include <cstdint>

#include "comm/mesh/mesh_shape.h"
#include "moe/pipeline/schedule.h"
#include "moe/recompute/recompute.h"
#include "moe/run/micro_batches.h"
#include "moe/zero/state_placement.h"

namespace moe::plan {

// A training step, whatever its layout.
struct Workload {
  int ranks = 1;
  int64_t sequences = 1;  // of a step, over all ranks
  int64_t sequence_length = 1;
  double element_bytes = 2;  // of rows and of weights that layers read
  double sum_bytes = 8;      // of an element's summed gradient
  // Rows for experts of the rank with the most / mean over the ranks of its expert-parallel group.
  double row_skew = 1;
  // Whether the output layer counts as layers when layers are dealt to stages. moe train deals
  // layers alone, so that the last stage takes longer.
  bool balanced_output = false;

  double tokens() const { return static_cast<double>(sequences * sequence_length); }
};

struct Layout {
  MeshShape mesh;
  ScheduleKind schedule = ScheduleKind::k1F1B;
  int chunks = 1;  // of each pipeline stage
  ZeroStage zero = ZeroStage::kNone;
  Recompute recompute = Recompute::kNone;
  int64_t micro_batch_size = 1;  // sequences

  bool operator==(const Layout&) const = default;
  PipelineShape pipeline() const {
    return {.schedule = schedule, .stages = mesh.pipeline, .chunks = chunks};
  }
};

// Ranks of a stage.
inline int StageRanks(const Workload& work, const Layout& layout) {
  return work.ranks / layout.mesh.pipeline;
}
// Ranks with micro-batches of their own, in a stage.
inline int DataRanks(const Workload& work, const Layout& layout) {
  return StageRanks(work, layout) / layout.mesh.tensor;
}
inline int ExpertDataRanks(const Workload& work, const Layout& layout) {
  return StageRanks(work, layout) / (layout.mesh.expert * layout.mesh.expert_tensor);
}
// M, over all ranks.
inline int64_t MicroBatches(const Workload& work, const Layout& layout) {
  return work.sequences / layout.micro_batch_size;
}
// Micro-batches of the rank with the most.
inline int64_t Rounds(const Workload& work, const Layout& layout) {
  return RoundsOf(DataRanks(work, layout), MicroBatches(work, layout));
}

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_LAYOUT_H_
