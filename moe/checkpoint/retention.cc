#include "moe/checkpoint/retention.h"

#include <algorithm>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/checkpoint/manifest.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/step_folders.h"

namespace moe {
namespace {

absl::Status CheckRun(const std::string& path, const CheckpointManifest& manifest,
                      const std::string& run) {
  if (RunOf(manifest.sections) == run) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("'", path, "' is of another run"));
}

// OK: it counts. kNotFound: it is gone.
absl::Status CheckCounted(const std::string& path, const std::string& run, FileSystem& files) {
  const auto reader = CheckpointReader::Open(path);
  if (reader.ok()) return CheckRun(path, reader->manifest(), run);
  absl::Status there = CheckIsFolder(path, files);
  if (!there.ok()) return there;
  return absl::FailedPreconditionError(PassedOver(path, reader.status()));
}

// kNotFound: it is gone.
absl::Status CheckIsOfRun(const std::string& path, int64_t step, const std::string& run,
                          FileSystem& files) {
  MOE_RETURN_IF_ERROR(CheckHoldsCheckpointAlone(path, files));
  const auto manifest = ReadManifest(path);
  if (!manifest.ok()) {
    MOE_RETURN_IF_ERROR(CheckHoldsCheckpointAlone(path, files));  // whether it is gone
    return absl::FailedPreconditionError(
        absl::StrCat("'", path, "' has ", absl::IsNotFound(manifest.status()) ? "no" : "a damaged",
                     " manifest"));
  }
  if (manifest->step != step) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", path, "' has a manifest of step ", manifest->step));
  }
  return CheckRun(path, *manifest, run);
}

void AddReason(const absl::Status& status, std::vector<std::string>& lines) {
  if (!absl::IsNotFound(status)) lines.emplace_back(status.message());
}

}  // namespace

RetentionPlan PlanRetention(const std::string& folder, absl::Span<const int64_t> steps,
                            const RetentionOptions& options, FileSystem& files) {
  const absl::Span<const int64_t> damaged = options.damaged_steps;
  RetentionPlan plan;
  int kept = 0;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const std::string path = absl::StrCat(folder, "/", StepFolderName(*step));
    if (kept < options.keep) {
      if (std::find(damaged.begin(), damaged.end(), *step) != damaged.end()) continue;
      const absl::Status counts = CheckCounted(path, options.run, files);
      if (counts.ok()) {
        ++kept;
      } else {
        AddReason(counts, plan.not_counted);
      }
      continue;
    }
    if (options.keep_every != 0 && *step % options.keep_every == 0) continue;
    const absl::Status of_run = CheckIsOfRun(path, *step, options.run, files);
    if (of_run.ok()) {
      plan.removed.push_back(*step);
    } else {
      AddReason(of_run, plan.left_alone);
    }
  }
  std::reverse(plan.removed.begin(), plan.removed.end());
  std::reverse(plan.left_alone.begin(), plan.left_alone.end());
  std::reverse(plan.not_counted.begin(), plan.not_counted.end());
  return plan;
}

}  // namespace moe
