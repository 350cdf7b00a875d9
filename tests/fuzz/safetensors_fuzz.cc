// Any bytes as a safetensors file: refused with a message, or every tensor lies inside, readable.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <absl/strings/match.h>

#include "kernels/base/status_macros.h"
#include "moe/io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = moe::SafetensorsFile::Parse("f", {data, size});
  if (!file.ok()) {
    MOE_CHECK(absl::IsDataLoss(file.status()));
    MOE_CHECK(absl::StartsWith(file.status().message(), "f: "));
    return 0;
  }
  int64_t sum_bytes = 0;
  uint64_t sum = 0;  // of every byte, so that each is read
  for (const moe::SafetensorsTensor& tensor : file->tensors()) {
    MOE_CHECK(file->Find(tensor.name) == &tensor);
    const auto bytes = file->Data(tensor);
    for (const uint8_t byte : bytes) sum += byte;
    sum_bytes += static_cast<int64_t>(bytes.size());
    // No shape may lie about the size: at least four bits an element.
    MOE_CHECK(tensor.num_elements <= 2 * tensor.size_bytes);
    std::vector<float> values(static_cast<size_t>(tensor.num_elements));
    const absl::Status read = file->ReadFloat32(tensor, absl::MakeSpan(values));
    MOE_CHECK(read.ok() || absl::IsInvalidArgument(read));
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, data, sizeof(header_bytes));
  // Every byte after the header belongs to one tensor.
  MOE_CHECK(static_cast<uint64_t>(sum_bytes) == size - sizeof(header_bytes) - header_bytes);
  MOE_CHECK(sum <= 255 * static_cast<uint64_t>(sum_bytes));
  return 0;
}
