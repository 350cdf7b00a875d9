// Where kernels run, and how they are timed against what the machine can do.
#ifndef MOE_MOE_CLI_BENCH_KERNEL_DEVICE_H_
#define MOE_MOE_CLI_BENCH_KERNEL_DEVICE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/base/parallel.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/base/stream.h"
#include "kernels/base/stream_timer.h"
#include "moe/cli/bench/collectives.h"
#include "moe/cli/bench/routing_spec.h"
#include "moe/cli/bench/statistics.h"
#include "moe/cli/bench/tables.h"

namespace moe::bench {

// Where a row was measured.
struct Place {
  const char* device = "cpu";  // or "cuda"
  int threads = 1;             // of the CPU; 0: it only waits
};
// Keys device and threads (null where there are none).
void AddPlace(const Place& place, Fields& row);

class KernelDevice {
 public:
  // `threads` are the host's: they make the data and, on the CPU, run the operations. They outlive
  // the device.
  // Errors as MakeStream and CudaMemory have them.
  static absl::StatusOr<std::unique_ptr<KernelDevice>> Create(Device device, ThreadPool& threads);

  Stream& stream() const { return *stream_; }
  ThreadPool& threads() const { return threads_; }
  MemoryResource& memory() const { return *memory_; }
  bool is_cpu() const { return memory_ == &CpuMemory(); }
  Place place() const { return is_cpu() ? Place{"cpu", threads_.threads()} : Place{"cuda", 0}; }

  // Nanoseconds of what `work` enqueues. On a GPU nothing that `work` reads is in a cache (256 MiB
  // are written in front of it, as Triton's do_bench does), and that write gives the host the time
  // to enqueue the work before the device comes to it: launches are not in the time.
  absl::StatusOr<double> Time(absl::FunctionRef<absl::Status()> work);

  // Enqueues: all bits of `result`, memory of the device, become 1: NaN in float32 and bf16, -1 in
  // whole numbers.
  absl::Status Spoil(absl::Span<std::byte> result);

 private:
  explicit KernelDevice(ThreadPool& threads) : threads_(threads) {}
  absl::Status SetUp(Device device);

  ThreadPool& threads_;
  MemoryResource* memory_ = &CpuMemory();
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<StreamTimer> timer_;
  Buffer evicting_, ones_;  // of GPUs
};

// An array in the memory of a device with a copy on the host; on the CPU both are one.
template <typename T>
class Mirrored {
 public:
  Mirrored() = default;
  // Zeros. kResourceExhausted names `name`.
  static absl::StatusOr<Mirrored> Allocate(int64_t count, const KernelDevice& device,
                                           absl::string_view name) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    Mirrored array;
    array.count_ = static_cast<size_t>(count);
    MOE_ASSIGN_OR_RETURN(array.host_, Buffer::Allocate(bytes, CpuMemory(), name));
    if (device.is_cpu()) return array;
    MOE_ASSIGN_OR_RETURN(array.device_, Buffer::Allocate(bytes, device.memory(), name));
    array.stream_ = &device.stream();
    return array;
  }
  // On both sides.
  static absl::StatusOr<Mirrored> Of(const std::vector<T>& values, const KernelDevice& device,
                                     absl::string_view name) {
    MOE_ASSIGN_OR_RETURN(Mirrored array,
                         Mirrored::Allocate(static_cast<int64_t>(values.size()), device, name));
    std::copy(values.begin(), values.end(), array.host().begin());
    MOE_RETURN_IF_ERROR(array.Upload());
    return array;
  }

  absl::Span<T> host() const { return {host_.span<T>().data(), count_}; }
  absl::Span<T> device() const {
    return {(stream_ == nullptr ? host_ : device_).template span<T>().data(), count_};
  }
  absl::Span<std::byte> bytes() const {
    return {reinterpret_cast<std::byte*>(device().data()), count_ * sizeof(T)};
  }

  // The host's array to the device, and back a part of the device's; they wait for the stream.
  absl::Status Upload() const {
    if (stream_ == nullptr) return absl::OkStatus();
    MOE_RETURN_IF_ERROR(stream_->CopyBytes(host_.data(), device_.data(), host_.bytes()));
    return stream_->Synchronize();
  }
  absl::Status Download(int64_t begin, int64_t end) const {
    if (stream_ == nullptr) return absl::OkStatus();
    MOE_RETURN_IF_ERROR(stream_->CopyBytes(device().data() + begin, host().data() + begin,
                                           (end - begin) * static_cast<int64_t>(sizeof(T))));
    return stream_->Synchronize();
  }
  absl::Status Download() const { return Download(0, static_cast<int64_t>(count_)); }

 private:
  size_t count_ = 0;
  Stream* stream_ = nullptr;  // of a device that is not the host
  Buffer host_, device_;
};

// What is in memory of the device; waits for the stream.
template <typename T>
absl::StatusOr<std::vector<T>> Fetch(const KernelDevice& device, absl::Span<const T> from) {
  std::vector<T> values(from.size());
  const auto bytes = static_cast<int64_t>(from.size() * sizeof(T));
  MOE_RETURN_IF_ERROR(device.stream().CopyBytes(from.data(), values.data(), bytes));
  MOE_RETURN_IF_ERROR(device.stream().Synchronize());
  return values;
}

