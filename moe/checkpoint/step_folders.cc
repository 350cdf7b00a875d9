#include "moe/checkpoint/step_folders.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <system_error>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr char kStepPrefix[] = "step-";
// Before the name of a step folder that is being written, or removed.
constexpr char kUnfinishedPrefix[] = ".tmp-";
constexpr char kTrashPrefix[] = ".trash-";
// Before the name of one that no reader took, and how many of a step may be kept.
constexpr char kAsidePrefix[] = "damaged-";
constexpr int kMaxAside = 100;

bool Absent(std::error_code error) {
  return error.value() == ENOENT;
}

}  // namespace

std::string StepFolderName(int64_t step) {
  return absl::StrCat(kStepPrefix, absl::Dec(step, absl::kZeroPad8));
}

std::string UnfinishedPath(const std::string& folder, int64_t step, const std::string& run) {
  return absl::StrCat(folder, "/", kUnfinishedPrefix, StepFolderName(step), run.empty() ? "" : "-",
                      run);
}

std::optional<int64_t> StepOf(absl::string_view name) {
  if (!absl::StartsWith(name, kStepPrefix)) return std::nullopt;
  const absl::string_view digits = name.substr(sizeof(kStepPrefix) - 1);
  int64_t step = -1;
  std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (step < 0 || StepFolderName(step) != name) return std::nullopt;
  return step;
}

absl::StatusOr<std::vector<int64_t>> ListSteps(const std::string& folder, FileSystem& files) {
  std::vector<std::string> names;
  if (const std::error_code error = files.List(folder, names)) {
    if (Absent(error)) return std::vector<int64_t>();
    return StatusOf(error, "list", folder);
  }
  std::vector<int64_t> steps;
  for (const std::string& name : names) {
    if (const std::optional<int64_t> step = StepOf(name)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

absl::Status MakeFolders(const std::string& path, FileSystem& files) {
  std::error_code error = files.MakeFolder(path);
  const size_t slash = path.find_last_not_of('/') == path.npos
                           ? path.npos
                           : path.rfind('/', path.find_last_not_of('/'));
  const std::string above = slash == path.npos ? "." : path.substr(0, slash + 1);
  if (Absent(error) && above != path && above != ".") {
    MOE_RETURN_IF_ERROR(MakeFolders(above, files));
    error = files.MakeFolder(path);
  }
  if (error.value() == EEXIST) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(StatusOf(error, "make folder", path));
  return StatusOf(files.FlushFolder(above), "flush", above);
}

absl::Status PublishStep(const std::string& unfinished, const std::string& folder, int64_t step,
                         FileSystem& files) {
  MOE_RETURN_IF_ERROR(StatusOf(files.FlushFolder(unfinished), "flush", unfinished));
  const std::string path = absl::StrCat(folder, "/", StepFolderName(step));
  MOE_RETURN_IF_ERROR(StatusOf(files.Rename(unfinished, path), "make", path));
  return StatusOf(files.FlushFolder(folder), "flush", folder);
}

std::vector<int64_t> StepsToRemove(absl::Span<const int64_t> steps, int keep, int64_t keep_every) {
  std::vector<int64_t> removed;
  const size_t kept = std::min(steps.size(), static_cast<size_t>(keep));
  for (const int64_t step : steps.first(steps.size() - kept)) {
    if (keep_every == 0 || step % keep_every != 0) removed.push_back(step);
  }
  return removed;
}

absl::Status RemoveStep(const std::string& folder, int64_t step, FileSystem& files) {
  const std::string name = StepFolderName(step);
  const std::string path = absl::StrCat(folder, "/", name);
  const std::string trash = absl::StrCat(folder, "/", kTrashPrefix, name);
  MOE_RETURN_IF_ERROR(RemoveTree(trash, files));
  MOE_RETURN_IF_ERROR(StatusOf(files.Rename(path, trash), "remove", path));
  MOE_RETURN_IF_ERROR(StatusOf(files.FlushFolder(folder), "flush", folder));
  return RemoveTree(trash, files);
}

absl::StatusOr<std::string> SetAside(const std::string& folder, int64_t step, FileSystem& files) {
  const std::string path = absl::StrCat(folder, "/", StepFolderName(step));
  const std::string aside = absl::StrCat(folder, "/", kAsidePrefix, StepFolderName(step));
  std::string free = aside;
  std::vector<std::string> names;
  for (int copy = 1; !Absent(files.List(free, names)); ++copy) {
    if (copy == kMaxAside) {
      return absl::UnavailableError(
          absl::StrCat("cannot rename '", path, "': ", free, " is there"));
    }
    free = absl::StrCat(aside, ".", copy);
  }
  MOE_RETURN_IF_ERROR(StatusOf(files.Rename(path, free), "rename", path));
  return free;
}

absl::Status RemoveLeftovers(const std::string& folder, FileSystem& files) {
  std::vector<std::string> names;
  MOE_RETURN_IF_ERROR(StatusOf(files.List(folder, names), "list", folder));
  for (const std::string& name : names) {
    // `latest` under the temporary name of WholeFile.
    const bool left = absl::StartsWith(name, absl::StrCat(kUnfinishedPrefix, kStepPrefix)) ||
                      absl::StartsWith(name, absl::StrCat(kTrashPrefix, kStepPrefix)) ||
                      absl::StartsWith(name, absl::StrCat(kLatestName, kUnfinishedPrefix)) ||
                      absl::StartsWith(name, kProbePrefix);
    if (left) MOE_RETURN_IF_ERROR(RemoveTree(absl::StrCat(folder, "/", name), files));
  }
  return absl::OkStatus();
}

absl::Status RemoveTree(const std::string& path, FileSystem& files) {
  // A folder is no file to be unlinked: EISDIR on Linux, EPERM as POSIX has it.
  const std::error_code unlinked = files.Unlink(path);
  if (!unlinked || Absent(unlinked)) return absl::OkStatus();
  if (unlinked.value() != EISDIR && unlinked.value() != EPERM) {
    return StatusOf(unlinked, "remove", path);
  }
  std::vector<std::string> names;
  MOE_RETURN_IF_ERROR(StatusOf(files.List(path, names), "remove", path));
  for (const std::string& name : names) {
    const std::string file = absl::StrCat(path, "/", name);
    const std::error_code error = files.Unlink(file);
    if (error && !Absent(error)) return StatusOf(error, "remove", file);
  }
  return StatusOf(files.RemoveFolder(path), "remove", path);
}

}  // namespace moe
