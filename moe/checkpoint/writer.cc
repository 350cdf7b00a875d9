#include "moe/checkpoint/writer.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <absl/time/time.h>

#include "comm/wait_report.h"
#include "kernels/base/buffer.h"
#include "kernels/base/caught.h"
#include "kernels/base/finite.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/manifest_format.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/shared_work.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/io/safetensors_stream.h"
#include "moe/state/unit_grid.h"

namespace moe {
namespace {

// Boxes of one shard: fewer than a safetensors file may hold, so that its table stays small.
constexpr int64_t kMaxShardBoxes = kMaxSafetensorsTensors / 2;

int64_t ElementBytes(const StatePart& part) {
  return std::holds_alternative<MatrixView<const float>>(part.data) ? sizeof(float)
                                                                    : sizeof(double);
}

absl::Status CheckPart(const StatePart& part) {
  if (part.tensor == nullptr) return absl::InvalidArgumentError("a part of no tensor");
  const auto [row_begin, row_end, col_begin, col_end] = part.box;
  const CanonicalTensor& tensor = *part.tensor;
  const auto [rows, cols] =
      std::visit([](const auto& data) { return std::pair(data.rows(), data.cols()); }, part.data);
  if (row_begin < 0 || row_begin >= row_end || row_end > tensor.rows || col_begin < 0 ||
      col_begin >= col_end || col_end > tensor.cols || rows != row_end - row_begin ||
      cols != col_end - col_begin) {
    return absl::InvalidArgumentError(
        absl::StrCat("part '", tensor.name, "' ", part.state, " ", BoxText(part.box), " of [", rows,
                     ", ", cols, "], expected a part of [", tensor.rows, ", ", tensor.cols, "]"));
  }
  return absl::OkStatus();
}

absl::Status CheckRowGroups(const StatePart& part) {
  if (UnitGrid(*part.tensor).HasWholeUnits(part.box)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("part '", part.tensor->name, "' ", part.state, " ",
                                                 BoxText(part.box), ", expected whole row groups"));
}

// The tensors of the parts and their states, in the manifest's order.
absl::StatusOr<std::vector<ManifestTensor>> TensorsOf(absl::Span<const StatePart> parts) {
  ManifestTensors tensors;
  for (const StatePart& part : parts) {
    MOE_RETURN_IF_ERROR(CheckPart(part));
    const bool added =
        tensors.Add({.name = part.tensor->name,
                     .type = ElementBytes(part) == sizeof(float) ? SafetensorsType::kF32
                                                                 : SafetensorsType::kF64,
                     .rows = part.tensor->rows,
                     .cols = part.tensor->cols,
                     .states = {part.state}});
    if (added) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parts of '", part.tensor->name, "' have two shapes or types"));
  }
  return tensors.InOrder();
}

// "shard-00003-of-00008.safetensors", the first file of rank 3 of 8; then
// "shard-00003-of-00008.1.safetensors" and so on. Names do not depend on the number of files of
// other ranks.
std::string ShardName(int rank, int ranks, int64_t number) {
  return absl::StrCat("shard-", absl::Dec(rank, absl::kZeroPad5), "-of-",
                      absl::Dec(ranks, absl::kZeroPad5),
                      number == 0 ? "" : absl::StrCat(".", number), ".safetensors");
}

// The boxes that a part is written in.
std::vector<TensorBox> BoxesOfPart(const StatePart& part, int64_t max_box_bytes) {
  std::vector<TensorBox> boxes;
  const auto [row_begin, row_end, col_begin, col_end] = part.box;
  const int64_t max_elements = max_box_bytes / ElementBytes(part);
  const int64_t cols = std::min(col_end - col_begin, max_elements);
  const int64_t rows = max_elements / cols;
  for (int64_t row = row_begin; row < row_end; row += rows) {
    for (int64_t col = col_begin; col < col_end; col += cols) {
      boxes.push_back({.row_begin = row,
                       .row_end = std::min(row + rows, row_end),
                       .col_begin = col,
                       .col_end = std::min(col + cols, col_end)});
    }
  }
  return boxes;
}

// Copies the rows of the box from rows of the part, packed.
template <typename T>
void CopyBox(MatrixView<const T> part, const TensorBox& of_part, const TensorBox& box,
             std::byte* out) {
  const T* const from =
      part.row(box.row_begin - of_part.row_begin) + (box.col_begin - of_part.col_begin);
  const size_t row_bytes = static_cast<size_t>(box.cols()) * sizeof(T);
  if (box.cols() == part.stride()) {
    std::memcpy(out, from, static_cast<size_t>(box.rows()) * row_bytes);
    return;
  }
  for (int64_t row = 0; row < box.rows(); ++row, out += row_bytes) {
    std::memcpy(out, from + row * part.stride(), row_bytes);
  }
}

// Opening a pipe for writing would block, and anything but a file is not ours to replace.
absl::Status CheckLatest(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kLatestName);
  std::error_code ignored;
  const auto there = std::filesystem::status(path, ignored);
  if (!std::filesystem::exists(there) || std::filesystem::is_regular_file(there)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("CheckpointWriter: '", path,
                   "' is a folder, device or pipe, expected a file, or nothing there"));
}

}  // namespace