// A stretch of `rows` rows: what one check looks at. On the CPU all; on a device, whose results are
// brought to the host and computed again by it, about 32 MiB by `row_bytes` (what the host reads
// for a row): the stretches of successive calls follow one another, around and around.
struct RowStretch {
  int64_t begin = 0, end = 0;
};
RowStretch CheckedRows(const KernelDevice& device, int64_t call, int64_t rows, int64_t row_bytes);

// `count` values in [-1, 1], by `seed` and `which` array it is, on host and device.
template <typename T>
absl::StatusOr<Mirrored<T>> UniformValues(int64_t count, uint64_t seed, uint32_t which,
                                          const KernelDevice& device, absl::string_view name) {
  constexpr int64_t kGrain = 1 << 14;
  MOE_ASSIGN_OR_RETURN(Mirrored<T> array, Mirrored<T>::Allocate(count, device, name));
  const absl::Span<T> values = array.host();
  device.threads().For((count + 3) / 4, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = 4 * begin; i < std::min(4 * end, count); i += 4) {
      const auto four = Random4({.seed = seed,
                                 .purpose = RandomPurpose::kData,
                                 .layer = which,
                                 .item = static_cast<uint64_t>(i)});
      for (int64_t j = i; j < std::min(i + 4, count); ++j) {
        values[j] = T(static_cast<float>(four[j - i]) * 0x1p-31f - 1);
      }
    }
  });
  MOE_RETURN_IF_ERROR(array.Upload());
  return array;
}

// `call` counts from 0, those before the timed ones included; prepare comes before every run.
// Around a timed run that is checked, spoil comes between prepare and run, and wrong after it.
struct TimedKernel {
  // Returns the work: operations or bytes.
  std::function<absl::StatusOr<double>(int64_t call)> prepare;
  std::function<absl::Status()> run;  // what is timed; enqueues
  // Elements of the result; empty: nothing is known.
  std::function<absl::StatusOr<int64_t>()> wrong;
  // Makes the whole result wrong, so that what a run leaves out is not right from the run before.
  std::function<absl::Status()> spoil = nullptr;
};

// One kernel with its data.
struct KernelCase {
  std::string pass, kernel;
  TimedKernel timed;
  absl::Span<std::byte> result;  // what run writes last, on the device; tests plant faults here
};

// The kernels of a benchmark, and the data that they share.
class KernelCases {
 public:
  virtual ~KernelCases() = default;
  const std::vector<KernelCase>& cases() const { return cases_; }

 protected:
  // Adds one of `self`, a class on this one with a `spec_` and Turn(record), which makes a record
  // of the routing the one that is run. spoil: empty, `result` is what it spoils.
  template <typename Self>
  KernelCase& Add(Self* self, KernelDevice& device, const char* pass, const char* kernel,
                  double (Self::*work)() const, absl::Status (Self::*run)(),
                  absl::StatusOr<int64_t> (Self::*wrong)(), absl::Span<std::byte> result,
                  std::function<absl::Status()> spoil = nullptr) {
    const auto prepare = [self, work](int64_t call) -> absl::StatusOr<double> {
      MOE_RETURN_IF_ERROR(self->Turn(call % CallsOf(self->spec_.routing)));
      return (self->*work)();
    };
    if (spoil == nullptr) spoil = std::bind_front(&KernelDevice::Spoil, &device, result);
    return cases_.emplace_back(KernelCase{.pass = pass,
                                          .kernel = kernel,
                                          .timed = {.prepare = prepare,
                                                    .run = std::bind_front(run, self),
                                                    .wrong = std::bind_front(wrong, self),
                                                    .spoil = std::move(spoil)},
                                          .result = result});
  }

  std::vector<KernelCase> cases_;
};

// Cases<T>, set up, with T the spec's type. Errors: kInvalidArgument in the name of `function` for
// types other than float32, bfloat16 and float16; what Cases<T>::Setup says.
template <template <typename> class Cases, typename Spec>
absl::StatusOr<std::unique_ptr<KernelCases>> MakeCases(absl::string_view function, const Spec& spec,
                                                       KernelDevice& device) {
  if (!IsStorageType(spec.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": type ", moe::NameOf(spec.dtype), ", expected f32, bf16 or f16"));
  }
  return WithStorageType(spec.dtype,
                         [&]<typename T>(T) -> absl::StatusOr<std::unique_ptr<KernelCases>> {
                           auto cases = std::make_unique<Cases<T>>(spec, device);
                           MOE_RETURN_IF_ERROR(cases->Setup());
                           return cases;
                         });
}

struct KernelTimes {
  int64_t iterations = 0;
  Statistics time_us;
  double mean_work = 0;     // of a call
  double work_per_ns = 0;   // mean work / median time: GFLOP/s or GB/s
  double limit_per_ns = 0;  // the largest that was measured; NaN: unknown
  double limit_pct = 0;     // work_per_ns of limit_per_ns
  int64_t wrong = -1;       // over timed calls; -1: not checked
};

// How much of such work a ns has room for. Empty: nobody knows.
using KernelLimit = std::function<absl::StatusOr<double>(double work)>;

// The limit is measured before every call, so that both see the same clock and the same neighbours.
// The largest counts: on a busy machine others are of what was left. Calls go on as MeasureOptions
// says.
absl::StatusOr<KernelTimes> TimeKernel(const TimedKernel& kernel, const KernelLimit& limit,
                                       const MeasureOptions& options, KernelDevice& device);

}  // namespace moe::bench

#endif  // MOE_MOE_CLI_BENCH_KERNEL_DEVICE_H_
