#include "moe/io/safetensors_stream.h"

#include <cstring>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"
#include "moe/io/safetensors_header.h"

namespace moe {
namespace {

absl::Status AppendMetadata(const SafetensorsMetadata& metadata, std::string& text) {
  absl::StrAppend(&text, "\"", kSafetensorsMetadataKey, "\":{");
  const char* separator = "";
  for (const auto& [key, value] : metadata) {
    MOE_ASSIGN_OR_RETURN(const std::string key_text, JsonString(key));
    MOE_ASSIGN_OR_RETURN(const std::string value_text, JsonString(value));
    absl::StrAppend(&text, std::exchange(separator, ","), key_text, ":", value_text);
  }
  text.push_back('}');
  return absl::OkStatus();
}

// The header of a file with these tensors in sequence, padded to a multiple of 8. kInvalidArgument
// for what ParseSafetensorsHeader would refuse.
absl::StatusOr<std::string> MakeHeader(absl::string_view file,
                                       absl::Span<const SafetensorsEntry> tensors,
                                       const SafetensorsMetadata& metadata) {
  std::string text = "{";
  if (!metadata.empty()) MOE_RETURN_IF_ERROR(AppendMetadata(metadata, text));
  int64_t begin_bytes = 0;
  for (const SafetensorsEntry& tensor : tensors) {
    if (tensor.name == kSafetensorsMetadataKey) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, ": a tensor named '", tensor.name, "', expected another name"));
    }
    MOE_ASSIGN_OR_RETURN(const std::string name, JsonString(tensor.name));
    const int64_t end_bytes = begin_bytes + tensor.size_bytes;
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

}  // namespace

absl::StatusOr<SafetensorsStream> SafetensorsStream::Create(
    const std::string& path, absl::Span<const SafetensorsEntry> tensors,
    const SafetensorsMetadata& metadata, FileSystem& files) {
  MOE_ASSIGN_OR_RETURN(const std::string text, MakeHeader(path, tensors, metadata));
  const uint64_t text_bytes = text.size();
  std::string header(sizeof(text_bytes), '\0');
  std::memcpy(header.data(), &text_bytes, sizeof(text_bytes));
  header.append(text);
  int64_t data_bytes = 0;
  for (const SafetensorsEntry& tensor : tensors) data_bytes += tensor.size_bytes;
  MOE_ASSIGN_OR_RETURN(WholeFile file, WholeFile::Create(path, absl::InfiniteDuration(), files));
  MOE_RETURN_IF_ERROR(file.Append(header));
  return SafetensorsStream(path, std::move(file), std::move(header), data_bytes);
}

absl::Status SafetensorsStream::Append(absl::Span<const uint8_t> bytes) {
  if (static_cast<int64_t>(bytes.size()) > left_bytes_) {
    return absl::InvalidArgumentError(absl::StrCat(
        path_, ": ", bytes.size(), " bytes of data, expected at most ", left_bytes_, " more"));
  }
  MOE_RETURN_IF_ERROR(file_.Append(bytes));
  left_bytes_ -= static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

absl::Status SafetensorsStream::Commit(PageCache cache) {
  if (left_bytes_ > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": the last ", left_bytes_, " bytes of data are missing"));
  }
  return file_.Commit(cache);
}

absl::Status WriteSafetensors(const std::string& path, absl::Span<const SafetensorsSource> tensors,
                              const SafetensorsMetadata& metadata) {
  std::vector<SafetensorsEntry> entries;
  entries.reserve(tensors.size());
  for (const SafetensorsSource& tensor : tensors) {
    entries.push_back({.name = tensor.name,
                       .type = tensor.type,
                       .shape = tensor.shape,
                       .size_bytes = static_cast<int64_t>(tensor.bytes.size())});
  }
  MOE_ASSIGN_OR_RETURN(SafetensorsStream stream,
                       SafetensorsStream::Create(path, entries, metadata));
  for (const SafetensorsSource& tensor : tensors) MOE_RETURN_IF_ERROR(stream.Append(tensor.bytes));
  return stream.Commit();
}

}  // namespace moe