struct CheckpointWriter::Job {
  // Rows of a part in the copy, which are hashed.
  struct Rows {
    CanonicalTensor tensor;
    std::string state;
    TensorBox box;
    int64_t offset = 0;  // bytes
  };

  // Lays out the boxes of the parts, and makes room for the copy.
  absl::Status LayOut(absl::Span<const StatePart> parts);
  // Copies the boxes from `box` on that are of `parts`.
  void CopyParts(absl::Span<const StatePart> parts, size_t& box);
  absl::Status WriteShards(FileSystem& files);
  absl::Status WriteShard(int32_t number, FileSystem& files);
  std::string Unfinished() const { return UnfinishedPath(options.folder, table.step, options.run); }

  const CheckpointOptions options;
  const int rank, ranks;
  CheckpointManifest table = {};      // boxes in the order of the copy, file by file
  std::vector<int64_t> offsets = {};  // [boxes + 1] of their bytes in the copy
  std::vector<Rows> hashed = {};      // rows of float32 parts, if states are hashed
  Buffer copy = {};                   // copy of the parts, box by box
  std::string text = {};  // table of what was written: a manifest of this rank's boxes alone
};

CheckpointWriter::CheckpointWriter(const CheckpointOptions& options, int rank, int ranks)
    : options_(options),
      rank_(rank),
      ranks_(ranks),
      job_(new Job{.options = options, .rank = rank, .ranks = ranks}),
      publication_(new Publication{.options = options}) {}

absl::StatusOr<bool> CheckpointWriter::IsTaken(const CheckpointOptions& options, int64_t step) {
  const std::vector<int64_t>& damaged = options.damaged_steps;
  if (std::find(damaged.begin(), damaged.end(), step) != damaged.end()) return false;
  const absl::Status opened =
      CheckpointReader::Open(absl::StrCat(options.folder, "/", StepFolderName(step))).status();
  if (absl::IsDataLoss(opened) || absl::IsNotFound(opened)) return false;
  MOE_RETURN_IF_ERROR(opened);
  return true;
}

absl::Status CheckpointWriter::CheckIsNotForeign(const CheckpointOptions& options, int64_t step) {
  absl::Status alone = CheckHoldsCheckpointAlone(
      absl::StrCat(options.folder, "/", StepFolderName(step)), *options.files);
  if (absl::IsNotFound(alone)) return absl::OkStatus();
  if (!absl::IsFailedPrecondition(alone)) return alone;
  return absl::FailedPreconditionError(
      absl::StrCat("CheckpointWriter: ", alone.message(),
                   ", and no run writes that: expected another folder, or this one moved away"));
}

absl::StatusOr<std::unique_ptr<CheckpointWriter>> CheckpointWriter::Create(
    const CheckpointOptions& options, int rank, int ranks) {
  const auto require = [](bool holds, const char* what) {
    return holds ? absl::OkStatus()
                 : absl::InvalidArgumentError(absl::StrCat("CheckpointWriter: expected ", what));
  };
  MOE_RETURN_IF_ERROR(require(!options.folder.empty(), "a folder"));
  MOE_RETURN_IF_ERROR(require(options.keep >= 1, "keep >= 1"));
  MOE_RETURN_IF_ERROR(require(options.keep_every >= 0, "keep_every >= 0"));
  MOE_RETURN_IF_ERROR(require(0 <= rank && rank < ranks, "rank in [0, ranks)"));
  MOE_RETURN_IF_ERROR(require(options.max_box_bytes >= 8, "boxes of at least 8 bytes"));
  MOE_RETURN_IF_ERROR(
      require(options.max_shard_bytes >= options.max_box_bytes, "shards not smaller than boxes"));

  auto writer = std::unique_ptr<CheckpointWriter>(new CheckpointWriter(options, rank, ranks));
  writer->step_ = options.first_step;
  MOE_RETURN_IF_ERROR(FileWork::Run(writer->WorkOptions(), [options, rank](FileSystem& files) {
    CheckpointOptions noted = options;
    noted.files = &files;
    return Prepare(noted, rank);
  }));
  return writer;
}

