// The devices that tests of operations use, and arrays in their memory.
#ifndef MOE_TESTS_KERNELS_DEVICE_MEMORY_H_
#define MOE_TESTS_KERNELS_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <absl/types/span.h>
#include <gtest/gtest.h>

#include "kernels/base/buffer.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/parallel.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "tests/kernels/op_test.h"
#include "tests/sanitizers.h"
#if defined(MOE_TEST_SCHEDULES)
#include <functional>

#include "tests/cusim/cusim.h"
#endif

namespace moe::testing {

#if defined(MOE_TEST_SCHEDULES)
inline constexpr bool kSimulatedCuda = true;

// A kernel of one thread.
inline absl::Status LaunchOne(Stream& stream, std::function<void()> body) {
  return stream.Launch([&](void* native) {
    EXPECT_EQ(cusim::LaunchOne(std::move(body), static_cast<cudaStream_t>(native)), cudaSuccess);
    return absl::OkStatus();
  });
}
#else
inline constexpr bool kSimulatedCuda = false;
#endif

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

// A copy of a host Matrix, including its guards, in the memory of a device.
template <typename T>
struct DeviceMatrix {
  DeviceArray<T> memory;
  int64_t rows, cols;
  MatrixLayout layout;
  MatrixView<T> view() const {
    return {memory.span().data() + layout.offset, rows, cols, cols + layout.gap};
  }
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
  // Whether exp, log and similar functions give the host's bits: not on a GPU.
  bool has_host_math() const { return is_cpu() || kSimulatedCuda; }
  bool is_cpu() const { return stream_->device().kind == DeviceKind::kCpu; }
  Stream& stream() const { return *stream_; }
  MemoryResource& memory() const { return *memory_; }

  // A copy of `host`, which may be destroyed when this returns, in memory of the device.
  template <typename T>
  DeviceArray<T> Copy(const std::vector<T>& host) const {
    const auto bytes = static_cast<int64_t>(host.size() * sizeof(T));
    Buffer buffer = Buffer::Allocate(bytes, *memory_).value();
    stream_->CopyBytes(host.data(), buffer.data(), bytes).IgnoreError();
    stream_->Synchronize().IgnoreError();
    return {std::move(buffer), static_cast<int64_t>(host.size())};
  }

  template <typename HostMatrix, typename T = typename HostMatrix::Element>
  DeviceMatrix<T> Copy(const HostMatrix& host) const {
    return {Copy(host.memory()), host.rows(), host.cols(), host.layout()};
  }
  DeviceArray<float> Random(int64_t n, uint64_t seed) const { return Copy(RandomFloats(n, seed)); }

  // Waits for the stream. Empty, and so equal to nothing expected, if the stream has failed.
  template <typename T>
  std::vector<T> Read(const DeviceArray<T>& array) const {
    std::vector<T> host(array.span().size());
    const auto bytes = static_cast<int64_t>(host.size() * sizeof(T));
    stream_->CopyBytes(array.span().data(), host.data(), bytes).IgnoreError();
    if (!stream_->Synchronize().ok()) host.clear();
    return host;
  }
  template <typename T>
  Matrix<T> Read(const DeviceMatrix<T>& matrix) const {
    std::vector<T> memory = Read(matrix.memory);
    if (memory.size() != matrix.memory.span().size()) return {};
    Matrix<T> host(matrix.rows, matrix.cols, matrix.layout);
    host.memory() = std::move(memory);
    return host;
  }

 private:
  ThreadPool pool_;
  MemoryResource* memory_ = &CpuMemory();
  std::unique_ptr<Stream> stream_;
};

// Offsets of two arrays, in elements after an address aligned to 16 bytes.
struct ArrayOffsets {
  size_t in, out;
};
inline constexpr ArrayOffsets kArrayOffsets[] = {{0, 0}, {8, 1}, {1, 0}, {3, 1}};

// `values` on a device, `offset` elements after an aligned address, and one more element after
// them.
template <typename T>
class Placed {
 public:
  Placed(const TestDevice& device, const std::vector<T>& values, size_t offset)
      : device_(device), offset_(offset), size_(values.size()), memory_(Copy(values)) {}

