#include "kernels/attention/rotary_table.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int64_t kFewestPositions = 256;

absl::StatusOr<Buffer> Compute(float base, int64_t half, int64_t positions) {
  MOE_ASSIGN_OR_RETURN(Buffer values,
                       Buffer::Allocate(2 * positions * half * static_cast<int64_t>(sizeof(float)),
                                        CpuMemory(), "rotary table"));
  float* const cosine = values.span<float>().data();
  float* const sine = cosine + positions * half;
  std::vector<double> frequency;
  for (int64_t d = 0; d < half; ++d) {
    frequency.push_back(
        std::pow(static_cast<double>(base), -static_cast<double>(d) / static_cast<double>(half)));
  }
  for (int64_t t = 0; t < positions; ++t) {
    for (int64_t d = 0; d < half; ++d) {
      const double angle = static_cast<double>(t) * frequency[d];
      cosine[t * half + d] = static_cast<float>(std::cos(angle));
      sine[t * half + d] = static_cast<float>(std::sin(angle));
    }
  }
  return values;
}

// Uses a stream of its own. The caller's stream may be waiting for work that another thread has yet
// to enqueue, and that thread may be blocked on the lock of the tables.
absl::StatusOr<Buffer> CopyTo(Device device, const Buffer& host) {
  MOE_ASSIGN_OR_RETURN(MemoryResource* const memory, CudaMemory(device.index));
  MOE_ASSIGN_OR_RETURN(Buffer values, Buffer::Allocate(host.bytes(), *memory, "rotary table"));
  MOE_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, MakeStream(device));
  MOE_RETURN_IF_ERROR(stream->CopyBytes(host.data(), values.data(), host.bytes()));
  MOE_RETURN_IF_ERROR(stream->Synchronize());
  return values;
}

}  // namespace

absl::StatusOr<const RotaryTable*> RotaryTable::For(float base, int64_t half, int64_t positions,
                                                    Device device) {
  using Key = std::tuple<DeviceKind, int, float, int64_t>;
  static std::mutex* const mu = new std::mutex;
  static auto* const tables =
      new std::map<Key, std::vector<std::unique_ptr<RotaryTable>>>;  // guarded by mu
  const std::lock_guard<std::mutex> lock(*mu);
  auto& made = (*tables)[{device.kind, device.index, base, half}];
  const int64_t longest = made.empty() ? 0 : made.back()->positions();
  if (made.empty() || longest < positions) {
    const int64_t length = std::max({positions, 2 * longest, kFewestPositions});
    MOE_ASSIGN_OR_RETURN(Buffer values, Compute(base, half, length));
    if (device.kind == DeviceKind::kCuda) {
      MOE_ASSIGN_OR_RETURN(values, CopyTo(device, values));
    }
    made.push_back(std::make_unique<RotaryTable>(std::move(values), length));
  }
  return made.back().get();
}

}  // namespace moe
