#include "moe/checkpoint/reader.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/caught.h"
#include "kernels/base/finite.h"
#include "kernels/base/parallel.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/state/unit_grid.h"

namespace moe {
namespace {

absl::Status Damaged(const std::string& path, absl::string_view reason) {
  return absl::DataLossError(absl::StrCat("CheckpointReader: ", path, ": ", reason));
}

std::string ManifestPath(const std::string& path) {
  return absl::StrCat(path, "/", kManifestName);
}

std::string SaidBy(const std::string& path) {
  return absl::StrCat("CheckpointReader: ", ManifestPath(path));
}

// Checks a shard's length and the hash of its header, including the 8 bytes before it, against the
// manifest.
absl::Status CheckShard(const std::string& path, const ManifestFile& file,
                        absl::Span<const uint8_t> bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  if (size != file.bytes) {
    return Damaged(path,
                   absl::StrCat(file.name, ": ", size, " bytes, the manifest says ", file.bytes));
  }
  uint64_t header_bytes = 0;  // length of the JSON
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > static_cast<uint64_t>(size) - sizeof(header_bytes)) {
    return Damaged(
        path, absl::StrCat(file.name, ": header of ", header_bytes, " bytes, the file has ", size));
  }
  const uint64_t hash = CheckpointHash(bytes.first(sizeof(header_bytes) + header_bytes));
  if (hash == file.header_xxh3) return absl::OkStatus();
  return Damaged(
      path, absl::StrCat(file.name, ": header has hash ", HashHex(hash), ", the manifest says ",
                         HashHex(file.header_xxh3), ": damaged, or of another checkpoint"));
}

template <typename T>
void CopyPart(const uint8_t* stored, const TensorBox& from, const TensorBox& to,
              MatrixView<T> out) {
  const int64_t col_begin = std::max(from.col_begin, to.col_begin);
  const int64_t col_end = std::min(from.col_end, to.col_end);
  const int64_t row_end = std::min(from.row_end, to.row_end);
  const int64_t stride = from.col_end - from.col_begin;
  for (int64_t row = std::max(from.row_begin, to.row_begin); row < row_end; ++row) {
    const int64_t at = (row - from.row_begin) * stride + col_begin - from.col_begin;
    // Data in the file are not aligned.
    std::memcpy(out.row(row - to.row_begin) + (col_begin - to.col_begin),
                stored + at * static_cast<int64_t>(sizeof(T)),
                static_cast<size_t>(col_end - col_begin) * sizeof(T));
  }
}

}  // namespace

absl::StatusOr<absl::Span<const uint8_t>> CheckpointReader::BoxBytes(const ManifestBox& box) {
  const ManifestFile& file = manifest_.files[box.file];
  Shard& shard = shards_[box.file];
  // No exception may leave std::call_once: it would unwind through the C library.
  std::call_once(shard.parse, [&] {
    shard.tensors = Caught([&] {
      return SafetensorsFile::Parse(absl::StrCat(path_, "/", file.name), shard.file.bytes());
    });
  });
  MOE_RETURN_IF_ERROR(shard.tensors.status());
  const ManifestTensor& tensor = manifest_.tensors[box.tensor];
  const std::string name = BoxName(tensor.name, tensor.states[box.state], box.box);
  const SafetensorsTensor* const stored = shard.tensors->Find(name);
  const std::vector<int64_t> shape = {box.box.rows(), box.box.cols()};
  if (stored == nullptr || stored->type != tensor.type || stored->shape != shape) {
    return Damaged(path_,
                   absl::StrCat(file.name, ": no tensor '", name, "' of type ", NameOf(tensor.type),
                                " and shape [", shape[0], ", ", shape[1], "]"));
  }
  return shard.tensors->Data(*stored);
}

absl::StatusOr<absl::Span<const uint8_t>> CheckpointReader::CheckedBox(size_t index) {
  const ManifestBox& box = manifest_.boxes[index];
  MOE_ASSIGN_OR_RETURN(const absl::Span<const uint8_t> bytes, BoxBytes(box));
  if (verified_[index]) return bytes;
  const uint64_t hash = CheckpointHash(bytes);
  if (hash == box.xxh3) return bytes;
  const ManifestTensor& tensor = manifest_.tensors[box.tensor];
  return Damaged(path_, absl::StrCat(manifest_.files[box.file].name, ": box '", tensor.name, "' ",
                                     tensor.states[box.state], " ", BoxText(box.box), " has hash ",
                                     HashHex(hash), ", the manifest says ", HashHex(box.xxh3)));
}

