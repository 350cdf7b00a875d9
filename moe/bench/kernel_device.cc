#include "moe/bench/kernel_device.h"

#include <algorithm>

namespace moe::bench {
namespace {

// Several times the largest cache of a GPU.
constexpr int64_t kEvictingBytes = int64_t{256} << 20;
constexpr int64_t kOnesBytes = int64_t{16} << 20;
constexpr int64_t kCheckedBytes = int64_t{32} << 20;

}  // namespace

void AddPlace(const Place& place, Fields& row) {
  row.emplace_back("device", place.device);
  row.emplace_back("threads", place.threads > 0 ? Cell(int64_t{place.threads}) : Cell());
}

absl::StatusOr<std::unique_ptr<KernelDevice>> KernelDevice::Create(Device device,
                                                                   ThreadPool& threads) {
  std::unique_ptr<KernelDevice> made(new KernelDevice(threads));
  MOE_RETURN_IF_ERROR(made->SetUp(device));
  return made;
}

absl::Status KernelDevice::SetUp(Device device) {
  if (device.kind == DeviceKind::kCpu) {
    stream_ = MakeInlineStream(&threads_);
  } else {
    MOE_ASSIGN_OR_RETURN(stream_, MakeStream(device, &threads_));
    MOE_ASSIGN_OR_RETURN(memory_, CudaMemory(device.index));
    MOE_ASSIGN_OR_RETURN(evicting_, Buffer::Allocate(kEvictingBytes, *memory_, "cache eviction"));
    MOE_ASSIGN_OR_RETURN(ones_, Buffer::Allocate(kOnesBytes, *memory_, "spoiled results"));
    const std::vector<std::byte> ones(kOnesBytes, std::byte{0xFF});
    MOE_RETURN_IF_ERROR(stream_->CopyBytes(ones.data(), ones_.data(), kOnesBytes));
    MOE_RETURN_IF_ERROR(stream_->Synchronize());
  }
  MOE_ASSIGN_OR_RETURN(timer_, MakeStreamTimer(*stream_));
  return absl::OkStatus();
}

absl::StatusOr<double> KernelDevice::Time(absl::FunctionRef<absl::Status()> work) {
  if (!is_cpu()) MOE_RETURN_IF_ERROR(stream_->Zero(evicting_.data(), evicting_.bytes()));
  MOE_RETURN_IF_ERROR(timer_->Start());
  MOE_RETURN_IF_ERROR(work());
  MOE_RETURN_IF_ERROR(timer_->Stop());
  return timer_->ElapsedNs();
}

absl::Status KernelDevice::Spoil(absl::Span<std::byte> result) {
  if (is_cpu()) {
    std::fill(result.begin(), result.end(), std::byte{0xFF});
    return absl::OkStatus();
  }
  const auto bytes = static_cast<int64_t>(result.size());
  for (int64_t at = 0; at < bytes; at += kOnesBytes) {
    MOE_RETURN_IF_ERROR(
        stream_->CopyBytes(ones_.data(), result.data() + at, std::min(kOnesBytes, bytes - at)));
  }
  return absl::OkStatus();
}

RowStretch CheckedRows(const KernelDevice& device, int64_t call, int64_t rows, int64_t row_bytes) {
  const int64_t most = std::max<int64_t>(1, kCheckedBytes / std::max<int64_t>(1, row_bytes));
  if (device.is_cpu() || rows <= most) return {0, rows};
  const int64_t stretches = (rows + most - 1) / most;
  const int64_t begin = call % stretches * most;
  return {begin, std::min(rows, begin + most)};
}

}  // namespace moe::bench
