// Hopper's instructions, for files compiled for sm_90a alone, each in a function of its own:
// barriers that count bytes, copies of tiles by tensor maps, and products of a warpgroup whose
// operands lie in shared memory. PTX ISA, "mbarrier", "cp.async.bulk.tensor", "wgmma".
#ifndef MOE_KERNELS_BASE_CUDA_HOPPER_H_
#define MOE_KERNELS_BASE_CUDA_HOPPER_H_

#include <cstdint>
#include <type_traits>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor.h"
#include "kernels/base/cuda_tensor_map.h"
#include "kernels/base/dtype.h"

#if !defined(__CUDACC__)
#include <cusim/hopper.h>
#endif

// The last parameter, on the simulator alone: where the kernel calls, which faults are named with.
#if defined(__CUDACC__)
#define MOE_SITE
#define MOE_AND_SITE
#else
#define MOE_SITE cusim::Site site = {__builtin_FILE(), __builtin_LINE()}
#define MOE_AND_SITE , MOE_SITE
#endif

namespace moe::cuda {

constexpr int kWarpgroupThreads = 128;
constexpr int kProductDepth = 16;  // of one product of a warpgroup
constexpr int kProductRows = 64;

// A barrier in shared memory. A phase ends when `arrivals` threads have arrived and the bytes that
// they expect were copied; phases have parity 0, 1, 0, ... What threads did before they arrived
// happens before what follows a wait for that phase.
class TransactionBarrier {
 public:
  // By one thread; FenceAsyncProxy() and a barrier of the block come before its first use.
  __device__ void Init(uint32_t arrivals MOE_AND_SITE) {
#if defined(__CUDACC__)
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(SharedAddress(this)), "r"(arrivals)
                 : "memory");
#else
    word_ = arrivals;
    cusim::InitBarrier(this, arrivals, site);
#endif
  }

  __device__ void Arrive(MOE_SITE) {
#if defined(__CUDACC__)
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(SharedAddress(this)) : "memory");
#else
    cusim::ArriveAtBarrier(this, 0, site);
#endif
  }

  // The phase waits for `bytes` more of CopyTile.
  __device__ void ArriveExpecting(uint32_t bytes MOE_AND_SITE) {
#if defined(__CUDACC__)
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(SharedAddress(this)),
                 "r"(bytes)
                 : "memory");
#else
    cusim::ArriveAtBarrier(this, bytes, site);
#endif
  }

  // Waits for the end of the phase of this parity. Before the first phase, that of parity 1 counts
  // as ended.
  __device__ void Wait(uint32_t parity MOE_AND_SITE) {
#if defined(__CUDACC__)
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(SharedAddress(this)),
        "r"(parity)
        : "memory");
#else
    cusim::WaitAtBarrier(this, parity, site);
#endif
  }

 private:
  uint64_t word_;
};

// What threads wrote to shared memory before is what copies and products find that begin later.
__device__ inline void FenceAsyncProxy(MOE_SITE) {
#if defined(__CUDACC__)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  cusim::FenceAsyncProxy(site);
#endif
}

