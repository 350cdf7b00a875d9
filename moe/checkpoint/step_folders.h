// The folder of a run's checkpoints: names of the step folders, and which of them stay.
#ifndef MOE_MOE_CHECKPOINT_STEP_FOLDERS_H_
#define MOE_MOE_CHECKPOINT_STEP_FOLDERS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/io/file_system.h"

namespace moe {

// A file with the name of the newest step folder: a hint for people, which no reader trusts.
inline constexpr char kLatestName[] = "latest";

// Before the name of a file by which a rank proves at the start that it can write to the folder.
inline constexpr char kProbePrefix[] = ".probe-";

std::string StepFolderName(int64_t step);  // 120 -> "step-00000120"
// Where it is written: "<folder>/.tmp-step-00000120-<run>", so that ranks of a run that was killed
// write nothing into those of the next one; without the last part where `run` is empty.
std::string UnfinishedPath(const std::string& folder, int64_t step, const std::string& run = "");
// nullopt unless `name` is what StepFolderName gives for some step.
std::optional<int64_t> StepOf(absl::string_view name);

// Ascending; empty for a folder that is not there. Errors of FileError (moe/io/file.h), kRead; of
// the functions below kWrite.
absl::StatusOr<std::vector<int64_t>> ListSteps(const std::string& folder,
                                               FileSystem& files = RealFileSystem());

// Makes a folder, and those above it that are missing, on the disk.
absl::Status MakeFolders(const std::string& path, FileSystem& files);

// kFailedPrecondition: `path` is a link, or anything but a folder. kNotFound: there is none. Errors
// of the system.
absl::Status CheckIsFolder(const std::string& path, FileSystem& files);

// kFailedPrecondition unless `path` is a folder, no link, in which there is nothing but files with
// the names that those of a checkpoint have, finished or not: it names what there is. Errors of
// CheckIsFolder.
absl::Status CheckHoldsCheckpointAlone(const std::string& path, FileSystem& files);

// Gives the folder of a step, `unfinished`, all of whose files are on the disk, its name, on the
// disk. Errors of the system, also if the name is taken; kFailedPrecondition: it is a link.
absl::Status PublishStep(const std::string& unfinished, const std::string& folder, int64_t step,
                         FileSystem& files);

// Removes a step folder that CheckHoldsCheckpointAlone takes: it first becomes
// ".trash-step-00000120", on the disk, so that a stop leaves no half of it under its name. One that
// another process removes is removed. Errors of the system, and of RemoveFolder.
absl::Status RemoveStep(const std::string& folder, int64_t step,
                        FileSystem& files = RealFileSystem());

// Frees the name of a step folder that no reader accepts: renames it to "damaged-step-00000120" or,
// if that exists, "damaged-step-00000120.1" and so on, and returns the new name. Readers and
// retention ignore such folders: people may still recover data from them.
absl::StatusOr<std::string> SetAside(const std::string& folder, int64_t step, FileSystem& files);

// Removes what stopped runs left: folders that were being written or removed. A line for each that
// stays, and why. Errors of the system if the folder cannot be listed.
absl::StatusOr<std::vector<std::string>> RemoveLeftovers(const std::string& folder,
                                                         FileSystem& files = RealFileSystem());

// Removes a folder that CheckHoldsCheckpointAlone takes, or a file or a link, which is not
// followed; nothing if it is not there. Else kFailedPrecondition, and all of it stays. Errors of
// the system.
absl::Status RemoveFolder(const std::string& path, FileSystem& files);

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_STEP_FOLDERS_H_
