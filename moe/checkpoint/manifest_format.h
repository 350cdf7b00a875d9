// Format of a manifest: what its reader and its writer share.
// Not installed: users of the package need no nlohmann-json.
#ifndef MOE_MOE_CHECKPOINT_MANIFEST_FORMAT_H_
#define MOE_MOE_CHECKPOINT_MANIFEST_FORMAT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

#include "moe/checkpoint/manifest.h"
#include "moe/io/bounded_json.h"

namespace moe {

inline constexpr char kManifestFormat[] = "moe-checkpoint";
// Keys of the document, in their order.
inline constexpr std::array<const char*, 15> kManifestKeys = {
    "format", "version",    "step", "created", "numerics", "model", "optimizer", "trainer",
    "data",   "written_by", "hash", "tensors", "files",    "boxes", "checksum"};
inline constexpr std::array<std::string CheckpointSections::*, 7> kManifestSections = {
    &CheckpointSections::numerics, &CheckpointSections::model, &CheckpointSections::optimizer,
    &CheckpointSections::trainer,  &CheckpointSections::data,  &CheckpointSections::written_by,
    &CheckpointSections::hash};
inline constexpr size_t kFirstManifestSection = 4;  // index into kManifestKeys
inline constexpr int64_t kMaxManifestSectionBytes = int64_t{1} << 20;

// How the document ends: key, digits, end.
inline constexpr char kManifestChecksumKey[] = ",\"checksum\":\"";
inline constexpr size_t kManifestChecksumDigits = 32;
inline constexpr char kManifestChecksumEnd[] = "\"}\n";
std::string ManifestChecksum(absl::string_view text);  // XXH3-128

// Key by which the boxes of a manifest ascend.
inline std::tuple<int32_t, int32_t, int64_t, int64_t> BoxOrder(const ManifestBox& box) {
  return {box.tensor, box.state, box.box.row_begin, box.box.col_begin};
}

// Merges the tensors of several manifests, each with some states of a tensor.
class ManifestTensors {
 public:
  // Returns false where an earlier part has the tensor in another shape or type.
  bool Add(const ManifestTensor& tensor);
  std::vector<ManifestTensor> InOrder() const;

 private:
  std::map<std::string, ManifestTensor> by_name_;
};

// Writes a section, a JSON object, from its events, without white space. kDataLoss for a key that
// occurs twice in an object, for anything but an object and above kMaxManifestSectionBytes.
class ManifestSectionText : public JsonEvents {
 public:
  absl::Status BeginObject() override;
  absl::Status BeginList() override;
  absl::Status End() override;
  absl::Status Key(std::string name) override;
  absl::Status Scalar(nlohmann::json value) override;

  bool done() const { return !text_.empty() && open_.empty(); }
  std::string Take() { return std::exchange(text_, {}); }

 private:
  struct Open {
    char end;
    bool empty = true;
    std::set<std::string> keys;
  };

  void Begin(char begin, char end);
  void Separate();  // writes the comma before a key, or before a value without a key
  absl::Status Fits() const;

  std::string text_;
  std::vector<Open> open_;
  bool after_key_ = false;
};

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_MANIFEST_FORMAT_H_
