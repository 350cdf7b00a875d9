#include "moe/pipeline/schedule.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

namespace moe {
namespace {

// Forward or backward number `i` of a stage: groups of as many rounds as there are stages go
// through all chunks before the next group; backwards through the last chunk first.
PipelineOp OpAt(const PipelineShape& shape, OpKind kind, int64_t i) {
  const int64_t group = i / shape.parts(), in_group = i % shape.parts();
  const auto chunk = static_cast<int32_t>(in_group / shape.stages);
  return {.kind = kind,
          .chunk = kind == OpKind::kForward ? chunk : shape.chunks - 1 - chunk,
          .round = group * shape.stages + in_group % shape.stages};
}

// Forwards before the first backward.
int64_t WarmUp(const PipelineShape& shape, int stage, int64_t forwards) {
  const int64_t after = shape.stages - 1 - stage;  // stages after this one
  switch (shape.schedule) {
    case ScheduleKind::kGPipe:
      return forwards;
    case ScheduleKind::k1F1B:
      return std::min(after, forwards);
    case ScheduleKind::kZeroBubbleH1:
      return std::min(after + 1, forwards);
    case ScheduleKind::kInterleaved:
    case ScheduleKind::k1F1BOverlap:
      // A forward more for each stage: the chain of forwards passes it again before a backward. And
      // one more where a backward runs together with a forward, which is then none that it needs.
      return std::min(2 * after + int64_t{shape.chunks - 1} * shape.stages +
                          (shape.schedule == ScheduleKind::k1F1BOverlap ? 1 : 0),
                      forwards);
  }
  return forwards;
}

// Stage s does s backwards before their weight gradients: as many as make it keep what the first
// stage keeps.
void ZeroBubbleH1(const PipelineShape& shape, int stage, int64_t rounds,
                  std::vector<PipelineOp>& ops) {
  int64_t forwards = WarmUp(shape, stage, rounds), gradients = 0;
  for (int64_t round = 0; round < forwards; ++round) ops.push_back({OpKind::kForward, 0, round});
  for (int64_t round = 0; round < rounds; ++round) {
    ops.push_back({OpKind::kBackward, 0, round});
    if (round >= stage) ops.push_back({OpKind::kWeightGradient, 0, gradients++});
    if (forwards < rounds) ops.push_back({OpKind::kForward, 0, forwards++});
  }
  while (gradients < rounds) ops.push_back({OpKind::kWeightGradient, 0, gradients++});
}

}  // namespace

absl::Status CheckPipeline(const PipelineShape& shape) {
  const bool interleaved = shape.schedule == ScheduleKind::kInterleaved;
  const bool overlaps = shape.schedule == ScheduleKind::k1F1BOverlap;
  const char* const name = NameOf(shape.schedule, kScheduleWords);
  if (shape.chunks < 1 || (!overlaps && interleaved != (shape.chunks > 1))) {
    return absl::InvalidArgumentError(
        absl::StrCat("pipeline: ", shape.chunks, " chunks a stage with schedule ", name,
                     interleaved ? ", expected 2 or more"
                                 : ", expected 1, or schedule interleaved or 1f1b-overlap"));
  }
  if (shape.stages > 1 || shape.chunks == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("pipeline: ", shape.chunks,
                                                 " chunks with schedule ", name,
                                                 " and 1 stage, expected 1 chunk, or more stages"));
}

int64_t PaddedRounds(const PipelineShape& shape, int64_t rounds) {
  if (shape.chunks == 1) return rounds;
  return (rounds + shape.stages - 1) / shape.stages * shape.stages;
}

void MakeSchedule(const PipelineShape& shape, int stage, int64_t rounds, bool backward,
                  std::vector<PipelineOp>& ops) {
  ops.clear();
  if (backward && shape.schedule == ScheduleKind::kZeroBubbleH1) {
    return ZeroBubbleH1(shape, stage, rounds, ops);
  }
  const int64_t forwards = rounds * shape.chunks;
  // One chunk needs no groups: OpAt then goes through the rounds one by one.
  const int64_t warm_up = backward ? WarmUp(shape, stage, forwards) : forwards;
  for (int64_t i = 0; i < forwards; ++i) {
    ops.push_back(OpAt(shape, OpKind::kForward, i));
    if (!backward || i < warm_up) continue;
    ops.back().with_next = shape.schedule == ScheduleKind::k1F1BOverlap;
    ops.push_back(OpAt(shape, OpKind::kBackward, i - warm_up));
  }
  if (!backward) return;
  for (int64_t i = forwards - warm_up; i < forwards; ++i) {
    ops.push_back(OpAt(shape, OpKind::kBackward, i));
  }
}

int64_t MostInFlight(const PipelineShape& shape, int stage, int64_t rounds) {
  const int64_t forwards = rounds * shape.chunks;
  if (shape.schedule == ScheduleKind::kZeroBubbleH1) {
    return std::min<int64_t>(shape.stages, forwards);
  }
  return std::min(WarmUp(shape, stage, forwards) + 1, forwards);
}

}  // namespace moe
