#include "moe/cli/plan/plan_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include "comm/agreement.h"
#include "comm/create.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/layout_settings.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/train_options.h"
#include "moe/cli/measure/machine_memory.h"
#include "moe/cli/measure/statistics.h"
#include "moe/cli/measure/tables.h"
#include "moe/lm/training_loop.h"

namespace moe::cli {
namespace {

// Bytes that the model has tokens for, alike often, enough for a step and an evaluation.
absl::StatusOr<lm::Corpus> DrawnText(const lm::TrainConfig& train) {
  const int64_t batch = train.trainer.micro_batches * train.micro_batch_size;
  const int64_t bytes = batch * (train.sequence_length + 1);
  const auto values = static_cast<uint64_t>(std::min<int64_t>(train.model.vocab_size, 256));
  std::vector<uint8_t> text(
      static_cast<size_t>(bytes + bytes / (lm::kHeldOutEvery - 1) + 3 * lm::kHeldOutBlock));
  for (size_t i = 0; i < text.size(); ++i) {
    text[i] = static_cast<uint8_t>((i * 0x9E3779B97F4A7C15 >> 32) % values);
  }
  return lm::CorpusOf(std::move(text), train.sequence_length);
}

// What training with `train` took; on rank 0 alone of processes.
absl::StatusOr<MeasuredStep> MeasureStep(const Settings& train, const Launch& launch, int64_t steps,
                                         Communicator* world) {
  MOE_ASSIGN_OR_RETURN(TrainOptions options, MakeTrainOptions(train, launch.world));
  lm::TrainConfig& config = options.train;
  config.steps = steps;
  // Weights hardly move, so that routing stays as even as it begins.
  config.schedule = {.peak = 1e-9, .total_steps = steps};
  config.evaluation = {.sequences = config.micro_batch_size};
  const std::string too_big =
      measure::TooBig(plan::EstimateMemory(plan::ShapeOfTraining(config, launch.world.ranks)),
                      launch.world.local_ranks, measure::AvailableMemoryBytes());
  if (!too_big.empty()) return absl::ResourceExhaustedError(too_big);
  MOE_ASSIGN_OR_RETURN(const lm::Corpus text, DrawnText(config));
  MeasuredStep measured = {.seconds = std::numeric_limits<double>::infinity()};
  const auto on_step = [&](const lm::StepMetrics& metrics) {
    if (metrics.step > 1) measured.seconds = std::min(measured.seconds, metrics.step_seconds);
    measured.peak_bytes = std::max(measured.peak_bytes, static_cast<double>(metrics.peak_bytes));
    return absl::OkStatus();
  };
  const auto body = [&](std::unique_ptr<Communicator> ranks) {
    return lm::Train(config, text, std::move(ranks), {on_step}).status();
  };
  if (world == nullptr) {
    MOE_RETURN_IF_ERROR(RunRanks(RankOptions(launch, CommTimeout(train), "plan"), body));
  } else {
    MOE_ASSIGN_OR_RETURN(auto part, world->Split(0, world->rank()));
    MOE_RETURN_IF_ERROR(body(std::move(part)));
  }
  return measured;
}

}  // namespace

absl::Status MeasureRows(const Settings& train, const Launch& launch, const PlanOptions& options,
                         absl::Span<PlanRow> rows) {
  const auto measure = [&](Communicator* world) -> absl::Status {
    for (int turn = 0; turn < options.repetitions; ++turn) {
      for (PlanRow& row : rows) {
        MOE_ASSIGN_OR_RETURN(const MeasuredStep step, MeasureStep(WithLayout(train, row.candidate),
                                                                  launch, options.steps, world));
        MeasuredStep& best = row.measured.has_value() ? *row.measured : row.measured.emplace(step);
        best.seconds = std::min(best.seconds, step.seconds);
        best.peak_bytes = std::max(best.peak_bytes, step.peak_bytes);
      }
    }
    return absl::OkStatus();
  };
  if (!launch.plan.processes()) return measure(nullptr);
  std::vector<AgreedValue> values = AgreedValuesOf("plan --check", train);
  for (const PlanRow& row : rows) values.push_back({.name = "a layout", .text = row.command});
  return RunRanks(RankOptions(launch, CommTimeout(train), "plan"),
                  [&](std::unique_ptr<Communicator> world) -> absl::Status {
                    MOE_RETURN_IF_ERROR(CheckWorldSize(launch, *world));
                    MOE_RETURN_IF_ERROR(CheckAgreement(values, {}, *world));
                    return OrAbort(*world, measure(world.get()));
                  });
}

PlannerError PlannerErrorOf(const std::vector<PlanRow>& rows) {
  std::vector<double> errors, seconds;
  for (const PlanRow& row : rows) {
    if (!row.measured.has_value()) continue;
    seconds.push_back(row.measured->seconds);
    errors.push_back(100 * std::abs(row.candidate.time.total() / seconds.back() - 1));
  }
  if (errors.empty()) return {};
  const measure::Statistics error = measure::Describe(errors);
  return {.median_pct = error.p50,
          .most_pct = error.max,
          .first_pct = 100 * (seconds.front() / measure::Describe(seconds).min - 1)};
}

std::string CheckText(const std::vector<PlanRow>& rows) {
  static constexpr measure::Column kColumns[] = {{"layout", "layout", "", 6},
                                                 {"predicted", "predicted", "(ms)", 10, 1},
                                                 {"measured", "measured", "(ms)", 10, 1},
                                                 {"error", "error", "(%)", 7, 1},
                                                 {"memory", "memory", "(MiB)", 9, 1},
                                                 {"peak", "measured", "(MiB)", 9, 1},
                                                 {"memory_error", "error", "(%)", 7, 1}};
  std::string text = measure::TableHead(kColumns);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].measured.has_value()) continue;
    const double predicted = rows[i].candidate.time.total(), seconds = rows[i].measured->seconds;
    const double used = rows[i].candidate.memory.used_bytes(), peak = rows[i].measured->peak_bytes;
    const measure::Fields shown = {{"layout", static_cast<int64_t>(i + 1)},
                                   {"predicted", predicted * 1e3},
                                   {"measured", seconds * 1e3},
                                   {"error", 100 * (predicted / seconds - 1)},
                                   {"memory", used / 0x1p20},
                                   {"peak", peak / 0x1p20},
                                   {"memory_error", 100 * (used / peak - 1)}};
    text += measure::TableLine(kColumns, shown, 0);
  }
  const PlannerError error = PlannerErrorOf(rows);
  return text + fmt::format(
                    "step times: median error {:.1f} %, largest {:.1f} %; the first layout took "
                    "{:.1f} % longer than the fastest\n",
                    error.median_pct, error.most_pct, error.first_pct);
}

}  // namespace moe::cli
