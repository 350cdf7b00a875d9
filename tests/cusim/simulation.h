// The state of a run: blocks, warps, threads, and the scheduler. Internal to the simulator.
#ifndef MOE_TESTS_CUSIM_SIMULATION_H_
#define MOE_TESTS_CUSIM_SIMULATION_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/cusim/async_proxy.h"
#include "tests/cusim/cusim.h"
#include "tests/cusim/fiber.h"
#include "tests/cusim/intrinsics.h"

namespace cusim {

// The shared memory of one block. Every array is between two red zones. Under AddressSanitizer they
// are poisoned, so that it names the line of a read or write there; without it a write is found
// when the block ends. Arrays start out as bytes 0xff (floats: NaN, integers: -1), which exposes
// use before the first write.
//
// Every array has an address in a window of 32 bits, by which kernels identify shared memory to the
// async proxy, and a copy of its bytes as the async proxy sees them: those that it wrote itself,
// and those that other accesses wrote before a fence.
class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // The array of the declaration `site`: allocated the first time, the same one afterwards.
  void* Get(const void* site, size_t bytes);
  // Bytes of all arrays. Dynamic memory follows the others, at a multiple of its alignment.
  size_t bytes() const;
  // The array with a damaged red zone, or -1.
  int FindOverrun() const;

  // -1 for memory outside of this block's arrays.
  int64_t AddressOf(const void* memory) const;
  // `bytes` bytes at an address, and as the async proxy sees them. nullptr outside of arrays.
  unsigned char* At(uint32_t address, size_t bytes) const;
  unsigned char* SeenAt(uint32_t address, size_t bytes);
  // visit(address, memory, seen, bytes) for every 16 bytes that the async proxy sees differently.
  template <typename Visit>
  void ForUnseen(Visit visit) {
    for (const Array& array : arrays_) {
      for (size_t at = 0; at < array.bytes; at += kChunkBytes) {
        const size_t bytes = std::min<size_t>(kChunkBytes, array.bytes - at);
        const uint32_t address = array.address + static_cast<uint32_t>(at);
        unsigned char* const memory = array.memory + kRedZoneBytes + at;
        unsigned char* const seen = SeenAt(address, bytes);
        if (std::memcmp(memory, seen, bytes) != 0) visit(address, memory, seen, bytes);
      }
    }
  }

  static constexpr size_t kAlignment = 128, kDynamicAlignment = 1024;

 private:
  static constexpr size_t kRedZoneBytes = 256;
  struct Array {
    const void* site;
    size_t bytes;
    unsigned char* memory;  // red zone, array, red zone
    uint32_t address;
    std::vector<unsigned char> seen = {};  // by the async proxy; allocated on first use
  };
  // The array that contains [address, address + bytes), or nullptr.
  const Array* Find(uint32_t address, size_t bytes) const;

  std::vector<Array> arrays_;
  uint32_t next_address_ = 1024;  // below are a Hopper GPU's own bytes
};

struct Block;
struct Cluster;

enum class State : uint8_t {
  kReady,
  kAtBarrier,
  kAtClusterBarrier,
  kAtTransactionBarrier,
  kInWarp,
  kDone
};

// One CUDA thread.
struct Thread {
  Block* block = nullptr;
  Fiber* fiber = nullptr;
  uint3 index = {};
  int warp = 0, lane = 0;
  State state = State::kReady;
  Site site;                   // barrier or warp operation where it waits
  uint32_t barrier = 0;        // transaction barrier where it waits
  uint32_t parity = 0;         // phase of that barrier
  std::shared_ptr<void> slot;  // ThreadSlot()
};

// Lanes of one warp that wait for each other in one warp operation.
struct Meeting {
  const char* operation = nullptr;
  uint32_t mask = 0;
  uint32_t arrived = 0;
  uint32_t unread = 0;  // lanes that have not read the others' values yet
  Site site;            // where the first lane arrived
  std::array<LaneValue, 32> values = {};
  char order = 0;  // __syncwarp: the happens-before edge for ThreadSanitizer
};

struct Warp {
  uint32_t lanes = 0;  // lanes with a thread of the block
  uint32_t exited = 0;
  uint64_t products = 0;         // number of warpgroup products
  uint32_t lanes_done = 0;       // calls of IsLastLane
  int registers = 0;             // per thread, from the last setmaxnreg
  std::deque<Meeting> meetings;  // open, or not yet read by all; others are reused
};

struct Block {
  const Grid* grid = nullptr;
  Cluster* cluster = nullptr;
  unsigned rank = 0;  // in the cluster
  // Barriers that the cluster had passed at the last signal of another block, and at the end.
  int signalled_after = -1, ended_after = 0;
  uint3 index = {};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  int alive = 0, at_barrier = 0;
  // Barriers alternate between two edges: with one, a thread that is late to leave a barrier would
  // seem ordered after later actions of others.
  int barriers_passed = 0;
  char barrier_order[2] = {};
  SharedMemory shared;
  AsyncProxy async;
};

// Blocks that run at the same time. One that has ended is kept until all have.
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  int at_barrier = 0, barriers_passed = 0;
  char barrier_order[2] = {};  // as in a block

  int alive() const {
    int threads = 0;
    for (const auto& block : blocks) threads += block->alive;
    return threads;
  }
};

class Simulation {
 public:
  void Run(const Grid& grid, const Options& options);
  uint64_t schedule_hash() const { return schedule_hash_; }

  size_t most_shared_bytes() const { return most_shared_bytes_; }

  Thread& current() { return *current_; }
  void SwitchToHost() { Fiber::SwitchToHost(); }
  void MakeReady(Thread& thread);
  bool RollsPreemption();
  // Prints the fault, blaming `thread`, and aborts.
  [[noreturn]] void Fail(const char* fault, const std::string& detail, const Thread& thread);

 private:
  static void ThreadBody();
  void Exit(Thread& thread);
  void StartCluster(uint64_t cluster_number);
  void Start(Block& block, uint64_t block_number);
  void Check(Block& block);  // that has ended
  void Step();
  void Blame(const Thread& thread, const std::string& fault);
  [[noreturn]] void FailStuck();
  uint32_t Random(size_t n);

  const Grid* grid_ = nullptr;
  size_t most_shared_bytes_ = 0;
  uint64_t schedule_hash_ = 0;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<Thread*> ready_;
  std::vector<std::unique_ptr<Fiber>> fibers_;  // all there are
  std::vector<Fiber*> idle_fibers_;
  Thread* current_ = nullptr;
  uint64_t alive_ = 0;
  char start_order_ = 0, end_order_ = 0;
};

// Releases the threads of the block or cluster once all that are alive wait at its barrier.
void ReleaseBarrierIfComplete(Block& block);
void ReleaseBarrierIfComplete(Cluster& cluster);

// Description of what a thread at a transaction barrier waits for.
std::string WaitsFor(const Thread& thread);
// Description of what is still in flight when the block's last thread ends, or "".
std::string UnfinishedWork(const Block& block);

// The one simulation of this process, and its running thread.
Simulation& TheSimulation();
Thread& Current();

std::string Text(Site site);

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_SIMULATION_H_
