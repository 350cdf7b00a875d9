#include "moe/plan/pipeline_time.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <vector>

namespace moe::plan {
namespace {

constexpr double kHopUnits = 16;  // of a forward
// Rounds for each stage after which a pipeline is in its steady state.
constexpr int64_t kSteadyRounds = 2;

// When operations have ended, by kind, part and round.
class Ends {
 public:
  Ends(int parts, int64_t rounds)
      : rounds_(rounds),
        forward_(static_cast<size_t>(parts * rounds), kNotYet),
        backward_(forward_) {}

  double& At(OpKind kind, int part, int64_t round) {
    std::vector<double>& ends = kind == OpKind::kForward ? forward_ : backward_;
    return ends[static_cast<size_t>(part * rounds_ + round)];
  }

  static constexpr double kNotYet = -1;

 private:
  const int64_t rounds_;
  std::vector<double> forward_, backward_;
};

double TimeOf(const PipelineOp& op, const PipelineShape& shape, const OpTimes& times) {
  const bool split = shape.schedule == ScheduleKind::kZeroBubbleH1;
  if (op.kind == OpKind::kForward) return times.forward;
  return split ? times.backward / 2 : times.backward;
}

// When the rows are there that an operation of `part` begins with; nullopt: not known yet.
std::optional<double> RowsAt(const PipelineOp& op, int part, const PipelineShape& shape,
                             const OpTimes& times, Ends& ends) {
  const bool forward = op.kind == OpKind::kForward;
  const int before = forward ? part - 1 : part + 1;
  if (op.kind == OpKind::kWeightGradient || before < 0 || before >= shape.parts()) return 0;
  const double end = ends.At(op.kind, before, op.round);
  if (end == Ends::kNotYet) return std::nullopt;
  return end + (shape.stages > 1 ? times.hop : 0);
}

}  // namespace

double PipelineSpan(const PipelineShape& shape, int64_t rounds, const OpTimes& times) {
  rounds = PaddedRounds(shape, rounds);
  std::vector<std::vector<PipelineOp>> ops(static_cast<size_t>(shape.stages));
  std::vector<size_t> next(ops.size(), 0);
  std::vector<double> free_at(ops.size(), 0);
  Ends ends(shape.parts(), rounds);
  for (int s = 0; s < shape.stages; ++s) MakeSchedule(shape, s, rounds, true, ops[s]);
  bool moved = true;
  while (moved) {
    moved = false;
    for (size_t s = 0; s < ops.size(); ++s) {
      for (; next[s] < ops[s].size(); ++next[s]) {
        const PipelineOp& op = ops[s][next[s]];
        const int part = shape.PartOf(static_cast<int>(s), op.chunk);
        const auto rows = RowsAt(op, part, shape, times, ends);
        if (!rows.has_value()) break;
        free_at[s] = std::max(free_at[s], *rows) + TimeOf(op, shape, times);
        if (op.kind != OpKind::kWeightGradient) ends.At(op.kind, part, op.round) = free_at[s];
        moved = true;
      }
    }
  }
  return *std::max_element(free_at.begin(), free_at.end());
}

double Bubbles::Share(const PipelineShape& shape, int64_t rounds, const OpTimes& times) {
  if (shape.stages == 1) return 0;
  const auto hop = static_cast<int64_t>(std::lround(times.hop / times.forward * kHopUnits));
  const auto backward = static_cast<int64_t>(std::lround(times.backward / times.forward * 1024));
  const Key key = {shape.schedule, shape.stages, shape.chunks, rounds, hop, backward};
  const auto [found, missing] = shares_.try_emplace(key, 0.0);
  if (!missing) return found->second;
  const OpTimes units = {.forward = 1,
                         .backward = static_cast<double>(backward) / 1024,
                         .hop = static_cast<double>(hop) / kHopUnits};
  const int64_t padded = PaddedRounds(shape, rounds);
  const int64_t steady = kSteadyRounds * shape.stages;
  double span = 0;
  if (padded <= 2 * steady) {
    span = PipelineSpan(shape, padded, units);
  } else {
    const double first = PipelineSpan(shape, steady, units);
    const double second = PipelineSpan(shape, 2 * steady, units);
    span = second + (second - first) * static_cast<double>(padded - 2 * steady) /
                        static_cast<double>(steady);
  }
  const double ideal = static_cast<double>(rounds * shape.chunks) * (1 + units.backward);
  return found->second = span / ideal - 1;
}

}  // namespace moe::plan
