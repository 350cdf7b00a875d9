// The devices that tests of operations run on, and arrays in their memory.
#ifndef MOE_TESTS_KERNELS_DEVICE_MEMORY_H_
#define MOE_TESTS_KERNELS_DEVICE_MEMORY_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/parallel.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe::testing {

// A [rows, cols] matrix or an array in the memory of a device.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(Buffer buffer, int64_t size) : buffer_(std::move(buffer)), size_(size) {}
  absl::Span<T> span() const { return {buffer_.template span<T>().data(), size_t(size_)}; }
  MatrixView<T> view(int64_t rows, int64_t cols, int64_t stride) const {
    return {span().data(), rows, cols, stride};
  }

 private:
  Buffer buffer_;
  int64_t size_;
};

// A device with a stream: inline on the CPU, with `threads` threads.
class TestDevice {
 public:
  explicit TestDevice(Device device, int threads = 1) : pool_(threads) {
    if (device.kind == DeviceKind::kCuda) {
      stream_ = MakeStream(device).value();
      memory_ = CudaMemory(device.index).value();
    } else {
      stream_ = MakeInlineStream(&pool_);
    }
  }

  const char* name() const { return memory_ == &CpuMemory() ? "CPU" : "CUDA"; }
  Stream& stream() const { return *stream_; }
  MemoryResource& memory() const { return *memory_; }

  // `host`, which may be gone when this returns, in memory of the device.
  template <typename T>
  DeviceArray<T> Copy(const std::vector<T>& host) const {
    const auto bytes = static_cast<int64_t>(host.size() * sizeof(T));
    Buffer buffer = Buffer::Allocate(bytes, *memory_).value();
    stream_->CopyBytes(host.data(), buffer.data(), bytes).IgnoreError();
    stream_->Synchronize().IgnoreError();
    return {std::move(buffer), static_cast<int64_t>(host.size())};
  }

  // Waits for the stream. Empty, and so equal to nothing expected, if the stream has failed.
  template <typename T>
  std::vector<T> Read(const DeviceArray<T>& array) const {
    std::vector<T> host(array.span().size());
    const auto bytes = static_cast<int64_t>(host.size() * sizeof(T));
    stream_->CopyBytes(array.span().data(), host.data(), bytes).IgnoreError();
    if (!stream_->Synchronize().ok()) host.clear();
    return host;
  }

 private:
  ThreadPool pool_;
  MemoryResource* memory_ = &CpuMemory();
  std::unique_ptr<Stream> stream_;
};

// The CPU with one thread and with three, and CUDA device 0 where build and machine have one.
inline std::vector<std::unique_ptr<TestDevice>> TestDevices() {
  std::vector<std::unique_ptr<TestDevice>> devices;
  for (const int threads : {1, 3})
    devices.push_back(std::make_unique<TestDevice>(Device(), threads));
  if (const auto cuda = CudaDevices(); cuda.ok() && cuda->front().usable.ok()) {
    devices.push_back(std::make_unique<TestDevice>(Device{DeviceKind::kCuda, 0}));
  }
  return devices;
}

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_DEVICE_MEMORY_H_
