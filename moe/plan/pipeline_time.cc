#include "moe/plan/pipeline_time.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <set>
#include <utility>
#include <vector>

namespace moe::plan {
namespace {

constexpr double kHopUnits = 16;  // of a forward
// Rounds for each stage after which a pipeline is in its steady state.
constexpr int64_t kSteadyRounds = 2;

// Stages that run their lists. Those that compute advance alike, by `clock_`, which runs slower
// than the time while they have to share cores.
class Simulation {
 public:
  Simulation(const PipelineShape& shape, int64_t rounds, const OpTimes& times)
      : shape_(shape),
        times_(times),
        rounds_(rounds),
        cores_(shape.stages / times.sharers),
        stages_(static_cast<size_t>(shape.stages)),
        forward_(static_cast<size_t>(shape.parts() * rounds), kNotYet),
        backward_(forward_) {
    for (int s = 0; s < shape.stages; ++s) MakeSchedule(shape, s, rounds, true, stages_[s].ops);
  }

  double Span() {
    for (int s = 0; s < shape_.stages; ++s) Begin(s);
    while (!ends_.empty() || !arrivals_.empty()) {
      const double pace = std::min(1.0, cores_ / static_cast<double>(ends_.size()));
      const double end = ends_.empty() ? kNever : now_ + (ends_.begin()->first - clock_) / pace;
      if (end <= (arrivals_.empty() ? kNever : arrivals_.begin()->first)) {
        const auto [clock, stage] = *ends_.begin();
        ends_.erase(ends_.begin());
        now_ = end;
        clock_ = clock;
        End(stage);
      } else {
        const auto [arrival, stage] = *arrivals_.begin();
        arrivals_.erase(arrivals_.begin());
        clock_ += (arrival - now_) * pace;
        now_ = arrival;
        Begin(stage);
      }
    }
    return now_;
  }

 private:
  struct Stage {
    std::vector<PipelineOp> ops;
    size_t next = 0;
    bool computes = false;
  };
  // Moments and stages, the earliest first.
  using Events = std::set<std::pair<double, int>>;

  static constexpr double kNotYet = -1;
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  double TimeOf(const PipelineOp& op) const {
    const bool split = shape_.schedule == ScheduleKind::kZeroBubbleH1;
    if (op.kind == OpKind::kForward) return times_.forward;
    return split ? times_.backward / 2 : times_.backward;
  }

  // When an operation of a part has ended.
  double& EndOf(OpKind kind, int part, int64_t round) {
    std::vector<double>& ends = kind == OpKind::kForward ? forward_ : backward_;
    return ends[static_cast<size_t>(part * rounds_ + round)];
  }

  // When the rows are there that an operation of `part` begins with; kNever: not known yet.
  double RowsAt(const PipelineOp& op, int part) {
    const int before = op.kind == OpKind::kForward ? part - 1 : part + 1;
    if (op.kind == OpKind::kWeightGradient || before < 0 || before >= shape_.parts()) return 0;
    const double end = EndOf(op.kind, before, op.round);
    if (end == kNotYet) return kNever;
    return end + (shape_.stages > 1 ? times_.hop : 0);
  }

  // The next operation of a stage, once its rows are there.
  void Begin(int s) {
    Stage& stage = stages_[static_cast<size_t>(s)];
    if (stage.computes || stage.next == stage.ops.size()) return;
    const PipelineOp& op = stage.ops[stage.next];
    const double rows = RowsAt(op, shape_.PartOf(s, op.chunk));
    if (rows == kNever) return;
    stage.computes = rows <= now_;
    if (stage.computes) {
      ends_.emplace(clock_ + TimeOf(op), s);
    } else {
      arrivals_.emplace(rows, s);
    }
  }

  void End(int s) {
    Stage& stage = stages_[static_cast<size_t>(s)];
    const PipelineOp& op = stage.ops[stage.next++];
    stage.computes = false;
    Begin(s);
    if (op.kind == OpKind::kWeightGradient) return;
    const int part = shape_.PartOf(s, op.chunk);
    EndOf(op.kind, part, op.round) = now_;
    const int after = op.kind == OpKind::kForward ? part + 1 : part - 1;
    if (after >= 0 && after < shape_.parts()) Begin(after % shape_.stages);
  }

  const PipelineShape& shape_;
  const OpTimes& times_;
  const int64_t rounds_;
  const double cores_;
  std::vector<Stage> stages_;
  std::vector<double> forward_, backward_;
  Events ends_;      // on clock_
  Events arrivals_;  // of rows
  double now_ = 0, clock_ = 0;
};

}  // namespace

double PipelineSpan(const PipelineShape& shape, int64_t rounds, const OpTimes& times) {
  return Simulation(shape, PaddedRounds(shape, rounds), times).Span();
}

double Bubbles::Share(const PipelineShape& shape, int64_t rounds, const OpTimes& times) {
  if (shape.stages == 1) return 0;
  const auto hop = static_cast<int64_t>(std::lround(times.hop / times.forward * kHopUnits));
  const auto backward = static_cast<int64_t>(std::lround(times.backward / times.forward * 1024));
  const Key key = {shape.schedule, shape.stages, shape.chunks, rounds, hop,
                   backward,       times.sharers};
  const auto [found, missing] = shares_.try_emplace(key, 0.0);
  if (!missing) return found->second;
  const OpTimes units = {.forward = 1,
                         .backward = static_cast<double>(backward) / 1024,
                         .hop = static_cast<double>(hop) / kHopUnits,
                         .sharers = times.sharers};
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
  const double ideal =
      static_cast<double>(rounds * shape.chunks) * (1 + units.backward) * units.sharers;
  return found->second = span / ideal - 1;
}

}  // namespace moe::plan
