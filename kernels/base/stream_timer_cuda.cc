#include <cuda_runtime_api.h>

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream_timer.h"

namespace moe {
namespace {

constexpr char kTimer[] = "StreamTimer";

class CudaTimer final : public StreamTimer {
 public:
  explicit CudaTimer(Stream& stream) : stream_(stream) {}
  ~CudaTimer() override {
    for (cudaEvent_t event : {start_, stop_}) {
      if (event != nullptr) CudaStatus(cudaEventDestroy(event), kTimer).IgnoreError();
    }
  }

  absl::Status Create() {
    return stream_.Launch([this](void*) {
      // The events of streams are made without timing.
      MOE_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&start_, cudaEventDefault), kTimer));
      return CudaStatus(cudaEventCreateWithFlags(&stop_, cudaEventDefault), kTimer);
    });
  }

  absl::Status Start() override { return Record(start_); }
  absl::Status Stop() override { return Record(stop_); }
  absl::StatusOr<double> ElapsedNs() override {
    MOE_RETURN_IF_ERROR(stream_.Synchronize());
    float ms = 0;
    MOE_RETURN_IF_ERROR(CudaStatus(cudaEventElapsedTime(&ms, start_, stop_), kTimer));
    return static_cast<double>(ms) * 1e6;
  }

 private:
  absl::Status Record(cudaEvent_t event) {
    return stream_.Launch([event](void* native) {
      return CudaStatus(cudaEventRecord(event, static_cast<cudaStream_t>(native)), kTimer);
    });
  }

  Stream& stream_;
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StreamTimer>> MakeCudaStreamTimer(Stream& stream) {
  auto timer = std::make_unique<CudaTimer>(stream);
  MOE_RETURN_IF_ERROR(timer->Create());
  return timer;
}

}  // namespace moe
