#include "moe/checkpoint/step_folders.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <system_error>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "kernels/base/status_macros.h"
#include "moe/checkpoint/manifest.h"
#include "moe/io/file.h"

namespace moe {
namespace {

constexpr char kStepPrefix[] = "step-";
// Prefixes of a step folder that is being written, and of one that is being removed.
constexpr char kUnfinishedPrefix[] = ".tmp-";
constexpr char kTrashPrefix[] = ".trash-";
constexpr char kUnfinishedSuffix[] = ".tmp-";  // after a file's name; followed by process and count
// Prefix of a step folder that no reader accepted, and the most of them to be kept for one step.
constexpr char kAsidePrefix[] = "damaged-";
constexpr int kMaxAside = 100;

bool Absent(std::error_code error) {
  return error.value() == ENOENT;
}

absl::Status Gone(const std::string& path) {
  return absl::NotFoundError(absl::StrCat("'", path, "' is not there"));
}

absl::Status Foreign(const std::string& path, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat("'", path, "' ", what));
}

const char* NameOf(FileKind kind) {
  constexpr const char* kNames[] = {"a file", "a folder", "a link", "a device or pipe"};
  return kNames[static_cast<int>(kind)];
}

bool ConsumeDigits(absl::string_view& text) {
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  text.remove_prefix(digits);
  return digits > 0;
}

// Whether `name` is "manifest.json" or a shard, also under the temporary name of WholeFile.
bool IsCheckpointFile(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, kManifestName)) {
    if (!absl::ConsumePrefix(&name, "shard-") || !ConsumeDigits(name) ||
        !absl::ConsumePrefix(&name, "-of-") || !ConsumeDigits(name)) {
      return false;
    }
    if (!absl::StartsWith(name, ".safetensors") &&
        (!absl::ConsumePrefix(&name, ".") || !ConsumeDigits(name))) {
      return false;
    }
    if (!absl::ConsumePrefix(&name, ".safetensors")) return false;
  }
  if (!absl::ConsumePrefix(&name, kUnfinishedSuffix)) return name.empty();
  return ConsumeDigits(name) && absl::ConsumePrefix(&name, "-") && ConsumeDigits(name) &&
         name.empty();
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
    return FileError("list", folder, error.value(), FileFault::kRead);
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

absl::Status CheckIsFolder(const std::string& path, FileSystem& files) {
  FileKind kind{};
  const std::error_code error = files.Look(path, kind);
  if (Absent(error)) return Gone(path);
  MOE_RETURN_IF_ERROR(StatusOf(error, "look at", path));
  if (kind == FileKind::kFolder) return absl::OkStatus();
  return Foreign(path, absl::StrCat("is ", NameOf(kind), ", expected a folder"));
}

absl::Status CheckHoldsCheckpointAlone(const std::string& path, FileSystem& files) {
  MOE_RETURN_IF_ERROR(CheckIsFolder(path, files));
  std::vector<std::string> names;
  if (const std::error_code error = files.List(path, names)) {
    return Absent(error) ? Gone(path) : StatusOf(error, "list", path);
  }
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    if (!IsCheckpointFile(name)) return Foreign(path, absl::StrCat("holds '", name, "'"));
    const std::string file = absl::StrCat(path, "/", name);
    FileKind kind{};
    const std::error_code error = files.Look(file, kind);
    if (error && !Absent(error)) return StatusOf(error, "look at", file);
    if (!error && kind != FileKind::kFile) {
      return Foreign(path, absl::StrCat("holds ", NameOf(kind), ", '", name, "'"));
    }
  }
  return absl::OkStatus();
}

absl::Status PublishStep(const std::string& unfinished, const std::string& folder, int64_t step,
                         FileSystem& files) {
  MOE_RETURN_IF_ERROR(CheckIsFolder(unfinished, files));
  MOE_RETURN_IF_ERROR(StatusOf(files.FlushFolder(unfinished), "flush", unfinished));
  const std::string path = absl::StrCat(folder, "/", StepFolderName(step));
  MOE_RETURN_IF_ERROR(StatusOf(files.Rename(unfinished, path), "make", path));
  return StatusOf(files.FlushFolder(folder), "flush", folder);
}

absl::Status RemoveStep(const std::string& folder, int64_t step, FileSystem& files) {
  const std::string name = StepFolderName(step);
  const std::string path = absl::StrCat(folder, "/", name);
  const std::string trash = absl::StrCat(folder, "/", kTrashPrefix, name);
  MOE_RETURN_IF_ERROR(RemoveFolder(trash, files));
  const absl::Status whole = CheckHoldsCheckpointAlone(path, files);
  if (absl::IsNotFound(whole)) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(whole);
  const std::error_code renamed = files.Rename(path, trash);
  if (Absent(renamed)) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(StatusOf(renamed, "remove", path));
  MOE_RETURN_IF_ERROR(StatusOf(files.FlushFolder(folder), "flush", folder));
  return RemoveFolder(trash, files);
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

absl::StatusOr<std::vector<std::string>> RemoveLeftovers(const std::string& folder,
                                                         FileSystem& files) {
  std::vector<std::string> names, left;
  MOE_RETURN_IF_ERROR(StatusOf(files.List(folder, names), "list", folder));
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    // `latest` may be there under the temporary name of WholeFile.
    const bool leftover = absl::StartsWith(name, absl::StrCat(kUnfinishedPrefix, kStepPrefix)) ||
                          absl::StartsWith(name, absl::StrCat(kTrashPrefix, kStepPrefix)) ||
                          absl::StartsWith(name, absl::StrCat(kLatestName, kUnfinishedSuffix)) ||
                          absl::StartsWith(name, kProbePrefix);
    if (!leftover) continue;
    const std::string path = absl::StrCat(folder, "/", name);
    const absl::Status removed = RemoveFolder(path, files);
    if (removed.ok()) continue;
    left.push_back(
        absl::StrCat("left behind by a run that stopped, and not removed: ", removed.message()));
  }
  return left;
}

absl::Status RemoveFolder(const std::string& path, FileSystem& files) {
  FileKind kind{};
  std::error_code error = files.Look(path, kind);
  if (!error && (kind == FileKind::kFile || kind == FileKind::kLink)) error = files.Unlink(path);
  if (Absent(error)) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(StatusOf(error, "remove", path));
  if (kind == FileKind::kFile || kind == FileKind::kLink) return absl::OkStatus();
  const absl::Status whole = CheckHoldsCheckpointAlone(path, files);
  if (absl::IsNotFound(whole)) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(whole);
  std::vector<std::string> names;
  error = files.List(path, names);
  if (Absent(error)) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(StatusOf(error, "remove", path));
  for (const std::string& name : names) {
    if (!IsCheckpointFile(name)) continue;  // a foreign file appeared meanwhile: the folder stays
    const std::string file = absl::StrCat(path, "/", name);
    error = files.Unlink(file);
    if (error && !Absent(error)) return StatusOf(error, "remove", file);
  }
  error = files.RemoveFolder(path);
  return Absent(error) ? absl::OkStatus() : StatusOf(error, "remove", path);
}

}  // namespace moe
