// The device memory of the fake CUDA runtime: memory of the host that the host may not touch.
#ifndef MOE_TESTS_CUSIM_FAKE_MEMORY_H_
#define MOE_TESTS_CUSIM_FAKE_MEMORY_H_

#include <cstddef>
#include <cstdint>

namespace cusim {

// `bytes` bytes of the device, all bits set (NaN as floats), 256-byte aligned, nothing owned after
// the last one; nullptr if the device has less left. Not zeroed, as CUDA's is not.
void* AllocateDevice(int device, size_t bytes);
// Fills the memory with NaN and keeps it from being used again for a while. Misuse unless it is
// alive.
void FreeDevice(const char* function, void* data);

// The device whose memory `data` lies in, -1 for memory of the host.
int DeviceOfMemory(const void* data);

// Memory of the host that copies of a device reach without the CPU; nullptr if there is none.
void* AllocatePinned(size_t bytes);
void FreePinned(const char* function, void* data);
bool IsPinned(const void* data);

size_t UsedDeviceBytes(int device);
// Since the process began: a test holds it still over a step.
int64_t DeviceAllocations();

// Misuse if [data, data + bytes) touches device memory that was freed, or leaves its allocation.
// Memory of the host passes.
void CheckDeviceRange(const char* function, const void* data, size_t bytes);

// Lets `device` touch the memory of `owner`, for good.
void GrantAccess(int device, int owner);
// Misuse if `data` is memory of another device to which `device` was granted no access.
void CheckAccess(const char* function, int device, const void* data);

// Under AddressSanitizer device memory can be touched only while one of these lives, so that a host
// that reads it is found, and then only what `device` has access to. One at a time.
class DeviceAccess {
 public:
  static constexpr int kEveryDevice = -1;
  explicit DeviceAccess(int device);
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;
};

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_FAKE_MEMORY_H_
