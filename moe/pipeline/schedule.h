// The order in which a rank runs the passes of a step's rounds.
#ifndef MOE_MOE_PIPELINE_SCHEDULE_H_
#define MOE_MOE_PIPELINE_SCHEDULE_H_

#include <cstdint>
#include <vector>

namespace moe {

enum class OpKind : uint8_t { kForward, kBackward };

struct PipelineOp {
  OpKind kind;
  int64_t round;  // from 0
  friend bool operator==(const PipelineOp&, const PipelineOp&) = default;
};

// Overwrites `ops`, whose memory is reused, with the order of a model that one rank has whole:
// F0 B0 F1 B1 ..., or without backward passes F0 F1 ....
inline void OneStage(int64_t rounds, bool backward, std::vector<PipelineOp>& ops) {
  ops.clear();
  for (int64_t round = 0; round < rounds; ++round) {
    ops.push_back({OpKind::kForward, round});
    if (backward) ops.push_back({OpKind::kBackward, round});
  }
}

}  // namespace moe

#endif  // MOE_MOE_PIPELINE_SCHEDULE_H_
