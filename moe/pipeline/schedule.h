// The order in which a rank runs the passes of a step's rounds through its part of a model.
#ifndef MOE_MOE_PIPELINE_SCHEDULE_H_
#define MOE_MOE_PIPELINE_SCHEDULE_H_

#include <cstdint>
#include <vector>

#include <absl/status/status.h>

#include "kernels/base/choice.h"

namespace moe {

// GPipe: all forwards, then all backwards. Source: Huang et al., arXiv:1811.06965.
// 1F1B: a backward as soon as one can run. Source: PipeDream-Flush, arXiv:2006.09503.
// Interleaved: 1F1B over several chunks of layers a rank. Source: arXiv:2104.04473, section 2.2.
// Zero bubble H1: 1F1B whose weight gradients fill the waits. Source: Qi et al., arXiv:2401.10241.
// 1F1B with overlap: 1F1B, over several chunks interleaved, in which a forward and a backward of
// two micro-batches run together, in turns, so that each computes while the other one exchanges
// with experts. Source: Megatron Core, --overlap-moe-expert-parallel-comm.
enum class ScheduleKind : uint8_t { kGPipe, k1F1B, kInterleaved, kZeroBubbleH1, k1F1BOverlap };
inline constexpr Choice<ScheduleKind> kScheduleWords[] = {
    {"gpipe", ScheduleKind::kGPipe},
    {"1f1b", ScheduleKind::k1F1B},
    {"interleaved", ScheduleKind::kInterleaved},
    {"zb-h1", ScheduleKind::kZeroBubbleH1},
    {"1f1b-overlap", ScheduleKind::k1F1BOverlap}};

// kBackward includes the gradients of weights, but with zero bubble: those are kWeightGradient.
enum class OpKind : uint8_t { kForward, kBackward, kWeightGradient };

// A pass of one micro-batch through one chunk of a rank's layers.
struct PipelineOp {
  OpKind kind;
  int32_t chunk = 0;
  int64_t round = 0;       // from 0
  bool with_next = false;  // whether a forward runs together with the next operation, a backward
  friend bool operator==(const PipelineOp&, const PipelineOp&) = default;
};

// The model is a chain of stages x chunks parts: chunk c of stage s is part c * stages + s, so that
// rows go round the stages `chunks` times.
struct PipelineShape {
  ScheduleKind schedule = ScheduleKind::k1F1B;
  int stages = 1;
  int chunks = 1;  // of each stage

  int parts() const { return stages * chunks; }
  int PartOf(int stage, int chunk) const { return chunk * stages + stage; }
};

// kInvalidArgument unless chunks are those of the schedule: several with kInterleaved, which needs
// them, and k1F1BOverlap alone.
absl::Status CheckPipeline(const PipelineShape& shape);

// Rounds of a step in which there are `rounds` micro-batches for a rank: with several chunks they
// are dealt in groups of as many as there are stages.
int64_t PaddedRounds(const PipelineShape& shape, int64_t rounds);

// Overwrites `ops`, whose memory is reused, with the operations of `stage`, in order: a forward and
// a backward (with zero bubble also a weight gradient), or without `backward` a forward alone, for
// each chunk in each of `rounds` (PaddedRounds). Of each chunk all go through the rounds in
// ascending order, and the forwards, and the backwards, of two neighbouring parts are in the same
// order on both.
void MakeSchedule(const PipelineShape& shape, int stage, int64_t rounds, bool backward,
                  std::vector<PipelineOp>& ops);

// The most rounds of `stage` and chunks of them that are between their first and last operation at
// a time: each needs a stash.
int64_t MostInFlight(const PipelineShape& shape, int stage, int64_t rounds);

}  // namespace moe

#endif  // MOE_MOE_PIPELINE_SCHEDULE_H_