absl::Status CheckpointWriter::Prepare(const CheckpointOptions& options, int rank) {
  MOE_RETURN_IF_ERROR(MakeFolders(options.folder, *options.files));
  MOE_RETURN_IF_ERROR(CheckLatest(options.folder));
  MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, ListSteps(options.folder, *options.files));
  for (const int64_t step : steps) {
    const std::string path = absl::StrCat(options.folder, "/", StepFolderName(step));
    if (step <= options.first_step) continue;
    MOE_ASSIGN_OR_RETURN(const bool taken, IsTaken(options, step));
    if (!taken) MOE_RETURN_IF_ERROR(CheckIsNotForeign(options, step));
    if (!taken) continue;
    return absl::AlreadyExistsError(
        absl::StrCat("CheckpointWriter: ", path, " is newer than step ", options.first_step,
                     ", where this run begins: expected another folder, or this one moved away"));
  }
  if (rank == 0) {
    MOE_ASSIGN_OR_RETURN(const auto left, RemoveLeftovers(options.folder, *options.files));
    for (const std::string& line : left) {
      Log(LogLevel::kWarning, absl::StrCat("CheckpointWriter: ", line));
    }
  }
  return absl::OkStatus();
}

CheckpointWriter::~CheckpointWriter() = default;

WriterPhase CheckpointWriter::phase() const {
  if (!started_) return WriterPhase::kIdle;
  if (work_ != nullptr && !work_->ended()) return WriterPhase::kWriting;
  return status().ok() ? WriterPhase::kWritten : WriterPhase::kFailed;
}

absl::Status CheckpointWriter::status() const {
  return work_ == nullptr ? begun_ : work_->status();
}

absl::Status CheckpointWriter::CheckProgress() {
  return work_ == nullptr ? absl::OkStatus() : work_->Check();
}

std::string CheckpointWriter::TakeTable() {
  return std::exchange(job_->text, {});
}

FileWork::Options CheckpointWriter::WorkOptions() const {
  return {.who = DescribePlace(rank_, "Save", SiteOfSave()),
          .deadline = options_.timeout,
          .files = options_.files};
}

SharedWork CheckpointWriter::SharedOver(Communicator& world, Stream& stream) const {
  return {absl::StrCat("the checkpoint of step ", step_), world, stream, SiteOfSave()};
}

absl::Status CheckpointWriter::Start(const CheckpointState& state,
                                     absl::Span<const StatePart> shapes, ReadParts read) {
  if (phase() != WriterPhase::kIdle) {
    return absl::FailedPreconditionError(
        "CheckpointWriter: the checkpoint before this one is not published yet");
  }
  started_ = true;
  step_ = state.step;
  work_.reset();
  begun_ = Caught([&] {
    job_->table = {
        .step = state.step,
        .created = absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone()),
        .sections = state.sections,
        .tensors = {},
        .files = {},
        .boxes = {}};
    MOE_RETURN_IF_ERROR(job_->LayOut(shapes));
    size_t box = 0;  // the first that is not copied
    MOE_RETURN_IF_ERROR(read([&](absl::Span<const StatePart> parts) {
      job_->CopyParts(parts, box);
      return absl::OkStatus();
    }));
    MOE_CHECK(box == job_->table.boxes.size());
    MOE_ASSIGN_OR_RETURN(work_, FileWork::Start(WorkOptions(), [job = job_](FileSystem& files) {
                           return job->WriteShards(files);
                         }));
    return absl::OkStatus();
  });
  return begun_;
}

absl::Status CheckpointWriter::Job::LayOut(absl::Span<const StatePart> parts) {
  offsets.clear();
  hashed.clear();
  text.clear();
  MOE_ASSIGN_OR_RETURN(table.tensors, TensorsOf(parts));
  int64_t offset = 0, shard_begin = 0, shard_boxes = 0;
  const auto add = [&](int32_t tensor, int32_t state, const TensorBox& box, int64_t bytes) {
    if (table.files.empty() || offset + bytes - shard_begin > options.max_shard_bytes ||
        shard_boxes == kMaxShardBoxes) {
      table.files.push_back(
          {.name = ShardName(rank, ranks, static_cast<int64_t>(table.files.size()))});
      shard_begin = offset;
      shard_boxes = 0;
    }
    table.boxes.push_back({.tensor = tensor,
                           .state = state,
                           .file = static_cast<int32_t>(table.files.size()) - 1,
                           .box = box});
    offsets.push_back(offset);
    offset += bytes;
    ++shard_boxes;
  };
  for (const StatePart& part : parts) {
    if (options.hash_states && std::holds_alternative<MatrixView<const float>>(part.data)) {
      MOE_RETURN_IF_ERROR(CheckRowGroups(part));
      hashed.push_back({*part.tensor, part.state, part.box, offset});
    }
    const int32_t tensor = table.TensorIndex(part.tensor->name);
    const int32_t state = table.tensors[tensor].StateIndex(part.state);
    for (const TensorBox& box : BoxesOfPart(part, options.max_box_bytes)) {
      add(tensor, state, box, box.size() * ElementBytes(part));
    }
  }
  offsets.push_back(offset);
  if (offset <= copy.bytes()) return absl::OkStatus();
  copy = Buffer();  // freed before the larger one is allocated
  MOE_ASSIGN_OR_RETURN(
      copy, Buffer::Allocate(offset, options.copy_memory ? *options.copy_memory : CpuMemory(),
                             "the copy of a checkpoint"));
  return absl::OkStatus();
}