// One thread begins the copy of a box of the tensor, from element (x, y, z) on, to shared memory, a
// multiple of 128 bytes (of 8 swizzled rows where a product reads it); `barrier` counts its bytes,
// also those beyond the tensor, which become zeros. `map` lies in the kernel's parameters.
__device__ inline void CopyTile(const TensorMap& map, int x, int y, int z, void* shared,
                                TransactionBarrier& barrier MOE_AND_SITE) {
#if defined(__CUDACC__)
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(SharedAddress(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(SharedAddress(&barrier))
      : "memory");
#else
  cusim::IssueCopy({.map = *reinterpret_cast<const cusim::TensorMap*>(&map),
                    .from = {x, y, z},
                    .to = cusim::SharedAddress(shared, site)},
                   &barrier, site);
#endif
}

// Registers of a thread from now on: a warpgroup gives back what another one takes. Multiples of 8
// from 24 to 256; each warpgroup's role is one branch of the kernel, whose threads are bounded by
// __launch_bounds__(threads, 1).
template <int kRegisters>
__device__ inline void GiveRegistersBack(MOE_SITE) {
#if defined(__CUDACC__)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#else
  cusim::SetRegisters(kRegisters, false, site);
#endif
}
template <int kRegisters>
__device__ inline void TakeRegisters(MOE_SITE) {
#if defined(__CUDACC__)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#else
  cusim::SetRegisters(kRegisters, true, site);
#endif
}

// Which index of an operand is contiguous in shared memory: K's, or the row's (M or N).
enum class Major { kDepth, kRow };

// Where an operand of 16-bit elements lies. Rows of the swizzle's width (`span` bytes; without one
// 16) make blocks of eight, 8 * span bytes each.
//   kDepth  a block: 8 rows of span / 2 elements of K. Next rows: `stride_bytes` on. Without a
//           swizzle the next 8 of K: `leading_bytes` on.
//   kRow    a block: 8 of K, each with span / 2 neighbouring rows. Swizzled: the next 8 of K
//           `stride_bytes`, the next rows `leading_bytes` on. Without a swizzle the reverse.
// Swizzled tiles begin at a multiple of 8 * span bytes; in K a kDepth operand may begin within.
struct OperandPlace {
  Swizzle swizzle;
  uint32_t leading_bytes, stride_bytes;
};
__device__ inline uint64_t OperandAt(const void* shared, OperandPlace place MOE_AND_SITE) {
#if defined(__CUDACC__)
  const uint32_t address = SharedAddress(shared);
#else
  const uint32_t address = cusim::SharedAddress(shared, site);
#endif
  const auto field = [](uint32_t bytes, int bit) {
    return uint64_t{(bytes & 0x3ffff) >> 4} << bit;
  };
  return field(address, 0) | field(place.leading_bytes, 16) | field(place.stride_bytes, 32) |
         static_cast<uint64_t>(place.swizzle) << 62;
}

// What other code does with sums stays on its side of this: to the compiler they are but registers.
template <int kSums>
__device__ __forceinline__ void KeepSums([[maybe_unused]] float (&sums)[kSums]) {
#if defined(__CUDACC__)
  MOE_UNROLL
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}

// Before the first product of `sums` that other code has written.
template <int kSums>
__device__ __forceinline__ void FenceSums(float (&sums)[kSums]) {
  KeepSums(sums);
#if defined(__CUDACC__)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  cusim::Products::OfThread().Fence();
#endif
}

// The products since the last call are a group.
__device__ inline void CommitProducts() {
#if defined(__CUDACC__)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  cusim::Products::OfThread().Commit();
#endif
}

// All but the last kPending groups have ended: their operands may be overwritten, and if none is
// left, `sums` may be read.
template <int kPending, int kSums>
__device__ __forceinline__ void WaitForProducts(float (&sums)[kSums] MOE_AND_SITE) {
#if defined(__CUDACC__)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#else
  cusim::Products::OfThread().Wait(kPending, site);
#endif
  KeepSums(sums);
}

#if defined(__CUDACC__)
#define MOE_SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOE_SUM_REGISTERS_8 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MOE_SUMS_16 \
  MOE_SUMS_8        \
  ", "              \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define MOE_SUM_REGISTERS_16                                                                       \
  MOE_SUM_REGISTERS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
      "+f"(d[14]), "+f"(d[15])
#define MOE_SUMS_32 \
  MOE_SUMS_16       \
  ", "              \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOE_SUM_REGISTERS_32                                                                     \
  MOE_SUM_REGISTERS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),         \
      "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
      "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define MOE_SUMS_64                                                             \
  MOE_SUMS_32                                                                   \
  ", "                                                                          \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
#define MOE_SUM_REGISTERS_64                                                                     \
  MOE_SUM_REGISTERS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),         \
      "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), \
      "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), \
      "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), \
      "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define MOE_SUMS_96                                                             \
  MOE_SUMS_64                                                                   \
  ", "                                                                          \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, " \
  "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, " \
  "%94, %95"
#define MOE_SUM_REGISTERS_96                                                                     \
  MOE_SUM_REGISTERS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]),         \
      "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), \
      "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), \
      "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), \
      "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define MOE_SUMS_128                                                               \
  MOE_SUMS_96                                                                      \
  ", "                                                                             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, "     \
  "%109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, " \
  "%122, %123, %124, %125, %126, %127"
