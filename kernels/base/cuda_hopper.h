// Hopper's instructions, for files compiled for sm_90a alone, each in a function of its own:
// barriers that count bytes, copies of tiles by tensor maps, and warpgroup products with operands
// in shared memory. PTX ISA, "mbarrier", "cp.async.bulk.tensor", "wgmma". libcu++ (cuda::ptx) has
// the instructions but those of registers and products.
#ifndef MOE_KERNELS_BASE_CUDA_HOPPER_H_
#define MOE_KERNELS_BASE_CUDA_HOPPER_H_

#include <cstdint>
#include <type_traits>

#include <cuda/atomic>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_tensor.h"
#include "kernels/base/cuda_tensor_map.h"
#include "kernels/base/dtype.h"

#if defined(__CUDACC__)
#include <cuda/ptx>
#else
#include <cusim/hopper.h>
#endif

// The last parameter on the simulator alone: the call site, which fault messages name.
#if defined(__CUDACC__)
#define MOE_SITE
#define MOE_AND_SITE
#else
#define MOE_SITE cusim::Site site = {__builtin_FILE(), __builtin_LINE()}
#define MOE_AND_SITE , MOE_SITE
#endif

namespace moe::cuda {

#if defined(__CUDACC__)
namespace ptx = ::cuda::ptx;
#endif

constexpr int kWarpgroupThreads = 128;
constexpr int kProductDepth = 16;  // depth of one warpgroup product
constexpr int kProductRows = 64;

// A barrier in shared memory. A phase ends when `arrivals` threads have arrived and the bytes that
// they expect were copied; phases have parity 0, 1, 0, ... Whatever a thread did before it arrived
// happens before whatever follows a wait for that phase.
class TransactionBarrier {
 public:
  // Called by one thread; FenceAsyncProxy() and a barrier of the block precede its first use.
  __device__ void Init(uint32_t arrivals MOE_AND_SITE) {
#if defined(__CUDACC__)
    ptx::mbarrier_init(&word_, arrivals);
#else
    word_ = arrivals;
    cusim::InitBarrier(this, arrivals, site);
#endif
  }

  __device__ void Arrive(MOE_SITE) {
#if defined(__CUDACC__)
    (void)ptx::mbarrier_arrive(&word_);
#else
    cusim::ArriveAtBarrier(this, 0, site);
#endif
  }

  // Arrives at this barrier, or at the one in the same place of another block of the cluster.
  __device__ void ArriveIn(unsigned block MOE_AND_SITE) {
#if defined(__CUDACC__)
    // cuda::ptx would release to the cluster, which ptxas makes a fence of the GPU. An arrival says
    // that operands were read; the other block sees no writes through it.
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(SharedAddress(this)),
        "r"(block)
        : "memory");
#else
    cusim::ArriveAtBarrierIn(block, this, site);
#endif
  }

  // Arrives; the phase also waits for `bytes` more bytes of CopyTile.
  __device__ void ArriveExpecting(uint32_t bytes MOE_AND_SITE) {
#if defined(__CUDACC__)
    (void)ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                         &word_, bytes);
#else
    cusim::ArriveAtBarrier(this, bytes, site);
#endif
  }

  // Waits for the end of the phase of this parity. Before the first phase, that of parity 1 counts
  // as ended.
  __device__ void Wait(uint32_t parity MOE_AND_SITE) {
#if defined(__CUDACC__)
    while (!ptx::mbarrier_try_wait_parity(&word_, parity)) {
    }
#else
    cusim::WaitAtBarrier(this, parity, site);
#endif
  }

  // What instructions take for the barrier.
  __device__ uint64_t* word() {
    return &word_;
  }

 private:
  uint64_t word_;
};

// Makes the thread's earlier writes to shared memory visible to copies and products that begin
// later.
__device__ inline void FenceAsyncProxy(MOE_SITE) {
#if defined(__CUDACC__)
  ptx::fence_proxy_async(ptx::space_shared);
#else
  cusim::FenceAsyncProxy(site);
#endif
}

