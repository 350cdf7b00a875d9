#include "moe/plan/mesh_search.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/lm/train_config.h"
#include "moe/plan/model_cost.h"

namespace moe::plan {
namespace {

constexpr int kMostChunks = 8;
constexpr int64_t kMostMicroBatch = 64;

// The better first: by the goal, then as searched.
struct Better {
  Goal goal;

  bool operator()(const Candidate& a, const Candidate& b) const { return Key(a) < Key(b); }
  std::tuple<double, double> Key(const Candidate& c) const {
    const double seconds = c.time.total(), bytes = c.memory.total_bytes();
    return goal == Goal::kThroughput ? std::tuple(seconds, bytes) : std::tuple(bytes, seconds);
  }
};

class Search {
 public:
  explicit Search(const SearchOptions& options)
      : options_(options),
        cost_(CostOf(options.base.model)),
        config_(options.base),
        better_{options.goal} {
    work_ = WorkloadOf(config_, options.ranks);
    work_.sequences = options.sequences;
    shape_ = ShapeOfTraining(config_, options.ranks);
  }

  SearchResult Run() {
    for (int pipeline = 1; pipeline <= std::min(work_.ranks, cost_.layers); ++pipeline) {
      if (work_.ranks % pipeline != 0) continue;
      const int leaves = config_.trainer.session.tensor_leaves;
      for (int tensor = 1; tensor <= leaves; tensor *= 2) {
        for (int share = 1; share <= leaves; share *= 2) TryExperts(pipeline, tensor, share);
      }
    }
    std::stable_sort(result_.fitting.begin(), result_.fitting.end(), better_);
    std::stable_sort(result_.too_big.begin(), result_.too_big.end(), Better{Goal::kFits});
    return std::move(result_);
  }

 private:
  // Every EP with so many ranks that share an expert.
  void TryExperts(int pipeline, int tensor, int share) {
    const int of_stage = work_.ranks / pipeline;
    const int step = std::max(1, tensor / share);  // powers of two: TP divides EP times ETP
    const int most = std::min(of_stage / share, static_cast<int>(cost_.experts));
    for (int expert = step; expert <= most; expert += step) {
      if (of_stage % (expert * share) != 0) continue;
      TryMesh({.tensor = tensor, .pipeline = pipeline, .expert_tensor = share, .expert = expert});
    }
  }

  // Keeps the best of what fits, or the least of what does not.
  void TryMesh(const MeshShape& mesh) {
    work_.row_skew = options_.row_skew && mesh.expert > 1 ? options_.row_skew(mesh.expert) : 1;
    best_.reset();
    least_.reset();
    Layout layout = {.mesh = mesh};
    TryMicroBatches(layout);
    if (mesh.pipeline > 1) {
      layout.schedule = ScheduleKind::kZeroBubbleH1;
      TryMicroBatches(layout);
      layout.schedule = ScheduleKind::kInterleaved;
      const int most = std::min(kMostChunks, cost_.layers / mesh.pipeline);
      for (layout.chunks = 2; layout.chunks <= most; ++layout.chunks) TryMicroBatches(layout);
    }
    if (best_.has_value()) {
      result_.fitting.push_back(*std::move(best_));
    } else if (least_.has_value()) {
      result_.too_big.push_back(*std::move(least_));
    }
  }

  void TryMicroBatches(Layout layout) {
    const int64_t given = options_.micro_batch_size;
    const int64_t first = given > 0 ? given : 1, last = given > 0 ? given : kMostMicroBatch;
    for (int64_t size = first; size <= last && work_.sequences % size == 0; size *= 2) {
      layout.micro_batch_size = size;
      SetLayout(layout, work_, config_);
      const int64_t count = MicroBatches(work_, layout);
      absl::Status status = lm::ValidateTrainConfig(config_, work_.ranks);
      if (status.ok() && count < DataRanks(work_, layout)) {
        status = absl::InvalidArgumentError("fewer micro-batches than ranks that take some");
      }
      const bool shares = StageRanks(work_, layout) > 1;
      const int stages = shares ? 4 : 1;  // of ZeRO
      for (int zero = 0; zero < stages; ++zero) {
        layout.zero = static_cast<ZeroStage>(zero);
        for (const auto recompute :
             {Recompute::kNone, Recompute::kActivations, Recompute::kLayer}) {
          layout.recompute = recompute;
          if (options_.takes && !options_.takes(layout)) continue;
          status.ok() ? Try(layout) : Refuse(status);
        }
      }
    }
  }