  absl::Span<T> span() const { return memory_.span().subspan(offset_, size_); }
  // The values, if nothing around them was written.
  std::vector<T> Read() const {
    std::vector<T> all = device_.Read(memory_);
    if (all.empty()) return all;
    EXPECT_EQ(all.back(), T(-77));
    for (size_t i = 0; i < offset_; ++i) EXPECT_EQ(all[i], T(-77));
    return {all.begin() + static_cast<ptrdiff_t>(offset_), all.end() - 1};
  }

 private:
  DeviceArray<T> Copy(const std::vector<T>& values) const {
    std::vector<T> all(offset_, T(-77));
    all.insert(all.end(), values.begin(), values.end());
    all.push_back(T(-77));
    return device_.Copy(all);
  }
  const TestDevice& device_;
  size_t offset_, size_;
  DeviceArray<T> memory_;
};

// The CPU with one thread and with three, and CUDA device 0 if build and machine have one.
inline std::vector<std::unique_ptr<TestDevice>> TestDevices() {
  std::vector<std::unique_ptr<TestDevice>> devices;
  for (const int threads : {1, 3})
    devices.push_back(std::make_unique<TestDevice>(Device(), threads));
  if (const auto cuda = CudaDevices(); cuda.ok() && cuda->front().usable.ok()) {
    devices.push_back(std::make_unique<TestDevice>(Device{DeviceKind::kCuda, 0}));
  }
  return devices;
}

// The SIMD targets of the CPU: those with fused multiply-add, or also "EMU128", which rounds the
// product of a multiply-add.
enum class Simd : uint8_t { kFused, kAll };

// Calls check() under several schedules of the threads of simulated devices. Under sanitizers one
// suffices: they find an access out of bounds, or one without order, in each.
template <typename Check>
void ForSchedules(Check check) {
#if defined(MOE_TEST_SCHEDULES)
  for (uint32_t seed = 1; seed <= (kSanitized ? 1 : 2); ++seed) {
    SCOPED_TRACE("CUDA, seed " + std::to_string(seed));
    const cusim::ScopedLaunchOptions options(
        {.seed = seed, .resident_blocks = static_cast<int>(1 + seed % 2)});
    check();
  }
#else
  SCOPED_TRACE("CUDA");
  check();
#endif
}

// Calls check(device) for all devices of an operation: the CPU with each SIMD target, with one
// thread and with three, and CUDA device 0 by ForSchedules. Under sanitizers with three threads
// alone, which make all accesses that one does; under ThreadSanitizer with one SIMD target, since
// all targets distribute rows over threads alike.
template <typename Check>
void ForEachDevice(Simd simd, Check check) {
  for (const std::string& target : gemm::SimdTargets()) {
    if (simd == Simd::kFused && target == "EMU128") continue;
    if (kThreadSanitized && target != gemm::SimdTargets().front()) continue;
    const SimdTarget use(target);
    for (const int threads : {1, 3}) {
      if (kSanitized && threads == 1) continue;
      SCOPED_TRACE(target + ", threads: " + std::to_string(threads));
      check(TestDevice(Device(), threads));
    }
  }
  const auto cuda = CudaDevices();
  if (!cuda.ok() || !cuda->front().usable.ok()) return;
  const TestDevice device(Device{DeviceKind::kCuda, 0});
  ForSchedules([&] { check(device); });
}
template <typename Check>
void ForEachDevice(Check check) {
  ForEachDevice(Simd::kFused, check);
}

// Calls operation(device), which returns its results as a tuple of vectors, on every device.
// Expects the results of the first, the CPU with its best SIMD target and one thread.
template <typename Operation>
void ExpectSameBitsOnEveryDevice(Operation operation) {
  std::optional<decltype(operation(std::declval<const TestDevice&>()))> expected;
  ForEachDevice([&](const TestDevice& device) {
    const auto got = operation(device);
    if (!expected) expected = got;
    const auto expect = [](size_t index, const auto& values, const auto& wanted) {
      EXPECT_TRUE(SameBits(values, wanted)) << "result " << index;
    };
    const auto expect_all = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      (expect(kIndex, std::get<kIndex>(got), std::get<kIndex>(*expected)), ...);
    };
    expect_all(std::make_index_sequence<std::tuple_size_v<decltype(got)>>());
  });
}

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_DEVICE_MEMORY_H_
