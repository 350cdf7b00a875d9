// CUDA's device-side names, for kernel sources compiled by the host compiler. Included by
// kernels/base/cuda_kernel.h in place of nvcc's built-in names; extended when a kernel needs more.
//
// Every operation that waits takes the file and line of its call, which fault messages name.
#ifndef MOE_TESTS_CUSIM_DEVICE_H_
#define MOE_TESTS_CUSIM_DEVICE_H_

#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include <vector_functions.h>

#include <cuda_runtime_api.h>

#include "tests/cusim/cusim.h"
#include "tests/cusim/intrinsics.h"

// In a kernel it would be a plain local variable: MOE_SHARED_ARRAY works for both compilers.
#undef __shared__
#undef __launch_bounds__
#define __launch_bounds__(...)  // NOLINT(bugprone-reserved-identifier): the name is CUDA's
#undef __grid_constant__
#define __grid_constant__  // NOLINT(bugprone-reserved-identifier)

namespace cusim {

template <uint3 (*kIndex)()>
struct Index {
  struct X {
    operator unsigned() const { return kIndex().x; }  // NOLINT(google-explicit-constructor)
  };
  struct Y {
    operator unsigned() const { return kIndex().y; }  // NOLINT(google-explicit-constructor)
  };
  struct Z {
    operator unsigned() const { return kIndex().z; }  // NOLINT(google-explicit-constructor)
  };
  X x;
  Y y;
  Z z;
};

template <typename T>
LaneValue Pack(T value) {
  static_assert(sizeof(T) <= sizeof(LaneValue) && std::is_trivially_copyable_v<T>);
  LaneValue packed = {};
  std::memcpy(&packed, &value, sizeof(T));
  return packed;
}

template <typename T>
T Unpack(const LaneValue& packed) {
  T value;
  std::memcpy(&value, &packed, sizeof(T));
  return value;
}

// The value of lane `from`, for all shuffles. If `from` is outside [0, 32) or not in the mask, the
// value is undefined on a GPU; here it is a fault.
template <typename T>
T Shuffle(const WarpOperation& operation, T value, int from) {
  const auto values = MeetInWarp(operation, Pack(value));
  if (from < 0 || from > 31 || (operation.mask >> from & 1) == 0) {
    KernelFault("wrong warp mask", "a shuffle reads a lane that its mask does not name",
                operation.site);
  }
  return Unpack<T>(values[from]);
}

// The value of the mask's lanes that is better than all others.
template <typename Better>
uint32_t Reduce(const WarpOperation& operation, uint32_t value, Better better) {
  const auto values = MeetInWarp(operation, {value});
  uint64_t best = value;
  for (int i = 0; i < 32; ++i) {
    if ((operation.mask >> i & 1) != 0 && better(values[i][0], best)) best = values[i][0];
  }
  return static_cast<uint32_t>(best);
}

}  // namespace cusim

// NOLINTBEGIN: these names are CUDA's.
inline constexpr cusim::Index<cusim::ThreadIndex> threadIdx = {};
inline constexpr cusim::Index<cusim::BlockIndex> blockIdx = {};
inline constexpr cusim::Index<cusim::BlockDim> blockDim = {};
inline constexpr cusim::Index<cusim::GridDim> gridDim = {};

#define CUSIM_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CUSIM_SITE) {
  cusim::Barrier({file, line});
}

inline void __syncwarp(uint32_t mask = 0xffffffffu, CUSIM_SITE) {
  cusim::MeetInWarp({"__syncwarp", mask, true, {file, line}}, {});
}

// A warp is divided into sections of `width` lanes; shuffles stay inside their section, and a lane
// whose source would be outside receives its own value.
template <typename T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32, CUSIM_SITE) {
  const int section = cusim::Lane() & ~(width - 1);
  return cusim::Shuffle({"__shfl_sync", mask, false, {file, line}}, value,
                        section | (source & (width - 1)));
}

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32, CUSIM_SITE) {
  const int lane = cusim::Lane(), from = lane ^ lane_mask;
  const bool same_section = (from & ~(width - 1)) == (lane & ~(width - 1));
  return cusim::Shuffle({"__shfl_xor_sync", mask, false, {file, line}}, value,
                        same_section ? from : lane);
}

template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32, CUSIM_SITE) {
  const int lane = cusim::Lane(), from = lane - static_cast<int>(delta);
  return cusim::Shuffle({"__shfl_up_sync", mask, false, {file, line}}, value,
                        from >= (lane & ~(width - 1)) ? from : lane);
}

template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32, CUSIM_SITE) {
  const int lane = cusim::Lane(), from = lane + static_cast<int>(delta);
  return cusim::Shuffle({"__shfl_down_sync", mask, false, {file, line}}, value,
                        from <= (lane | (width - 1)) ? from : lane);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, CUSIM_SITE) {
  const auto values =
      cusim::MeetInWarp({"__ballot_sync", mask, false, {file, line}}, {predicate != 0});
  uint32_t ballot = 0;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) != 0) ballot |= static_cast<uint32_t>(values[i][0]) << i;
  }
  return ballot;
}

template <typename T>
uint32_t __match_any_sync(uint32_t mask, T value, CUSIM_SITE) {
  const cusim::LaneValue mine = cusim::Pack(value);
  const auto values = cusim::MeetInWarp({"__match_any_sync", mask, false, {file, line}}, mine);
  uint32_t same = 0;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) != 0 && values[i] == mine) same |= 1u << i;
  }
  return same;
}

inline int __reduce_add_sync(uint32_t mask, int value, CUSIM_SITE) {
  const auto values = cusim::MeetInWarp({"__reduce_add_sync", mask, false, {file, line}},
                                        {static_cast<uint64_t>(value)});
  int sum = 0;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) != 0) sum += static_cast<int>(values[i][0]);
  }
  return sum;
}

inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value, CUSIM_SITE) {
  return cusim::Reduce({"__reduce_max_sync", mask, false, {file, line}}, value,
                       std::greater<uint64_t>());
}

inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t value, CUSIM_SITE) {
  return cusim::Reduce({"__reduce_min_sync", mask, false, {file, line}}, value,
                       std::less<uint64_t>());
}

template <typename T>
T atomicAdd(T* address, T value) {
  static_assert(std::is_integral_v<T>, "sums of floats by atomics have no fixed order");
  cusim::MaybePreempt();
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline int __popc(uint32_t x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
// NOLINTEND

#undef CUSIM_SITE

#endif  // MOE_TESTS_CUSIM_DEVICE_H_
