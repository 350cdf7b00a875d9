#include "moe/cli/bench/kernel_device.h"

#include "kernels/base/trace.h"

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

namespace {

// Of the timed calls, in order.
struct Samples {
  std::vector<double> time_us;
  std::vector<double> work;
  double limit = kNone;  // the largest

  KernelTimes Summary(int64_t wrong) const {
    KernelTimes times{.iterations = static_cast<int64_t>(time_us.size()),
                      .time_us = Describe(time_us),
                      .mean_work = Describe(work).mean,
                      .limit_per_ns = limit,
                      .wrong = wrong};
    if (times.time_us.p50 > 0) times.work_per_ns = times.mean_work / times.time_us.p50 * 1e-3;
    times.limit_pct = 100 * times.work_per_ns / limit;
    return times;
  }
};

}  // namespace

absl::StatusOr<KernelTimes> TimeKernel(const TimedKernel& kernel, const KernelLimit& limit,
                                       const MeasureOptions& options, KernelDevice& device) {
  int64_t call = 0;
  for (; call < options.warmup; ++call) {
    MOE_RETURN_IF_ERROR(kernel.prepare(call).status());
    MOE_RETURN_IF_ERROR(kernel.run());
  }
  MOE_RETURN_IF_ERROR(device.stream().Synchronize());
  const bool check = options.check == Check::kYes && kernel.wrong != nullptr;
  int64_t wrong = check ? 0 : -1;
  Samples samples;
  const int64_t begin = MonotonicNs();
  int64_t next_look = options.iterations;
  for (;; ++call) {
    MOE_ASSIGN_OR_RETURN(const double work, kernel.prepare(call));
    if (check && kernel.spoil != nullptr) MOE_RETURN_IF_ERROR(kernel.spoil());
    if (limit != nullptr) {
      MOE_ASSIGN_OR_RETURN(const double most, limit(work));
      samples.limit = std::fmax(samples.limit, most);  // NaN at first
    }
    MOE_ASSIGN_OR_RETURN(const double ns, device.Time(kernel.run));
    if (check) {
      MOE_ASSIGN_OR_RETURN(const int64_t now, kernel.wrong());
      wrong += now;
    }
    samples.time_us.push_back(ns * 1e-3);
    samples.work.push_back(work);
    const auto iterations = static_cast<int64_t>(samples.time_us.size());
    if (iterations < options.iterations) continue;
    if (absl::Nanoseconds(MonotonicNs() - begin) >= options.budget) break;
    if (iterations < next_look) continue;
    if (Describe(samples.time_us).cv_pct <= options.max_noise_pct) break;
    next_look = 2 * iterations;
  }
  return samples.Summary(wrong);
}

}  // namespace moe::bench
