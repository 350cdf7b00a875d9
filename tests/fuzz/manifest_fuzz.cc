// Any bytes as the manifest of a checkpoint, as they are and with the checksum that they lack: what
// is accepted is written and read again as the same bytes, no file leaves the folder, and boxes
// that are said to tile have as many elements as their tensors.
#include <cstddef>
#include <cstdint>
#include <string>

#include <absl/status/status.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kernels/base/status_macros.h"
#include "moe/checkpoint/manifest.h"

namespace {

using Elements = unsigned __int128;

std::string Sealed(absl::string_view body) {
  const XXH128_hash_t hash = XXH3_128bits(body.data(), body.size());
  return absl::StrCat(body, ",\"checksum\":\"", moe::HashHex(hash.high64), moe::HashHex(hash.low64),
                      "\"}\n");
}

void CheckElements(const moe::CheckpointManifest& manifest) {
  Elements expected = 0, stored = 0;
  for (const moe::ManifestTensor& tensor : manifest.tensors) {
    expected += static_cast<Elements>(tensor.rows) * static_cast<Elements>(tensor.cols) *
                tensor.states.size();
  }
  for (const moe::ManifestBox& box : manifest.boxes) {
    stored += static_cast<Elements>(box.box.row_end - box.box.row_begin) *
              static_cast<Elements>(box.box.col_end - box.box.col_begin);
  }
  MOE_CHECK(stored == expected);
}

void Check(absl::string_view document) {
  const auto manifest = moe::ParseManifest("f", document);
  if (!manifest.ok()) {
    MOE_CHECK(absl::IsDataLoss(manifest.status()));
    MOE_CHECK(absl::StartsWith(manifest.status().message(), "f: "));
    return;
  }
  for (const moe::ManifestFile& file : manifest->files) {
    MOE_CHECK(!file.name.empty() && file.name.find('/') == file.name.npos && file.name[0] != '.');
    MOE_CHECK(file.name.find('\0') == file.name.npos);
  }
  for (const moe::ManifestBox& box : manifest->boxes) {
    const moe::ManifestTensor& tensor = manifest->tensors.at(box.tensor);
    MOE_CHECK(static_cast<size_t>(box.state) < tensor.states.size());
    MOE_CHECK(static_cast<size_t>(box.file) < manifest->files.size());
    MOE_CHECK(0 <= box.box.row_begin && box.box.row_end <= tensor.rows);
    MOE_CHECK(0 <= box.box.col_begin && box.box.col_end <= tensor.cols);
  }
  if (moe::CheckTiling("f", *manifest).ok()) CheckElements(*manifest);
  const auto written = moe::SerializeManifest(*manifest);
  MOE_CHECK(written.ok());
  const auto again = moe::ParseManifest("f", *written);
  MOE_CHECK(again.ok() && moe::SerializeManifest(*again).value() == *written);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  Check(text);
  Check(Sealed(text));
  return 0;
}