  void Refuse(const absl::Status& status) {
    const absl::string_view message = status.message();
    auto& refused = result_.refused[std::string(message.substr(0, message.find(" is ")))];
    if (refused.layouts == 0) refused.first = std::string(message);
    ++refused.layouts;
  }

  void Try(const Layout& layout) {
    ++result_.candidates;
    shape_.model.recompute = layout.recompute;
    shape_.trainer.zero = layout.zero;
    shape_.trainer.session.mesh = layout.mesh;
    shape_.trainer.pipeline_schedule = layout.schedule;
    shape_.trainer.pipeline_chunks = layout.chunks;
    shape_.trainer.micro_batches = MicroBatches(work_, layout);
    shape_.tokens = layout.micro_batch_size * work_.sequence_length;
    shape_.row_skew = work_.row_skew;
    Candidate next = {.layout = layout, .work = work_, .memory = EstimateMemory(shape_)};
    const bool fits = next.memory.total_bytes() <= options_.machine.memory_bytes;
    if (!fits && best_.has_value()) return;
    next.time = PredictStep(cost_, options_.machine, work_, layout, bubbles_);
    std::optional<Candidate>& kept = fits ? best_ : least_;
    const Better better = fits ? better_ : Better{Goal::kFits};
    if (!kept.has_value() || better(next, *kept)) kept = next;
  }

  const SearchOptions& options_;
  const ModelCost cost_;
  lm::TrainConfig config_;
  const Better better_;
  Workload work_;
  MemoryShape shape_;
  Bubbles bubbles_;
  std::optional<Candidate> best_, least_;  // of the mesh
  SearchResult result_;
};

}  // namespace

absl::StatusOr<SearchResult> SearchMeshes(const SearchOptions& options) {
  lm::TrainConfig alone = options.base;
  SetLayout({}, {.sequences = options.sequences}, alone);
  MOE_RETURN_IF_ERROR(lm::ValidateTrainConfig(alone, 1));
  return Search(options).Run();
}

void SetLayout(const Layout& layout, const Workload& work, lm::TrainConfig& config) {
  config.model.recompute = layout.recompute;
  config.trainer.session.mesh = layout.mesh;
  config.trainer.pipeline_schedule = layout.schedule;
  config.trainer.pipeline_chunks = layout.chunks;
  config.trainer.zero = layout.zero;
  config.trainer.micro_batches = MicroBatches(work, layout);
  config.micro_batch_size = layout.micro_batch_size;
}

Workload WorkloadOf(const lm::TrainConfig& config, int ranks) {
  const Numerics numerics = config.trainer.session.numerics;
  return {.ranks = ranks,
          .sequences = config.trainer.micro_batches * config.micro_batch_size,
          .sequence_length = config.sequence_length,
          .element_bytes = static_cast<double>(SizeOf(config.trainer.dtype)),
          .sum_bytes = static_cast<double>(SumBytesOfElement(numerics))};
}

Layout LayoutOf(const lm::TrainConfig& config) {
  const PipelineShape pipeline = PipelineOf(config.trainer);
  return {.mesh = config.trainer.session.mesh,
          .schedule = pipeline.schedule,
          .chunks = pipeline.chunks,
          .zero = config.trainer.zero,
          .recompute = config.model.recompute,
          .micro_batch_size = config.micro_batch_size};
}

std::pair<const char*, double> MostMemory(const MemoryEstimate& memory) {
  const std::pair<const char*, double> kinds[] = {{"weights", memory.weight_bytes},
                                                  {"gradients", memory.gradient_bytes},
                                                  {"optimiser", memory.optimizer_bytes},
                                                  {"buffers", memory.buffer_bytes},
                                                  {"activations", memory.workspace_bytes}};
  return *std::max_element(std::begin(kinds), std::end(kinds),
                           [](const auto& a, const auto& b) { return a.second < b.second; });
}

std::optional<int> RanksThatFit(SearchOptions options) {
  constexpr int kMostTimes = 4096;
  const int ranks = options.ranks;
  for (int times = 2; times <= kMostTimes; times *= 2) {
    if (ranks > std::numeric_limits<int>::max() / times) break;
    options.ranks = ranks * times;
    const auto result = SearchMeshes(options);
    if (result.ok() && !result->fitting.empty()) return options.ranks;
  }
  return std::nullopt;
}

}  // namespace moe::plan
