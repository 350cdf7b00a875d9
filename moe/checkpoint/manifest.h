// manifest.json of a checkpoint (docs/checkpoint.md): which box of which tensor is in which file,
// with a hash of each, and what the run was.
#ifndef MOE_MOE_CHECKPOINT_MANIFEST_H_
#define MOE_MOE_CHECKPOINT_MANIFEST_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/io/safetensors.h"
#include "moe/state/canonical_tensor.h"

namespace moe {

inline constexpr char kManifestName[] = "manifest.json";
inline constexpr int kManifestVersion = 1;
// Manifests beyond these are refused.
inline constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;
inline constexpr int64_t kMaxManifestBoxes = 10'000'000;
inline constexpr int64_t kMaxManifestTensors = 1'000'000;
inline constexpr int64_t kMaxManifestFiles = 1'000'000;

// Sections that describe the run, each a JSON object as text; carried without being interpreted.
struct CheckpointSections {
  std::string numerics = "{}";
  std::string model = "{}";
  std::string optimizer = "{}";
  std::string trainer = "{}";
  std::string data = "{}";
  std::string written_by = "{}";
  std::string hash = "{}";
};

// Identifier of the run that wrote the checkpoint: member `run` of section `written_by`, unique to
// that run. Empty where the member is missing, as in checkpoints of older programs: their runs
// cannot be distinguished.
std::string RunOf(const CheckpointSections& sections);

struct ManifestTensor {
  std::string name;
  SafetensorsType type = SafetensorsType::kF32;  // or kF64; type of all its states
  int64_t rows = 1, cols = 1;
  std::vector<std::string> states;  // ascending: "m", "master", "v"

  int32_t StateIndex(absl::string_view state) const;  // -1: there is none
};

struct ManifestFile {
  std::string name;  // name in the manifest's folder
  int64_t bytes = 0;
  uint64_t header_xxh3 = 0;  // hash of all bytes before the data
};

struct ManifestBox {
  int32_t tensor = 0;  // index into CheckpointManifest::tensors
  int32_t state = 0;   // index into that tensor's states
  int32_t file = 0;    // index into CheckpointManifest::files
  TensorBox box;
  uint64_t xxh3 = 0;  // hash of its elements, row-major, little-endian
};

struct CheckpointManifest {
  int64_t step = 0;     // optimiser steps taken
  std::string created;  // "2026-11-23T07:10:00Z"
  CheckpointSections sections;
  std::vector<ManifestTensor> tensors;  // ascending by name
  std::vector<ManifestFile> files;      // ascending by name
  std::vector<ManifestBox> boxes;       // ascending by tensor, state, first row, first column

  int32_t TensorIndex(absl::string_view tensor) const;  // -1: there is none
};

// Sorts files and boxes into the manifest's order; tensors and their states must already be in it.
void SortManifest(CheckpointManifest& manifest);

// The document: deterministic, ends with the XXH3-128 of all bytes before `,"checksum"`.
// kInvalidArgument, naming the field, for whatever ParseManifest would refuse, except boxes that do
// not tile their tensors.
absl::StatusOr<std::string> SerializeManifest(const CheckpointManifest& manifest);

// Parses an untrusted document and checks everything except CheckTiling; `file` is the name in
// messages. kDataLoss "<file>: what is, what was expected": a checksum that differs from that of
// the bytes, another version (named), anything beyond the limits above, keys that are missing,
// unknown, repeated or in another order than SerializeManifest writes, boxes outside their tensor,
// names of files outside the folder. kResourceExhausted without memory. Sections are returned
// without white space. Memory: at most 8 times the document's size, and 64 MiB.
absl::StatusOr<CheckpointManifest> ParseManifest(absl::string_view file,
                                                 absl::string_view document);

// kDataLoss unless the boxes of every state of every tensor cover each element exactly once; names
// tensor, state and boxes (rows and columns that none covers). O(n log n) for n boxes.
absl::Status CheckTiling(absl::string_view file, const CheckpointManifest& manifest);

// "<name>|<state>|<row>,<column>": name of a box in its file.
std::string BoxName(absl::string_view tensor, absl::string_view state, const TensorBox& box);
// "[0,32) x [0,128)"
std::string BoxText(const TensorBox& box);

uint64_t CheckpointHash(absl::Span<const uint8_t> bytes);  // XXH3-64
std::string HashHex(uint64_t hash);                        // 16 digits

// Section `hash` of a run that hashes its states: for each state, the sum of HashUnits
// (unit_grid.h) over all tensors. {"m":"0123456789abcdef",...}
using StateHashes = std::map<std::string, uint64_t>;
std::string StateHashesText(const StateHashes& hashes);
// kDataLoss for a text that is not such an object.
absl::StatusOr<StateHashes> ParseStateHashes(absl::string_view text);

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_MANIFEST_H_