void CheckpointWriter::Job::CopyParts(absl::Span<const StatePart> parts, size_t& box) {
  std::vector<const StatePart*> part_of;  // part of each box from `box` on
  for (const StatePart& part : parts) {
    part_of.resize(part_of.size() + BoxesOfPart(part, options.max_box_bytes).size(), &part);
  }
  MOE_CHECK(box + part_of.size() <= table.boxes.size());
  options.threads->For(std::ssize(part_of), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const StatePart& part = *part_of[i];
      std::visit(
          [&](const auto& data) {
            CopyBox(data, part.box, table.boxes[box + i].box, copy.data() + offsets[box + i]);
          },
          part.data);
    }
  });
  box += part_of.size();
}

// Runs in the background, as does WriteShard.
absl::Status CheckpointWriter::Job::WriteShards(FileSystem& files) {
  MOE_RETURN_IF_ERROR(MakeFolders(Unfinished(), files));
  MOE_RETURN_IF_ERROR(CheckIsFolder(Unfinished(), files));
  for (size_t file = 0; file < table.files.size(); ++file) {
    MOE_RETURN_IF_ERROR(WriteShard(static_cast<int32_t>(file), files));
  }
  if (options.hash_states) {
    StateHashes hashes;
    for (const Job::Rows& rows : hashed) {
      const auto* const data = reinterpret_cast<const float*>(copy.data() + rows.offset);
      if (const int64_t bad = CountNonFinite(data, rows.box.rows() * rows.box.cols()); bad > 0) {
        return absl::OutOfRangeError(absl::StrCat("CheckpointWriter: '", rows.tensor.name, "' ",
                                                  rows.state, " has ", bad,
                                                  " values that are not finite, expected none"));
      }
      hashes[rows.state] +=
          HashUnits(rows.tensor, rows.box, {data, rows.box.rows(), rows.box.cols()});
    }
    table.sections.hash = StateHashesText(hashes);
  }
  SortManifest(table);
  MOE_ASSIGN_OR_RETURN(text, SerializeManifest(table));
  return absl::OkStatus();
}

absl::Status CheckpointWriter::Job::WriteShard(int32_t number, FileSystem& files) {
  const auto [first, last] =
      std::equal_range(table.boxes.begin(), table.boxes.end(), ManifestBox{.file = number},
                       [](const ManifestBox& a, const ManifestBox& b) { return a.file < b.file; });
  std::vector<SafetensorsEntry> entries;
  for (auto box = first; box != last; ++box) {
    const ManifestTensor& tensor = table.tensors[box->tensor];
    const int64_t rows = box->box.rows();
    const int64_t cols = box->box.cols();
    entries.push_back({.name = BoxName(tensor.name, tensor.states[box->state], box->box),
                       .type = tensor.type,
                       .shape = {rows, cols},
                       .size_bytes = rows * cols * BitsOf(tensor.type) / 8});
  }
  ManifestFile& file = table.files[number];
  const std::string path = absl::StrCat(Unfinished(), "/", file.name);
  MOE_ASSIGN_OR_RETURN(SafetensorsStream stream,
                       SafetensorsStream::Create(path, entries, {}, files));
  file.header_xxh3 = CheckpointHash(
      {reinterpret_cast<const uint8_t*>(stream.header().data()), stream.header().size()});
  file.bytes = static_cast<int64_t>(stream.header().size());
  for (auto box = first; box != last; ++box) {
    const size_t i = box - table.boxes.begin();
    const auto bytes = absl::MakeConstSpan(copy.span<const uint8_t>())
                           .subspan(offsets[i], offsets[i + 1] - offsets[i]);
    box->xxh3 = CheckpointHash(bytes);
    MOE_RETURN_IF_ERROR(stream.Append(bytes));
    file.bytes += static_cast<int64_t>(bytes.size());
  }
  return stream.Commit(PageCache::kDrop);
}

}  // namespace moe
