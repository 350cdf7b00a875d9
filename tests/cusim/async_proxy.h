// Asynchronous operations of a Hopper GPU: bulk copies into shared memory, barriers that count
// their bytes, and products that read shared memory. The state, for hopper.h.
#ifndef MOE_TESTS_CUSIM_ASYNC_PROXY_H_
#define MOE_TESTS_CUSIM_ASYNC_PROXY_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>

#include "tests/cusim/intrinsics.h"

namespace cusim {

inline constexpr uint32_t kChunkBytes = 16;

// Contents of a tensor map: a tensor of 16-bit elements and three dimensions, the first one
// contiguous. Stored in the 128 bytes of a CUtensorMap.
struct TensorMap {
  uint64_t magic;  // kMagic
  const uint16_t* data;
  uint64_t size[3];    // elements
  uint64_t stride[3];  // bytes
  uint32_t box[3];     // elements

  static constexpr uint64_t kMagic = 0x70616d726f736e65;
};
static_assert(sizeof(TensorMap) <= 128);

// Position of the byte at `address` of a tile with rows of 128 bytes, whose 16-byte chunks are
// exchanged according to the address bits from bit 7 on. PTX ISA, "Swizzling modes".
inline uint32_t Swizzled(uint32_t address) {
  return address ^ ((address >> 7 & 7) << 4);
}

// cp.async.bulk.tensor.3d: the box that begins at `from`, to the shared address `to`.
struct BulkCopy {
  TensorMap map;
  int32_t from[3];
  uint32_t to;
  uint32_t bytes() const { return map.box[0] * map.box[1] * map.box[2] * 2; }
};

struct TransactionBarrier {
  uint32_t arrivals = 0;  // that a phase needs
  uint32_t pending = 0;   // arrivals that the phase still waits for
  int64_t bytes = 0;      // expected and not copied yet
  uint32_t phase = 0;
  std::deque<BulkCopy> copies = {};  // in flight
  char issue_order = 0, phase_order[2] = {};
  Site site = {};  // where Init was called
};

struct AsyncProxy {
  struct Chunk {
    uint32_t products = 0;  // in flight that read it
    uint32_t copies = 0;    // in flight that write it
  };
  std::map<uint32_t, TransactionBarrier> barriers;
  std::unordered_map<uint32_t, Chunk> chunks;  // by address
  uint64_t reads = 0;                          // chunks read by products in flight
};

// The address of `shared`, and the 16 bytes of memory at an address. Faults outside of shared
// memory.
uint32_t SharedAddress(const void* shared, Site site);
unsigned char* SharedChunk(uint32_t address, Site site);

// fence.proxy.async: makes earlier writes visible to bulk copies and products.
void FenceAsyncProxy(Site site);

// The block's position in its cluster, the number of blocks there, and a barrier of all of their
// threads that have not ended. What any of them did before happens before what any does after.
unsigned ClusterRank();
unsigned ClusterBlocks();
void ClusterBarrier(Site site);

// mbarrier.init, .arrive with .expect_tx, and .arrive in another block of the cluster, at the
// address that `barrier` has in this one.
void InitBarrier(void* barrier, uint32_t arrivals, Site site);
void ArriveAtBarrier(void* barrier, uint32_t expected_bytes, Site site);
void ArriveAtBarrierIn(unsigned block, void* barrier, Site site);

// Begins a copy that completes on `barrier`; or one to each block of the cluster whose bit is set,
// where both have the addresses that they have in this one.
void IssueCopy(const BulkCopy& copy, void* barrier, Site site, uint32_t cluster_mask = 0);

// Waits for the phase of this parity. True if it needs `copy` first: the caller makes the copy and
// calls FinishCopy. Copies happen when a thread can wait no longer, never before.
bool AwaitBarrier(void* barrier, uint32_t parity, Site site, BulkCopy& copy);
void FinishCopy(void* barrier, const BulkCopy& copy, Site site);

// A product of the calling thread's warp reads 16 bytes, until FinishRead.
void BeginRead(uint32_t address, Site site);
void FinishRead(uint32_t address, Site site);
// Called by all lanes of a warp, one after the other: whether the others have called it, too.
bool IsLastLane();
// Counts a product of the warp: all four warps of a warpgroup must reach the same number.
void CountProduct(Site site);

// Of a thread in blocks of `threads`, as __launch_bounds__(threads, 1) allows them to a kernel with
// setmaxnreg. 0: unknown, because ptxas gives blocks of up to 256 threads the largest number in any
// setmaxnreg.
constexpr int kRegisterFile = 64 << 10;  // of a multiprocessor
int RegistersAtLaunch(int threads);
// setmaxnreg
void SetRegisters(int registers, bool more, Site site);

// Storage for state of a thread between calls; initially empty.
std::shared_ptr<void>& ThreadSlot();

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_ASYNC_PROXY_H_
