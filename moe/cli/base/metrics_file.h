// DIR/metrics.jsonl: a JSON object of how the run was started, one per step, then one of the whole
// run.
#ifndef MOE_MOE_CLI_BASE_METRICS_FILE_H_
#define MOE_MOE_CLI_BASE_METRICS_FILE_H_

#include <cstdint>
#include <memory>
#include <string>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/cli/base/launch.h"
#include "moe/cli/base/line_file.h"
#include "moe/cli/base/provenance.h"
#include "moe/cli/base/settings.h"
#include "moe/lm/training_loop.h"

namespace moe::cli {

// C's "%a" of the float: "0x1.62e43p+2". Equal text means equal bits (of numbers).
std::string HexOf(float value);
// Sixteen hexadecimal digits.
std::string HashText(uint64_t hash);

// Objects on one line, without the line's end. Numbers in the units of their names; floats are
// written so that reading them gives the same bits. Key order as listed:
//   schema ("moe.train/1"), provenance, ranks, backend, line ("moe train" with its flags), settings
//   (by name, as texts, those without a value left out: an object that --config takes)
std::string StartLine(const Facts& provenance, const World& world, const Settings& settings);
//   step, loss, loss_hex, val_loss, val_loss_hex (null between validation passes), lr, grad_norm
//   (null: not finite), loss_scale (null: the dtype needs none), skipped (true: the gradients
//   overflowed and the weights have stayed), grid_loss (what the exact grid took of the tensor that
//   it took most of, relative to its norm; 0 in fast numerics),
//   tokens_per_s, step_ms, a2a_ms, expert_ms, all_reduce_ms, attention_ms, output_ms (output layer
//   and loss), optimizer_ms, layer_ms (gates, plans, dense networks, norms, embedding), pipeline_ms
//   (waits for rows of other stages), drop_fraction, max_vio, dead_experts, aux_loss,
//   router_entropy, peak_bytes, expert_load [MoE layer][E]
std::string StepLine(const lm::StepMetrics& metrics);
//   steps, first_step (that the run was resumed after, 0: none), saved_step (of the newest
//   checkpoint, null: none), checkpoint_failures, tokens, seconds (of this run), val_loss_before,
//   val_loss_before_hex, val_loss, val_loss_hex, weights_xxh3, phase_seconds {phase},
//   exchange_seconds {copy, gather, wait}, expert_load [MoE layer][E], dropped_slots, total_slots,
//   skipped_steps, grid_loss (the largest of a step), grid_loss_tensor (null: not above 1e-6),
//   grid_loss_step, grid_unit_log2 (after the last step; null in fast numerics), bf16_order ("dot",
//   "tile"; null without products of bf16 on CPUs), exchange_bytes {self, same_node, cross_node},
//   all_reduce_bytes, pipeline_bytes, tensor_bytes, state_bytes, state_bytes_formula,
//   parameters_total, parameters_active
std::string FinalLine(const lm::TrainReport& report);

// A line is in the file whole or not at all (moe/cli/base/line_file.h).
class MetricsFile {
 public:
  // Creates the folder and the file if needed; if no line is written, the file and the folders that
  // were created are removed. kInvalidArgument if `folder` is a file, another run writes to it, or
  // it holds an earlier run that is not continued: nothing of that run is lost. Errors of the
  // system carry exit code 4.
  static absl::StatusOr<std::unique_ptr<MetricsFile>> Create(
      const std::string& folder, EarlierRun earlier = EarlierRun::kRefused);
  struct EarlierLines {
    std::string text;  // each line with its end; empty without an earlier run
    // What is wrong with the file, in words and counts: lines that belong to no run, which `text`
    // leaves out; missing steps; steps with two lines, of which `text` has the later. Empty:
    // nothing is wrong.
    std::string damage;
  };
  // Lines that a continued run keeps, read before its first Append: the start and the steps before
  // `step`, ascending. The first Append replaces all lines of the file.
  absl::StatusOr<EarlierLines> LinesBefore(int64_t step) const;

  // Path of the file in `folder`.
  static std::string PathIn(const std::string& folder);

  // An error carries exit code 4 and names the file.
  absl::Status Append(absl::string_view line);
  const std::string& path() const { return file_->path(); }

 private:
  explicit MetricsFile(std::unique_ptr<LineFile> file) : file_(std::move(file)) {}

  std::unique_ptr<LineFile> file_;
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_METRICS_FILE_H_
