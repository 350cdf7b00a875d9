#include <vector>

#include <cuda_runtime_api.h>

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream_stamps.h"
#include "kernels/base/trace.h"

namespace moe {
namespace {

constexpr char kName[] = "StreamStamps";

class CudaStamps final : public StreamStamps {
 public:
  explicit CudaStamps(Stream& stream) : stream_(stream) {}
  ~CudaStamps() override {
    for (const cudaEvent_t event : events_) {
      CudaStatus(cudaEventDestroy(event), kName).IgnoreError();
    }
  }

  // Records the time of the first event, from which all others are counted. The stream is idle.
  absl::Status SetClock() {
    MOE_RETURN_IF_ERROR(Record(0));
    MOE_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(events_[0]), kName));
    origin_ns_ = MonotonicNs();
    return absl::OkStatus();
  }

  absl::Status Mark(int64_t* ns) override {
    MOE_RETURN_IF_ERROR(Record(marks_.size() + 1));
    marks_.push_back(ns);
    return absl::OkStatus();
  }

  absl::Status Collect() override {
    if (marks_.empty()) return absl::OkStatus();
    MOE_RETURN_IF_ERROR(stream_.Synchronize());
    for (size_t i = 0; i < marks_.size(); ++i) {
      float ms = 0;
      MOE_RETURN_IF_ERROR(CudaStatus(cudaEventElapsedTime(&ms, events_[0], events_[i + 1]), kName));
      *marks_[i] = origin_ns_ + static_cast<int64_t>(static_cast<double>(ms) * 1e6);
    }
    marks_.clear();
    return SetClock();
  }

 private:
  // Events are created on demand and reused after Collect.
  absl::Status Record(size_t index) {
    return stream_.Launch([&](void* native) {
      if (index == events_.size()) {
        cudaEvent_t event = nullptr;
        MOE_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDefault), kName));
        events_.push_back(event);
      }
      return CudaStatus(cudaEventRecord(events_[index], static_cast<cudaStream_t>(native)), kName);
    });
  }

  Stream& stream_;
  std::vector<cudaEvent_t> events_;  // [0]: the origin; [i + 1]: the point of marks_[i]
  std::vector<int64_t*> marks_;
  int64_t origin_ns_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StreamStamps>> MakeStreamStamps(Stream& stream) {
  auto stamps = std::make_unique<CudaStamps>(stream);
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  MOE_RETURN_IF_ERROR(stamps->SetClock());
  return stamps;
}

}  // namespace moe
