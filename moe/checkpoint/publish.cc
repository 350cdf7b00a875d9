// CheckpointWriter::Publish: the one collective step, and what rank 0 does in it.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "comm/agreed_status.h"
#include "kernels/base/caught.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/manifest_format.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/retention.h"
#include "moe/checkpoint/run_lock.h"
#include "moe/checkpoint/shared_work.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/checkpoint/writer.h"
#include "moe/io/file.h"

namespace moe {
namespace {

absl::Span<uint8_t> MutableBytes(std::string& text) {
  return {reinterpret_cast<uint8_t*>(text.data()), text.size()};
}

// Texts of all ranks on rank 0, rank r's of bytes[r] bytes; nothing on other ranks.
absl::StatusOr<std::vector<std::string>> GatherTexts(std::string mine,
                                                     absl::Span<const int64_t> bytes,
                                                     const SharedWork& shared) {
  Communicator& world = shared.world;
  std::vector<int64_t> send_counts(world.size()), recv_counts(world.size());
  send_counts[0] = static_cast<int64_t>(mine.size());
  if (world.rank() == 0) recv_counts.assign(bytes.begin(), bytes.end());
  std::string all;
  for (const int64_t count : recv_counts) all.resize(all.size() + count);
  MOE_RETURN_IF_ERROR(world.AllToAllV(absl::Span<const uint8_t>(MutableBytes(mine)), send_counts,
                                      MutableBytes(all), recv_counts, shared.stream, shared.site));
  MOE_RETURN_IF_ERROR(shared.stream.Synchronize());
  std::vector<std::string> texts;
  size_t at = 0;
  for (const int64_t count : recv_counts) {
    texts.push_back(all.substr(at, count));
    at += count;
  }
  return texts;
}

// Merges the tables of all ranks into one manifest.
absl::StatusOr<CheckpointManifest> Merge(absl::Span<const std::string> tables, bool hash_states) {
  std::vector<CheckpointManifest> parts;
  ManifestTensors tensors;
  for (size_t rank = 0; rank < tables.size(); ++rank) {
    MOE_ASSIGN_OR_RETURN(CheckpointManifest part,
                         ParseManifest(absl::StrCat("the table of rank ", rank), tables[rank]));
    for (const ManifestTensor& tensor : part.tensors) {
      if (tensors.Add(tensor)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", rank, " has '", tensor.name, "' in another shape or type than ranks before"));
    }
    parts.push_back(std::move(part));
  }
  CheckpointManifest merged = {.step = parts[0].step,
                               .created = parts[0].created,
                               .sections = parts[0].sections,
                               .tensors = tensors.InOrder(),
                               .files = {},
                               .boxes = {}};
  if (hash_states) {
    StateHashes hashes;
    for (const CheckpointManifest& part : parts) {
      MOE_ASSIGN_OR_RETURN(const StateHashes mine, ParseStateHashes(part.sections.hash));
      for (const auto& [state, hash] : mine) hashes[state] += hash;
    }
    merged.sections.hash = StateHashesText(hashes);
  }
  for (CheckpointManifest& part : parts) {
    for (ManifestBox& box : part.boxes) {
      const ManifestTensor& tensor = part.tensors[box.tensor];
      box.tensor = merged.TensorIndex(tensor.name);
      box.state = merged.tensors[box.tensor].StateIndex(tensor.states[box.state]);
      box.file += static_cast<int32_t>(merged.files.size());
      merged.boxes.push_back(box);
    }
    merged.files.insert(merged.files.end(), part.files.begin(), part.files.end());
  }
  SortManifest(merged);
  return merged;
}

// Nothing is published where ranks do not share one folder or a mount was lost: rank 0 reads what
// the others have written as a resuming run will.
absl::Status CheckReadable(const std::string& unfinished) {
  const absl::Status opened = CheckpointReader::Open(unfinished).status();
  if (opened.ok()) return opened;
  return absl::Status(opened.code(),
                      absl::StrCat("rank 0 cannot open what the ranks have written, expected one "
                                   "folder that all of them see: ",
                                   opened.message()));
}

// Warns that `lines` are `what`, without those already in `warned`.
void WarnOnce(absl::string_view what, const std::vector<std::string>& lines,
              std::set<std::string>& warned) {
  std::vector<std::string> told;
  for (const std::string& line : lines) {
    if (warned.insert(line).second) told.push_back(line);
  }
  if (told.empty()) return;
  Log(LogLevel::kWarning,
      absl::StrCat("CheckpointWriter: ", what, ": ", absl::StrJoin(told, "; ")));
}

}  // namespace

absl::Status CheckpointWriter::FreeName(const CheckpointOptions& options, int64_t step) {
  const std::string& folder = options.folder;
  MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, ListSteps(folder, *options.files));
  for (auto at = std::lower_bound(steps.begin(), steps.end(), step); at != steps.end(); ++at) {
    MOE_ASSIGN_OR_RETURN(const bool taken, IsTaken(options, *at));
    if (!taken) continue;
    return absl::AlreadyExistsError(absl::StrCat("CheckpointWriter: ", folder, "/",
                                                 StepFolderName(*at),
                                                 " is there already: another run writes here"));
  }
  if (!std::binary_search(steps.begin(), steps.end(), step)) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(CheckIsNotForeign(options, step));
  MOE_ASSIGN_OR_RETURN(const std::string aside, SetAside(folder, step, *options.files));
  Log(LogLevel::kWarning,
      absl::StrCat(folder, "/", StepFolderName(step), " cannot be read and is now ", aside));
  return absl::OkStatus();
}

absl::Status CheckpointWriter::PublishTables(Publication& publication,
                                             absl::Span<const std::string> tables) {
  CheckpointOptions& options = publication.options;
  FileSystem& files = *options.files;
  MOE_ASSIGN_OR_RETURN(const CheckpointManifest manifest, Merge(tables, options.hash_states));
  const absl::Status tiled = CheckTiling("CheckpointWriter", manifest);
  if (!tiled.ok()) return absl::InvalidArgumentError(tiled.message());
  MOE_ASSIGN_OR_RETURN(const std::string text, SerializeManifest(manifest));
  const std::string unfinished = UnfinishedPath(options.folder, manifest.step, options.run);
  MOE_RETURN_IF_ERROR(CheckIsFolder(unfinished, files));
  MOE_RETURN_IF_ERROR(WriteText(absl::StrCat(unfinished, "/", kManifestName), text, files));
  MOE_RETURN_IF_ERROR(CheckReadable(unfinished));
  if (options.lock != nullptr) MOE_RETURN_IF_ERROR(options.lock->CheckHeld(files));
  MOE_RETURN_IF_ERROR(FreeName(options, manifest.step));
  MOE_RETURN_IF_ERROR(PublishStep(unfinished, options.folder, manifest.step, files));
  std::erase(options.damaged_steps, manifest.step);  // its checkpoint is whole now
  const absl::Status rest = WriteLatestAndRetain(publication, manifest);
  if (!rest.ok()) {
    Log(LogLevel::kWarning, absl::StrCat("CheckpointWriter: ", StepFolderName(manifest.step),
                                         " is written, but what follows failed: ", rest.message()));
  }
  return absl::OkStatus();
}

// Steps after publication whose failure leaves the checkpoint valid.
absl::Status CheckpointWriter::WriteLatestAndRetain(Publication& publication,
                                                    const CheckpointManifest& manifest) {
  const CheckpointOptions& options = publication.options;
  FileSystem& files = *options.files;
  const std::string& folder = options.folder;
  MOE_RETURN_IF_ERROR(WriteText(absl::StrCat(folder, "/", kLatestName),
                                absl::StrCat(StepFolderName(manifest.step), "\n"), files));
  MOE_ASSIGN_OR_RETURN(std::vector<int64_t> steps, ListSteps(folder, files));
  // Newer checkpoints are damaged, or Create would have refused them: they neither count nor are
  // removed.
  steps.erase(std::upper_bound(steps.begin(), steps.end(), manifest.step), steps.end());
  const RetentionPlan plan = PlanRetention(folder, steps,
                                           {.keep = options.keep,
                                            .keep_every = options.keep_every,
                                            .run = RunOf(manifest.sections),
                                            .damaged_steps = options.damaged_steps},
                                           files);
  WarnOnce("not counted among the checkpoints that stay", plan.not_counted, publication.warned);
  WarnOnce("not removed, since not of this run", plan.left_alone, publication.warned);
  absl::Status first;  // a checkpoint that cannot be removed does not keep others
  for (const int64_t old : plan.removed) first.Update(RemoveStep(folder, old, files));
  return first;
}

absl::Status CheckpointWriter::Publish(Communicator& world, Stream& stream) {
  if (world.rank() != rank_ || world.size() != ranks_) {
    return absl::InvalidArgumentError("CheckpointWriter: another communicator than at Create");
  }
  const SharedWork shared = SharedOver(world, stream);
  MOE_RETURN_IF_ERROR(AwaitAllRanks(work_.get(), shared));
  absl::Status mine =
      started_ ? status() : absl::FailedPreconditionError("CheckpointWriter: nothing was started");
  started_ = false;
  std::string table = TakeTable();

  constexpr int kCode = 0, kBytes = 1, kStep = 2, kHead = 3;
  const int64_t head[kHead] = {static_cast<int64_t>(mine.code()),
                               static_cast<int64_t>(table.size()), step_};
  std::vector<int64_t> heads(static_cast<size_t>(kHead) * ranks_);
  MOE_RETURN_IF_ERROR(
      world.AllGather(absl::MakeConstSpan(head), absl::MakeSpan(heads), stream, shared.site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<int64_t> bytes;
  // Rank whose status is broadcast: the first that failed, else rank 0, which publishes.
  int speaker = 0;
  for (int rank = ranks_ - 1; rank >= 0; --rank) {
    const int64_t* const of_rank = &heads[static_cast<size_t>(kHead) * rank];
    if (of_rank[kCode] != 0 || of_rank[kStep] != heads[kStep]) speaker = rank;
    bytes.insert(bytes.begin(), of_rank[kBytes]);
  }
  const int64_t* const said = &heads[static_cast<size_t>(kHead) * speaker];
  if (mine.ok() && step_ != heads[kStep]) {
    mine =
        absl::InvalidArgumentError(absl::StrCat("step ", step_, ", rank 0 is at ", heads[kStep]));
  }
  if (said[kCode] == 0 && said[kStep] == heads[kStep]) {
    MOE_ASSIGN_OR_RETURN(auto tables, GatherTexts(std::move(table), bytes, shared));
    FileWork::Work publish;  // empty on ranks that only wait for rank 0
    if (rank_ == 0) {
      publish = [publication = publication_, tables = std::move(tables)](FileSystem& files) {
        publication->options.files = &files;
        return PublishTables(*publication, tables);
      };
    }
    MOE_RETURN_IF_ERROR(RunOnRanks(WorkOptions(), std::move(publish), shared, mine));
  } else if (!mine.ok() && ranks_ > 1) {
    mine = absl::Status(mine.code(), absl::StrCat("rank ", rank_, ": ", mine.message()));
  }
  MOE_RETURN_IF_ERROR(BroadcastStatus(mine, speaker, world, stream, shared.site));
  if (mine.ok()) return mine;
  // Every rank removes the folder, since ranks may see folders of their own. None may start the
  // next checkpoint in a folder that is being removed.
  const auto remove =
      [path = UnfinishedPath(options_.folder, step_, options_.run)](FileSystem& files) {
        return RemoveFolder(path, files);
      };
  absl::Status removed;  // remains are removed at the next start
  MOE_RETURN_IF_ERROR(RunOnRanks(WorkOptions(), remove, shared, removed));
  // Values that are not finite are no fault of files.
  if (absl::IsOutOfRange(mine)) return absl::DataLossError(mine.message());
  return WithFileFault(std::move(mine), FileFault::kWrite);
}

}  // namespace moe
