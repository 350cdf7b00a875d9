// Requests of a running CUDA thread to the simulator; device.h maps CUDA's names to them.
#ifndef MOE_TESTS_CUSIM_INTRINSICS_H_
#define MOE_TESTS_CUSIM_INTRINSICS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace cusim {

// A location in the kernel's source.
struct Site {
  const char* file = "";
  int line = 0;
  bool operator==(const Site&) const = default;
};

uint3 ThreadIndex();
uint3 BlockIndex();
uint3 BlockDim();
uint3 GridDim();
int Lane();

// Waits for all threads of the block that have not ended; they must wait at the same site. What any
// of them did before happens before what any does after.
void Barrier(Site site);

// The value that a lane passes to the others of its warp: large enough for the fragments of a
// matrix product.
using LaneValue = std::array<uint64_t, 4>;

// Waits until all lanes of `mask` are in the same operation with the same mask, then returns every
// lane's value. Values are passed as if in registers: only `orders_memory` (__syncwarp) orders
// memory, as in CUDA.
struct WarpOperation {
  const char* name;
  uint32_t mask;
  bool orders_memory = false;
  Site site;
};
std::array<LaneValue, 32> MeetInWarp(const WarpOperation& operation, const LaneValue& value);

// Precedes an atomic operation: another thread may run first.
void MaybePreempt();

// Shared memory of the running block; `site` identifies the array.
void* StaticShared(const void* site, size_t bytes);
void* DynamicShared();

// Names the memory if it is shared by the running block or a local variable of the running thread;
// otherwise nullptr.
const char* OtherThanGlobal(const void* memory);

// Reports a fault of the kernel that was found outside the engine (a misaligned vector access).
[[noreturn]] void KernelFault(const char* fault, const char* detail, Site site);

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_INTRINSICS_H_