// Called by one thread. Begins the copy of a box of the tensor, from element (x, y, z) on, to
// shared memory, at a multiple of kTileRowBytes (of 8 rows where a product reads it).
// `barrier` counts its bytes, including those outside the tensor, which become zeros. `map` is a
// parameter of the kernel.
__device__ inline void CopyTile(const TensorMap& map, int x, int y, int z, void* shared,
                                TransactionBarrier& barrier MOE_AND_SITE) {
#if defined(__CUDACC__)
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, shared, &map, {x, y, z},
                            barrier.word());
#else
  cusim::IssueCopy({.map = *reinterpret_cast<const cusim::TensorMap*>(&map),
                    .from = {x, y, z},
                    .to = cusim::SharedAddress(shared, site)},
                   &barrier, site);
#endif
}

// The block's position in its cluster, whose blocks run at the same time and reach each other's
// shared memory. Without a cluster 0.
__device__ inline unsigned ClusterRank() {
#if defined(__CUDACC__)
  return ptx::get_sreg_cluster_ctarank();
#else
  return cusim::ClusterRank();
#endif
}

// Waits for all threads of the cluster, or of a block without one. Precedes the first signal to a
// barrier of another block, and the end of a block that others signal.
__device__ inline void ClusterBarrier(MOE_SITE) {
#if defined(__CUDACC__)
  ptx::barrier_cluster_arrive(ptx::sem_release);
  ptx::barrier_cluster_wait(ptx::sem_acquire);
#else
  cusim::ClusterBarrier(site);
#endif
}

// Waits until `value`, which another block of the cluster raises, is above `last`.
__device__ inline unsigned AwaitAbove(unsigned last, unsigned& value) {
  const ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device> now(value);
  for (;;) {
    const unsigned read = now.load(::cuda::memory_order_relaxed);
    if (read > last) return read;
#if !defined(__CUDACC__)
    cusim::MaybePreempt();
#endif
  }
}

// In place of FenceAsyncProxy() where other blocks of the cluster signal the barriers.
__device__ inline void FenceBarriersOfCluster(MOE_SITE) {
#if defined(__CUDACC__)
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  ptx::fence_proxy_async(ptx::space_shared);
#else
  cusim::FenceAsyncProxy(site);
#endif
}

// CopyTile to the same place of all `blocks` blocks of the cluster, in each of which the barrier in
// the same place counts all bytes.
__device__ inline void CopyTileToCluster(const TensorMap& map, int x, int y, int z, void* shared,
                                         TransactionBarrier& barrier,
                                         unsigned blocks MOE_AND_SITE) {
  if (blocks == 1) {
    CopyTile(map, x, y, z, shared, barrier);
    return;
  }
  const auto mask = static_cast<uint16_t>((1u << blocks) - 1);
#if defined(__CUDACC__)
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, shared, &map, {x, y, z},
                            barrier.word(), mask);
#else
  cusim::IssueCopy({.map = *reinterpret_cast<const cusim::TensorMap*>(&map),
                    .from = {x, y, z},
                    .to = cusim::SharedAddress(shared, site)},
                   &barrier, site, mask);
#endif
}

// Sets the number of registers of a thread: a warpgroup gives back what another one takes.
// Multiples of 8 from 24 to 256; each warpgroup's role is one branch of the kernel, which is
// bounded by __launch_bounds__(threads, 1).
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

// The index of an operand that is contiguous in shared memory: K, or the row (M or N).
enum class Major { kDepth, kRow };