template <typename T>
absl::Status CheckpointReader::Read(absl::string_view tensor_name, absl::string_view state_name,
                                    const TensorBox& box, MatrixView<T> out, bool check) {
  const std::string what =
      absl::StrCat("CheckpointReader: ", path_, ": '", tensor_name, "' ", state_name);
  const ManifestTensor* const tensor = Find(tensor_name);
  if (tensor == nullptr) {
    return absl::NotFoundError(absl::StrCat(what, ": there is no such tensor"));
  }
  const int32_t state = tensor->StateIndex(state_name);
  if (state < 0) return absl::NotFoundError(absl::StrCat(what, ": the tensor has no such state"));
  if (tensor->type != (std::is_same_v<T, float> ? SafetensorsType::kF32 : SafetensorsType::kF64)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": it is ", NameOf(tensor->type), ", wanted as another type"));
  }
  if (box.row_begin < 0 || box.row_begin > box.row_end || box.row_end > tensor->rows ||
      box.col_begin < 0 || box.col_begin > box.col_end || box.col_end > tensor->cols ||
      out.rows() != box.rows() || out.cols() != box.cols()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", BoxText(box), " into [", out.rows(),
                                                   ", ", out.cols(), "], expected a part of [",
                                                   tensor->rows, ", ", tensor->cols, "]"));
  }
  const auto key = std::pair(static_cast<int32_t>(tensor - manifest_.tensors.data()), state);
  auto stored = std::lower_bound(
      manifest_.boxes.begin(), manifest_.boxes.end(), key,
      [](const ManifestBox& one, const auto& k) { return std::pair(one.tensor, one.state) < k; });
  // Boxes ascend by first row: those after the last wanted row do not overlap it.
  for (; stored != manifest_.boxes.end() && std::pair(stored->tensor, stored->state) == key &&
         stored->box.row_begin < box.row_end;
       ++stored) {
    const TensorBox& from = stored->box;
    if (from.row_end <= box.row_begin || from.col_end <= box.col_begin ||
        from.col_begin >= box.col_end) {
      continue;
    }
    const size_t index = stored - manifest_.boxes.begin();
    MOE_ASSIGN_OR_RETURN(const auto bytes, check ? CheckedBox(index) : BoxBytes(*stored));
    if (check) verified_[index] = true;
    CopyPart(bytes.data(), from, box, out);
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointManifest> ReadManifest(const std::string& path) {
  auto mapped = MappedFile::Open(ManifestPath(path));
  if (absl::IsInvalidArgument(mapped.status())) return Damaged(path, mapped.status().message());
  MOE_ASSIGN_OR_RETURN(const MappedFile document, std::move(mapped));
  return ParseManifest(SaidBy(path), document.text());
}

absl::StatusOr<CheckpointReader> CheckpointReader::Open(const std::string& path) {
  CheckpointReader reader;
  reader.path_ = path;
  MOE_ASSIGN_OR_RETURN(reader.manifest_, ReadManifest(path));
  const CheckpointManifest& manifest = reader.manifest_;
  MOE_RETURN_IF_ERROR(CheckTiling(SaidBy(path), manifest));
  const auto step = StepOf(
      std::filesystem::path(path + "/.").lexically_normal().parent_path().filename().string());
  if (step.has_value() && *step != manifest.step) {
    return Damaged(path, absl::StrCat("the manifest says step ", manifest.step));
  }
  reader.verified_.resize(manifest.boxes.size());
  reader.shards_ = std::vector<Shard>(manifest.files.size());
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const ManifestFile& file = manifest.files[i];
    auto shard = MappedFile::Open(absl::StrCat(path, "/", file.name));
    if (absl::IsNotFound(shard.status())) return Damaged(path, file.name + " is missing");
    if (absl::IsInvalidArgument(shard.status())) return Damaged(path, shard.status().message());
    MOE_ASSIGN_OR_RETURN(reader.shards_[i].file, std::move(shard));
    MOE_RETURN_IF_ERROR(CheckShard(path, file, reader.shards_[i].file.bytes()));
  }
  return reader;
}

std::string CheckpointReader::StateHash(absl::string_view state) const {
  const auto hashes = ParseStateHashes(manifest_.sections.hash);
  if (!hashes.ok()) return "";
  const auto hash = hashes->find(std::string(state));
  return hash == hashes->end() ? "" : HashHex(hash->second);
}

const ManifestTensor* CheckpointReader::Find(absl::string_view tensor) const {
  const int32_t index = manifest_.TensorIndex(tensor);
  return index < 0 ? nullptr : &manifest_.tensors[index];
}

absl::Status CheckpointReader::ReadBox(absl::string_view tensor, absl::string_view state,
                                       const TensorBox& box, MatrixView<float> out) {
  return Read(tensor, state, box, out);
}

absl::Status CheckpointReader::ReadBox(absl::string_view tensor, absl::string_view state,
                                       const TensorBox& box, MatrixView<double> out) {
  return Read(tensor, state, box, out);
}

