#include "moe/cli/plan/plan_output.h"

#include <algorithm>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

namespace moe::cli {
namespace {

using measure::Fields;

constexpr double kGib = 0x1p30;

std::string ScheduleText(const plan::Layout& layout) {
  if (layout.mesh.pipeline == 1) return "-";
  const std::string name = NameOf(layout.schedule, kScheduleWords);
  return layout.chunks > 1 ? absl::StrCat(name, " ", layout.chunks) : name;
}

std::string DegreesText(const MeshShape& mesh) {
  return fmt::format("{}x{}x{}", mesh.pipeline, mesh.tensor, mesh.expert);
}

}  // namespace

std::string MeshText(const MeshShape& mesh) {
  const std::string text = DegreesText(mesh);
  return mesh.expert_tensor > 1 ? absl::StrCat(text, " ETP ", mesh.expert_tensor) : text;
}

std::string TooBigText(const plan::MemoryEstimate& memory, double limit_bytes) {
  const auto [kind, bytes] = plan::MostMemory(memory);
  return fmt::format("needs {:.1f} GiB of {:.1f}, most of it {:.1f} of {}",
                     memory.total_bytes() / kGib, limit_bytes / kGib, bytes / kGib, kind);
}

Fields PlanFields(const PlanRow& row, double limit_bytes) {
  const plan::Candidate& c = row.candidate;
  const plan::Layout& layout = c.layout;
  const plan::StepTime& time = c.time;
  const plan::MemoryEstimate& memory = c.memory;
  return {{"schema", "moe.plan/1"},
          {"pp", int64_t{layout.mesh.pipeline}},
          {"tp", int64_t{layout.mesh.tensor}},
          {"ep", int64_t{layout.mesh.expert}},
          {"etp", int64_t{layout.mesh.expert_tensor}},
          {"dp", int64_t{plan::DataRanks(c.work, layout)}},
          {"expert_dp", int64_t{plan::ExpertDataRanks(c.work, layout)}},
          {"vp", int64_t{layout.chunks}},
          {"schedule", NameOf(layout.schedule, kScheduleWords)},
          {"zero", int64_t{static_cast<int>(layout.zero)}},
          {"recompute", NameOf(layout.recompute, kRecomputeWords)},
          {"micro_batch_size", layout.micro_batch_size},
          {"micro_batches", plan::MicroBatches(c.work, layout)},
          {"rounds", plan::Rounds(c.work, layout)},
          {"row_skew", c.work.row_skew},
          {"step_ms", time.total() * 1e3},
          {"tokens_per_s", c.tokens_per_s()},
          {"attention_ms", time.attention * 1e3},
          {"expert_ms", time.experts * 1e3},
          {"dense_ms", time.dense * 1e3},
          {"output_ms", time.output * 1e3},
          {"memory_ms", time.memory * 1e3},
          {"layers_ms", time.layers * 1e3},
          {"exchange_ms", time.exchange * 1e3},
          {"tensor_ms", time.tensors * 1e3},
          {"bubble_ms", time.bubble * 1e3},
          {"gradients_ms", time.gradients * 1e3},
          {"optimizer_ms", time.optimizer * 1e3},
          {"bubble_pct", 100 * time.bubble_share},
          {"weight_bytes", memory.weight_bytes},
          {"gradient_bytes", memory.gradient_bytes},
          {"optimizer_bytes", memory.optimizer_bytes},
          {"buffer_bytes", memory.buffer_bytes},
          {"activation_bytes", memory.activation_bytes},
          {"workspace_bytes", memory.workspace_bytes},
          {"used_bytes", memory.used_bytes()},
          {"total_bytes", memory.total_bytes()},
          {"limit_bytes", limit_bytes},
          {"measured_ms", row.measured ? row.measured->seconds * 1e3 : measure::kNone},
          {"measured_bytes", row.measured ? row.measured->peak_bytes : measure::kNone},
          {"status", row.fits ? "fits" : "too big"},
          {"reason", measure::Cell::TextIf(!row.fits, row.reason)},
          {"command", row.command}};
}

std::string PlanTable(const std::vector<PlanRow>& rows) {
  std::vector<measure::Column> columns = {{"mesh", "PPxTPxEP", "", -10},
                                          {"etp", "ETP", "", 3},
                                          {"dp", "DP", "", 4},
                                          {"zero", "ZeRO", "", 4},
                                          {"schedule", "schedule", "", -14},
                                          {"again", "again", "", -11},
                                          {"size", "mb", "", 2},
                                          {"step", "step", "(ms)", 9, 1},
                                          {"speed", "tok/s", "(a rank)", 9, 1},
                                          {"bubble", "bubble", "(%)", 6, 1},
                                          {"exchange", "exchange", "(ms)", 9, 1},
                                          {"gradients", "gradients", "(ms)", 9, 1},
                                          {"memory", "memory", "(GiB)", 8, 2},
                                          {"weights", "weights", "(GiB)", 8, 2},
                                          {"sums", "sums", "(GiB)", 8, 2},
                                          {"optimizer", "optim.", "(GiB)", 8, 2},
                                          {"activations", "activ.", "(GiB)", 8, 2}};
  const bool shared = std::any_of(rows.begin(), rows.end(), [](const PlanRow& row) {
    return row.candidate.layout.mesh.expert_tensor > 1;
  });
  if (!shared) columns.erase(columns.begin() + 1);
  std::string text = measure::TableHead(columns);
  for (const PlanRow& row : rows) {
    const plan::Candidate& c = row.candidate;
    const plan::MemoryEstimate& memory = c.memory;
    const Fields shown = {{"mesh", DegreesText(c.layout.mesh)},
                          {"etp", int64_t{c.layout.mesh.expert_tensor}},
                          {"dp", int64_t{plan::DataRanks(c.work, c.layout)}},
                          {"zero", int64_t{static_cast<int>(c.layout.zero)}},
                          {"schedule", ScheduleText(c.layout)},
                          {"again", NameOf(c.layout.recompute, kRecomputeWords)},
                          {"size", c.layout.micro_batch_size},
                          {"step", c.time.total() * 1e3},
                          {"speed", c.tokens_per_s() / c.work.ranks},
                          {"bubble", 100 * c.time.bubble_share},
                          {"exchange", c.time.exchange * 1e3},
                          {"gradients", c.time.gradients * 1e3},
                          {"memory", memory.total_bytes() / kGib},
                          {"weights", memory.weight_bytes / kGib},
                          {"sums", memory.gradient_bytes / kGib},
                          {"optimizer", memory.optimizer_bytes / kGib},
                          {"activations", (memory.workspace_bytes + memory.buffer_bytes) / kGib}};
    text += measure::TableLine(columns, shown, 0);
  }
  return text;
}

}  // namespace moe::cli