#define MOE_SUM_REGISTERS_128                                                             \
  MOE_SUM_REGISTERS_96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), \
      "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), \
      "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), \
      "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), \
      "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), \
      "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define MOE_WGMMA_OF(type, n, sums, a_at, b_at, add_at, a_major, b_major, ...)                \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_at                                 \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" sums \
               "}, " a_at ", " b_at ", add, 1, 1, " a_major ", " b_major ";\n}"               \
               : __VA_ARGS__                                                                  \
               : "l"(a), "l"(b), "r"(add), "n"(kMajorA == Major::kRow),                       \
                 "n"(kMajorB == Major::kRow))
#define MOE_WGMMA(...)                         \
  if constexpr (std::is_same_v<T, BFloat16>) { \
    MOE_WGMMA_OF("bf16", __VA_ARGS__);         \
  } else {                                     \
    MOE_WGMMA_OF("f16", __VA_ARGS__);          \
  }
#endif

// By the four warps of a warpgroup: d (64 x kColumns, float32) = a (64 x 16) * b (16 x kColumns),
// or += if `add_to`; T: BFloat16 or Float16. d[4j + 2h + c] is row 16 (warp % 4) + lane / 4 + 8h
// and column 8j + 2 (lane % 4) + c. Until WaitForProducts nobody touches d or writes the operands.
// Products are exact. In which order the 17 terms are added, and how sums are rounded, is the
// hardware's.
template <typename T, int kColumns, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void AddProduct(float (&d)[kColumns / 2], uint64_t a, uint64_t b,
                                           bool add_to MOE_AND_SITE) {
#if defined(__CUDACC__)
  const int add = add_to ? 1 : 0;
  if constexpr (kColumns == 16) {
    MOE_WGMMA("16", MOE_SUMS_8, "%8", "%9", "%10", "%11", "%12", MOE_SUM_REGISTERS_8);
  } else if constexpr (kColumns == 32) {
    MOE_WGMMA("32", MOE_SUMS_16, "%16", "%17", "%18", "%19", "%20", MOE_SUM_REGISTERS_16);
  } else if constexpr (kColumns == 64) {
    MOE_WGMMA("64", MOE_SUMS_32, "%32", "%33", "%34", "%35", "%36", MOE_SUM_REGISTERS_32);
  } else if constexpr (kColumns == 128) {
    MOE_WGMMA("128", MOE_SUMS_64, "%64", "%65", "%66", "%67", "%68", MOE_SUM_REGISTERS_64);
  } else if constexpr (kColumns == 192) {
    MOE_WGMMA("192", MOE_SUMS_96, "%96", "%97", "%98", "%99", "%100", MOE_SUM_REGISTERS_96);
  } else if constexpr (kColumns == 256) {
    MOE_WGMMA("256", MOE_SUMS_128, "%128", "%129", "%130", "%131", "%132", MOE_SUM_REGISTERS_128);
  } else {
    static_assert(kColumns == 16, "columns of a product");
  }
#else
  cusim::Products::OfThread().Issue(
      d, {a, kMajorA == Major::kRow, kProductRows}, {b, kMajorB == Major::kRow, kColumns}, add_to,
      [](uint16_t bits) { return static_cast<float>(__builtin_bit_cast(T, bits)); }, site);
#endif
}
#if defined(__CUDACC__)
#undef MOE_SUMS_8
#undef MOE_SUM_REGISTERS_8
#undef MOE_SUMS_16
#undef MOE_SUM_REGISTERS_16
#undef MOE_SUMS_32
#undef MOE_SUM_REGISTERS_32
#undef MOE_SUMS_64
#undef MOE_SUM_REGISTERS_64
#undef MOE_SUMS_96
#undef MOE_SUM_REGISTERS_96
#undef MOE_SUMS_128
#undef MOE_SUM_REGISTERS_128
#undef MOE_WGMMA
#undef MOE_WGMMA_OF
#endif
#undef MOE_SITE
#undef MOE_AND_SITE

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_HOPPER_H_
