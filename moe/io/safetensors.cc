#include "moe/io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include <absl/strings/str_cat.h>

#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"
#include "moe/io/safetensors_header.h"

namespace moe {
namespace {

// Bytes of a file are copied into numbers without conversion.
static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr int64_t kPrefixBytes = 8;  // the length of the header

struct TypeRow {
  const char* name;
  int bits;
};
// In the enum's order.
constexpr TypeRow kTypes[] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
};
static_assert(std::size(kTypes) == kNumSafetensorsTypes);
static_assert(kNumSafetensorsTypes == static_cast<int>(SafetensorsType::kU64) + 1);

// out[i] = convert(i-th Stored); memcpy because tensors of a file need not be aligned.
template <typename Stored, typename Convert>
void ReadAs(absl::Span<const uint8_t> bytes, absl::Span<float> out, Convert convert) {
  for (size_t i = 0; i < out.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, bytes.data() + i * sizeof(Stored), sizeof(Stored));
    out[i] = convert(stored);
  }
}

}  // namespace

const char* NameOf(SafetensorsType type) {
  return kTypes[static_cast<size_t>(type)].name;
}

int BitsOf(SafetensorsType type) {
  return kTypes[static_cast<size_t>(type)].bits;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  MOE_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Open(path));
  MOE_ASSIGN_OR_RETURN(SafetensorsFile file, Parse(path, mapped.bytes()));
  file.file_ = std::make_shared<const MappedFile>(std::move(mapped));
  return file;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Parse(std::string name,
                                                       absl::Span<const uint8_t> bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  if (size < kPrefixBytes) {
    return absl::DataLossError(absl::StrCat(name, ": a file of ", size, " bytes, expected ",
                                            kPrefixBytes, " or more: no safetensors file"));
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  const int64_t most = std::min(kMaxSafetensorsHeaderBytes, size - kPrefixBytes);
  if (header_bytes > static_cast<uint64_t>(most)) {
    return absl::DataLossError(absl::StrCat(name, ": a header of ", header_bytes,
                                            " bytes, expected at most ", most, " in a file of ",
                                            size, " bytes"));
  }
  const auto* const text = reinterpret_cast<const char*>(bytes.data() + kPrefixBytes);
  SafetensorsFile file;
  file.data_ = bytes.subspan(kPrefixBytes + header_bytes);
  MOE_ASSIGN_OR_RETURN(SafetensorsHeader header,
                       ParseSafetensorsHeader(name, {text, static_cast<size_t>(header_bytes)},
                                              static_cast<int64_t>(file.data_.size())));
  file.path_ = std::move(name);
  file.tensors_ = std::move(header.tensors);
  file.metadata_ = std::move(header.metadata);
  return file;
}

const SafetensorsTensor* SafetensorsFile::Find(absl::string_view name) const {
  const auto found =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const SafetensorsTensor& tensor, absl::string_view wanted) {
                         return tensor.name < wanted;
                       });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

absl::Span<const uint8_t> SafetensorsFile::Data(const SafetensorsTensor& tensor) const {
  const auto size = static_cast<int64_t>(data_.size());
  // A tensor of another file must not read past the end of this one.
  MOE_CHECK(tensor.begin_bytes >= 0 && tensor.size_bytes >= 0 && tensor.begin_bytes <= size &&
            tensor.size_bytes <= size - tensor.begin_bytes);
  return data_.subspan(tensor.begin_bytes, tensor.size_bytes);
}

absl::Status SafetensorsFile::ReadFloat32(const SafetensorsTensor& tensor,
                                          absl::Span<float> out) const {
  if (static_cast<int64_t>(out.size()) != tensor.num_elements) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor '", Shown(tensor.name),
                                                   "': ", tensor.num_elements, " elements into ",
                                                   out.size(), ", expected as many"));
  }
  const absl::Span<const uint8_t> bytes = Data(tensor);
  switch (tensor.type) {
    case SafetensorsType::kF32:
      if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
      return absl::OkStatus();
    case SafetensorsType::kF64:
      ReadAs<double>(bytes, out, [](double value) { return static_cast<float>(value); });
      return absl::OkStatus();
    case SafetensorsType::kBF16:
      ReadAs<BFloat16>(bytes, out, [](BFloat16 value) { return static_cast<float>(value); });
      return absl::OkStatus();
    case SafetensorsType::kF16:
      ReadAs<Float16>(bytes, out, [](Float16 value) { return static_cast<float>(value); });
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor '", Shown(tensor.name),
                                                     "': dtype ", NameOf(tensor.type),
                                                     ", expected F32, F64, BF16 or F16"));
  }
}

}  // namespace moe
