// Devices that kernels run on, timing of a call there, and memory with its data.
#ifndef MOE_BENCHMARKS_KERNEL_DEVICE_H_
#define MOE_BENCHMARKS_KERNEL_DEVICE_H_

#include <cstdint>
#include <memory>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "kernels/base/parallel.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "kernels/base/stream_timer.h"
#include "kernels/draw/draw.h"

namespace moe::measure {

// Clock of a CPU. kProcess: the CPU time of this process. For one thread that owns its core it
// equals the wall clock; it excludes the time that other programs take from the core.
enum class Clock : uint8_t { kWall, kProcess };

class KernelDevice {
 public:
  // `threads` belong to the host: on a CPU they draw data and run the kernels. They must outlive
  // the device. Errors: those of MakeStream and CudaMemory.
  static absl::StatusOr<std::unique_ptr<KernelDevice>> Create(Device device, ThreadPool& threads,
                                                              Clock clock);

  Stream& stream() const { return *stream_; }
  ThreadPool& threads() const { return threads_; }
  MemoryResource& memory() const { return *memory_; }
  bool is_cpu() const { return memory_ == &CpuMemory(); }

  // Nanoseconds of the work that `work` enqueues. On a GPU no input of `work` is in a cache (256
  // MiB are written before it, as in Triton's do_bench), and the host enqueues the work during that
  // write: launches are not included in the time.
  absl::StatusOr<double> Time(absl::FunctionRef<absl::Status()> work);

 private:
  KernelDevice(ThreadPool& threads, Clock clock) : threads_(threads), clock_(clock) {}
  absl::Status SetUp(Device device);

  ThreadPool& threads_;
  const Clock clock_;
  MemoryResource* memory_ = &CpuMemory();
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<StreamTimer> timer_;
  Buffer evicting_;  // written before a call on a GPU
};

// An array in the memory of a device.
template <typename T>
class Array {
 public:
  // Zeros. The error kResourceExhausted contains `name`.
  static absl::StatusOr<Array> Allocate(int64_t count, const KernelDevice& device,
                                        absl::string_view name) {
    Array array;
    array.count_ = static_cast<size_t>(count);
    MOE_ASSIGN_OR_RETURN(array.buffer_, Buffer::Allocate(count * static_cast<int64_t>(sizeof(T)),
                                                         device.memory(), name));
    return array;
  }
  static absl::StatusOr<Array> Of(absl::Span<const T> values, const KernelDevice& device,
                                  absl::string_view name) {
    MOE_ASSIGN_OR_RETURN(Array array, Allocate(static_cast<int64_t>(values.size()), device, name));
    MOE_RETURN_IF_ERROR(
        device.stream().CopyBytes(values.data(), array.buffer_.data(), array.buffer_.bytes()));
    MOE_RETURN_IF_ERROR(device.stream().Synchronize());
    return array;
  }

  absl::Span<T> span() const { return {buffer_.span<T>().data(), count_}; }
  T* data() const { return span().data(); }

 private:
  size_t count_ = 0;
  Buffer buffer_;
};

// `count` values in [-1, 1), drawn on the device by `seed` and `which`, the number of the array.
template <typename T>
absl::StatusOr<Array<T>> UniformValues(int64_t count, uint64_t seed, uint32_t which,
                                       const KernelDevice& device, absl::string_view name) {
  MOE_ASSIGN_OR_RETURN(auto array, Array<T>::Allocate(count, device, name));
  const RandomKey key = {.seed = seed, .purpose = RandomPurpose::kData, .layer = which};
  MOE_RETURN_IF_ERROR(DrawUniform(key, array.span(), device.stream()));
  return array;
}

}  // namespace moe::measure

#endif  // MOE_BENCHMARKS_KERNEL_DEVICE_H_
