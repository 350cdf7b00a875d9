#include <cstring>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"
#include "moe/io/safetensors.h"
#include "moe/io/safetensors_header.h"

namespace moe {
namespace {

using Json = nlohmann::json;

absl::StatusOr<std::string> JsonText(const std::string& text) try {
  return Json(text).dump();
} catch (const Json::exception&) {  // not UTF-8
  return absl::InvalidArgumentError(absl::StrCat("'", Shown(text), "' is no text, expected UTF-8"));
}

absl::Status AppendMetadata(const SafetensorsMetadata& metadata, std::string& text) {
  absl::StrAppend(&text, "\"", kSafetensorsMetadataKey, "\":{");
  const char* separator = "";
  for (const auto& [key, value] : metadata) {
    MOE_ASSIGN_OR_RETURN(const std::string key_text, JsonText(key));
    MOE_ASSIGN_OR_RETURN(const std::string value_text, JsonText(value));
    absl::StrAppend(&text, std::exchange(separator, ","), key_text, ":", value_text);
  }
  text.push_back('}');
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> MakeSafetensorsHeader(absl::string_view file,
                                                  absl::Span<const SafetensorsSource> tensors,
                                                  const SafetensorsMetadata& metadata) {
  std::string text = "{";
  if (!metadata.empty()) MOE_RETURN_IF_ERROR(AppendMetadata(metadata, text));
  int64_t begin_bytes = 0;
  for (const SafetensorsSource& tensor : tensors) {
    if (tensor.name == kSafetensorsMetadataKey) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, ": a tensor named '", tensor.name, "', expected another name"));
    }
    MOE_ASSIGN_OR_RETURN(const std::string name, JsonText(tensor.name));
    const int64_t end_bytes = begin_bytes + static_cast<int64_t>(tensor.bytes.size());
    absl::StrAppend(&text, text.size() == 1 ? "" : ",", name, ":{\"dtype\":\"", NameOf(tensor.type),
                    "\",\"shape\":[", absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[",
                    begin_bytes, ",", end_bytes, "]}");
    begin_bytes = end_bytes;
  }
  text.push_back('}');
  text.append((8 - text.size() % 8) % 8, ' ');
  const auto readable = ParseSafetensorsHeader(file, text, begin_bytes);
  if (absl::IsDataLoss(readable.status())) {
    return absl::InvalidArgumentError(readable.status().message());
  }
  MOE_RETURN_IF_ERROR(readable.status());
  return text;
}

absl::Status WriteSafetensors(const std::string& path, absl::Span<const SafetensorsSource> tensors,
                              const SafetensorsMetadata& metadata) {
  MOE_ASSIGN_OR_RETURN(const std::string header, MakeSafetensorsHeader(path, tensors, metadata));
  const uint64_t header_bytes = header.size();
  MOE_ASSIGN_OR_RETURN(WholeFile file, WholeFile::Create(path));
  MOE_RETURN_IF_ERROR(file.Append(BytesOf(absl::MakeConstSpan(&header_bytes, 1))));
  MOE_RETURN_IF_ERROR(file.Append(header));
  for (const SafetensorsSource& tensor : tensors) MOE_RETURN_IF_ERROR(file.Append(tensor.bytes));
  return file.Commit();
}

}  // namespace moe
