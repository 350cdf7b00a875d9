// The device memory of the fake CUDA runtime: host memory that the host must not access.
#ifndef MOE_TESTS_CUSIM_FAKE_MEMORY_H_
#define MOE_TESTS_CUSIM_FAKE_MEMORY_H_

#include <cstddef>
#include <cstdint>

namespace cusim {

// `bytes` bytes of the device, all bits set (NaN as floats), 256-byte aligned, without padding at
// the end; nullptr if the device has less left. Not zeroed, like CUDA's.
void* AllocateDevice(int device, size_t bytes);
// Fills the memory with NaN and delays its reuse. Misuse unless it is allocated.
void FreeDevice(const char* function, void* data);

// The device that owns the memory at `data`, -1 for host memory.
int DeviceOfMemory(const void* data);

// Pinned host memory; nullptr if there is none.
void* AllocatePinned(size_t bytes);
void FreePinned(const char* function, void* data);
bool IsPinned(const void* data);

size_t UsedDeviceBytes(int device);
// Number of allocations since the process began: a test asserts that a step adds none.
int64_t DeviceAllocations();

// Misuse if [data, data + bytes) is in device memory that was freed, or extends beyond its
// allocation. Host memory is allowed.
void CheckDeviceRange(const char* function, const void* data, size_t bytes);

// Gives `device` access to the memory of `owner`, permanently.
void GrantAccess(int device, int owner);
// Misuse if `data` is memory of another device to which `device` has no access.
void CheckAccess(const char* function, int device, const void* data);

// Under AddressSanitizer device memory is accessible only while one of these objects lives, and
// then only the memory that `device` has access to, so that reads by the host are found. One at a
// time.
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