// Describes an operand of 16-bit elements in tiles that CopyTile has made, of blocks of eight rows:
//   kDepth  a block: 8 rows, each with 64 of K. The next rows follow.
//   kRow    a block: 8 of K, each with 64 neighbouring rows. The next 8 of K follow; the next rows
//           are `next_rows_bytes` away.
// Tiles begin at a multiple of a block; in K a kDepth operand may begin inside one.
__device__ inline uint64_t OperandAt(const void* shared, uint32_t next_rows_bytes MOE_AND_SITE) {
#if defined(__CUDACC__)
  const uint32_t address = SharedAddress(shared);
#else
  const uint32_t address = cusim::SharedAddress(shared, site);
#endif
  const auto field = [](uint32_t bytes, int bit) {
    return uint64_t{(bytes & 0x3ffff) >> 4} << bit;
  };
  constexpr uint64_t kSwizzleOf128Bytes = 1;
  return field(address, 0) | field(next_rows_bytes, 16) | field(8 * kTileRowBytes, 32) |
         kSwizzleOf128Bytes << 62;
}

// Keeps the compiler from moving other accesses to the sums across this point: it sees products
// only as opaque register operands.
template <int kSums>
__device__ __forceinline__ void KeepSums([[maybe_unused]] float (&sums)[kSums]) {
#if defined(__CUDACC__)
  MOE_UNROLL
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}

// Precedes the first product whose `sums` other code has written.
template <int kSums>
__device__ __forceinline__ void FenceSums(float (&sums)[kSums]) {
  KeepSums(sums);
#if defined(__CUDACC__)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  cusim::Products::OfThread().Fence();
#endif
}

// Closes a group: the products since the last call.
__device__ inline void CommitProducts() {
#if defined(__CUDACC__)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  cusim::Products::OfThread().Commit();
#endif
}

// Waits until all but the last kPending groups have ended: their operands may then be overwritten,
// and if none is pending, `sums` may be read.
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
#define MOE_SUMS_16 MOE_SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MOE_SUMS_32 \
  MOE_SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOE_SUMS_64                                                                    \
  MOE_SUMS_32                                                                          \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOE_SUMS_96                                                                    \
  MOE_SUMS_64                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MOE_SUMS_128                                                                     \
  MOE_SUMS_96                                                                            \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "   \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"
#define MOE_SUM_REGISTERS(i)                                                                  \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define MOE_SUM_REGISTERS_8 MOE_SUM_REGISTERS(0)
#define MOE_SUM_REGISTERS_16 MOE_SUM_REGISTERS_8, MOE_SUM_REGISTERS(8)
#define MOE_SUM_REGISTERS_32 MOE_SUM_REGISTERS_16, MOE_SUM_REGISTERS(16), MOE_SUM_REGISTERS(24)
#define MOE_SUM_REGISTERS_64                                                                 \
  MOE_SUM_REGISTERS_32, MOE_SUM_REGISTERS(32), MOE_SUM_REGISTERS(40), MOE_SUM_REGISTERS(48), \
      MOE_SUM_REGISTERS(56)
#define MOE_SUM_REGISTERS_96                                                                 \
  MOE_SUM_REGISTERS_64, MOE_SUM_REGISTERS(64), MOE_SUM_REGISTERS(72), MOE_SUM_REGISTERS(80), \
      MOE_SUM_REGISTERS(88)
#define MOE_SUM_REGISTERS_128                                                                  \
  MOE_SUM_REGISTERS_96, MOE_SUM_REGISTERS(96), MOE_SUM_REGISTERS(104), MOE_SUM_REGISTERS(112), \
      MOE_SUM_REGISTERS(120)
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

// Called by the four warps of a warpgroup: d (64 x kColumns, float32) = a (64 x 16) * b (16 x
// kColumns), or += if `add_to`; T: BFloat16 or Float16. d[4j + 2h + c] is row
// 16 (warp % 4) + lane / 4 + 8h and column 8j + 2 (lane % 4) + c. Until WaitForProducts nothing may
// touch d or write the operands. Products are exact; the hardware determines in which order the 17
// terms are added and how sums are rounded.
template <typename T, int kColumns, Major kMajorA, Major kMajorB = Major::kDepth>
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

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_HOPPER_H_
