// Owned memory of one device. Everything else takes views.
#ifndef MOE_KERNELS_BASE_BUFFER_H_
#define MOE_KERNELS_BASE_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// The source of memory for buffers and workspaces.
class MemoryResource {
 public:
  virtual ~MemoryResource() = default;
  virtual Device device() const = 0;
  // `bytes` > 0 zeroed bytes, aligned to 64, ready for every stream of the device.
  // kResourceExhausted names the size that was requested.
  virtual absl::StatusOr<std::byte*> Allocate(int64_t bytes) = 0;
  // Streams must have passed all work on `data`. May keep the memory for a later Allocate.
  virtual void Free(std::byte* data, int64_t bytes) = 0;
};

// Host memory, 64-byte aligned, from 2 MiB on in huge pages if the system has them; never
// destroyed. `CpuMemory()` is thread-safe.
MemoryResource& CpuMemory();

// Host memory that the system commits as it is written: for memory of which much may never be
// written. Otherwise as CpuMemory.
MemoryResource& ZeroPages();

// Memory of a CUDA device, from a pool that gives nothing back to the driver; one resource a
// device, never destroyed, thread-safe. Allocate waits for the device to zero the memory: not for a
// hot path. Errors: as MakeStream.
absl::StatusOr<MemoryResource*> CudaMemory(int index);

// Pinned host memory: copies between it and CUDA devices do not block the host. Never destroyed,
// thread-safe. Freed memory is kept for a later Allocate of the same size. The thread that
// allocates must have made the device that uses the memory current. Errors: as CudaMemory.
absl::StatusOr<MemoryResource*> PinnedMemory();

// Move-only owner of `bytes` zeroed bytes.
class Buffer {
 public:
  Buffer() = default;
  // `name` identifies the buffer in errors.
  static absl::StatusOr<Buffer> Allocate(int64_t bytes, MemoryResource& memory = CpuMemory(),
                                         absl::string_view name = "Buffer");
  ~Buffer() { Reset(); }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

  template <typename T>
  absl::Span<T> span() const {
    return {reinterpret_cast<T*>(data_), static_cast<size_t>(bytes_) / sizeof(T)};
  }

 private:
  void Reset();

  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  MemoryResource* memory_ = nullptr;
};

}  // namespace moe

#endif  // MOE_KERNELS_BASE_BUFFER_H_
