#include "benchmarks/kernel_device.h"

#include <time.h>

namespace moe::measure {
namespace {

// Several times the size of a GPU's largest cache.
constexpr int64_t kEvictingBytes = int64_t{256} << 20;

double ProcessNs() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return 1e9 * static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec);
}

}  // namespace

absl::StatusOr<std::unique_ptr<KernelDevice>> KernelDevice::Create(Device device,
                                                                   ThreadPool& threads,
                                                                   Clock clock) {
  std::unique_ptr<KernelDevice> made(new KernelDevice(threads, clock));
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
  }
  MOE_ASSIGN_OR_RETURN(timer_, MakeStreamTimer(*stream_));
  return absl::OkStatus();
}

absl::StatusOr<double> KernelDevice::Time(absl::FunctionRef<absl::Status()> work) {
  if (is_cpu() && clock_ == Clock::kProcess) {
    const double start = ProcessNs();
    MOE_RETURN_IF_ERROR(work());
    return ProcessNs() - start;
  }
  if (!is_cpu()) MOE_RETURN_IF_ERROR(stream_->Zero(evicting_.data(), evicting_.bytes()));
  MOE_RETURN_IF_ERROR(timer_->Start());
  MOE_RETURN_IF_ERROR(work());
  MOE_RETURN_IF_ERROR(timer_->Stop());
  return timer_->ElapsedNs();
}

}  // namespace moe::measure
