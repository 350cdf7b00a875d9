#include "kernels/base/stream_timer.h"

#include <cstdint>

#include "kernels/base/status_macros.h"
#include "kernels/base/trace.h"

namespace moe {
namespace {

class HostTimer final : public StreamTimer {
 public:
  explicit HostTimer(Stream& stream) : stream_(stream) {}

  absl::Status Start() override { return Stamp(start_ns_); }
  absl::Status Stop() override { return Stamp(stop_ns_); }
  absl::StatusOr<double> ElapsedNs() override {
    MOE_RETURN_IF_ERROR(stream_.Synchronize());
    return static_cast<double>(stop_ns_ - start_ns_);
  }

 private:
  absl::Status Stamp(int64_t& ns) {
    MOE_RETURN_IF_ERROR(stream_.Synchronize());
    ns = MonotonicNs();
    return absl::OkStatus();
  }

  Stream& stream_;
  int64_t start_ns_ = 0, stop_ns_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StreamTimer>> MakeStreamTimer(Stream& stream) {
  if (stream.device().kind == DeviceKind::kCuda) return MakeCudaStreamTimer(stream);
  return std::make_unique<HostTimer>(stream);
}

}  // namespace moe