absl::Status CheckpointReader::ReadUnchecked(absl::string_view tensor, absl::string_view state,
                                             const TensorBox& box, MatrixView<float> out) {
  return Read(tensor, state, box, out, /*check=*/false);
}

absl::Status CheckpointReader::CheckFinite(size_t index) {
  MOE_ASSIGN_OR_RETURN(const absl::Span<const uint8_t> bytes, CheckedBox(index));
  const ManifestBox& box = manifest_.boxes[index];
  const ManifestTensor& tensor = manifest_.tensors[box.tensor];
  if (tensor.type != SafetensorsType::kF32) return absl::OkStatus();
  const int64_t bad = CountNonFinite(bytes.data(), std::ssize(bytes) / int64_t{sizeof(float)});
  if (bad == 0) return absl::OkStatus();
  return Damaged(path_, absl::StrCat(manifest_.files[box.file].name, ": box '", tensor.name, "' ",
                                     tensor.states[box.state], " ", BoxText(box.box), " has ", bad,
                                     " values that are not finite, expected none"));
}

absl::Status CheckpointReader::Verify(int threads) {
  const auto boxes = static_cast<int64_t>(manifest_.boxes.size());
  std::mutex mu;
  int64_t first = boxes;      // first damaged box; guarded by mu
  absl::Status first_status;  // guarded by mu
  ThreadPool(threads).For(boxes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const absl::Status status = CheckFinite(i);
      const std::lock_guard lock(mu);
      if (status.ok() || i >= first) continue;
      first = i;
      first_status = status;
    }
  });
  MOE_RETURN_IF_ERROR(first_status);
  verified_.assign(boxes, true);
  return absl::OkStatus();
}

absl::Status CheckpointReader::VerifyStates(absl::Span<const CanonicalTensor> tensors,
                                            int threads) {
  const auto said = ParseStateHashes(manifest_.sections.hash);
  if (!said.ok()) return Damaged(path_, said.status().message());
  if (said->empty()) return absl::OkStatus();
  struct Band {
    const CanonicalTensor* tensor;
    const std::string* state;
    TensorBox box;
  };
  std::vector<Band> bands;
  for (const CanonicalTensor& tensor : tensors) {
    const ManifestTensor* const stored = Find(tensor.name);
    // Frozen tensors are not stored; with another model no sum will be right.
    if (stored == nullptr || stored->rows != tensor.rows || stored->cols != tensor.cols) continue;
    const UnitGrid grid(tensor);
    for (const std::string& state : stored->states) {
      for (int64_t row = 0, end = row; row < tensor.rows; row = end) {
        end = grid.EndOfBand(row);
        bands.push_back({&tensor, &state, {row, end, 0, tensor.cols}});
      }
    }
  }
  std::mutex mu;
  StateHashes read;     // guarded by mu
  absl::Status status;  // guarded by mu
  ThreadPool(threads).For(std::ssize(bands), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> values;
    for (int64_t i = begin; i < end; ++i) {
      const auto& [tensor, state, box] = bands[i];
      values.resize(static_cast<size_t>(box.rows() * box.cols()));
      const MatrixView<float> rows(values.data(), box.rows(), box.cols());
      const absl::Status one = ReadUnchecked(tensor->name, *state, box, rows);
      const uint64_t hash = one.ok() ? HashUnits(*tensor, box, rows) : 0;
      const std::lock_guard lock(mu);
      status.Update(one);
      read[*state] += hash;
    }
  });
  MOE_RETURN_IF_ERROR(status);
  StateHashes expected = *said;  // a state without elements has hash 0
  for (const auto& [state, hash] : read) expected.try_emplace(state, 0);
  for (const auto& [state, hash] : expected) {
    if (read[state] == hash) continue;
    return Damaged(path_, absl::StrCat("all '", state, "' have hash ", HashHex(read[state]),
                                       ", the manifest says ", HashHex(hash)));
  }
  return absl::OkStatus();
}

absl::StatusOr<FoundCheckpoint> FindCheckpoint(const std::string& folder, int64_t before) {
  MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, ListSteps(folder));
  FoundCheckpoint found;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (*step >= before) continue;
    const std::string path = absl::StrCat(folder, "/", StepFolderName(*step));
    const absl::Status status = CheckpointReader::Open(path).status();
    if (status.ok()) {
      found.path = path;
      found.step = *step;
      break;
    }
    if (!absl::IsDataLoss(status) && !absl::IsNotFound(status)) return status;
    found.warnings.push_back(PassedOver(path, status));
  }
  return found;
}

std::string PassedOver(const std::string& path, const absl::Status& why) {
  return absl::StrCat(path, " is passed over: ", why.message());
}

}  // namespace moe
