// What is alive during a run: blocks, warps, threads, and the scheduler. Internal to the simulator.
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

// The shared memory of one block. Every array lies between two red zones: poisoned under
// AddressSanitizer, which then names the line of a read or write there; without it a write is found
// when the block ends. Arrays start out as bytes 0xff (floats: NaN, integers: -1), so that using
// one before it is written shows.
//
// Every array has an address in a window of 32 bits, as kernels tell the async proxy of shared
// memory, and a copy of its bytes as the async proxy sees them: what it wrote itself, and what
// other accesses wrote before a fence.
class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // The array of the declaration `site`: taken the first time, the same one afterwards.
  void* Get(const void* site, size_t bytes);
  // The array whose red zones were written, or -1.
  int FindOverrun() const;

  // -1 for memory that is no array of this block.
  int64_t AddressOf(const void* memory) const;
  // `bytes` bytes at an address, and what the async proxy sees there. nullptr outside of arrays.
  unsigned char* At(uint32_t address, size_t bytes) const;
  unsigned char* SeenAt(uint32_t address, size_t bytes);
  // visit(address, memory, seen, bytes) of every 16 bytes of which the async proxy sees others.
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

  static constexpr size_t kAlignment = 128;

 private:
  static constexpr size_t kRedZoneBytes = 256;
  struct Array {
    const void* site;
    size_t bytes;
    unsigned char* memory;  // red zone, array, red zone
    uint32_t address;
    std::vector<unsigned char> seen = {};  // by the async proxy; made when it is asked for
  };
  // The array that [address, address + bytes) lies in, or nullptr.
  const Array* Find(uint32_t address, size_t bytes) const;

  std::vector<Array> arrays_;
  uint32_t next_address_ = 1024;  // where a Hopper GPU keeps what is its own
};

struct Block;

enum class State : uint8_t { kReady, kAtBarrier, kAtTransactionBarrier, kInWarp, kDone };

// One CUDA thread.
struct Thread {
  Block* block = nullptr;
  Fiber* fiber = nullptr;
  uint3 index = {};
  int warp = 0, lane = 0;
  State state = State::kReady;
  Site site;                   // of the barrier or warp operation it waits in
  uint32_t barrier = 0;        // the transaction barrier it waits at
  uint32_t parity = 0;         // and the phase of it
  std::shared_ptr<void> slot;  // ThreadSlot()
};

// Lanes of one warp that wait for each other in one warp operation.
struct Meeting {
  const char* operation = nullptr;
  uint32_t mask = 0;
  uint32_t arrived = 0;
  uint32_t unread = 0;  // lanes that have not taken the others' values yet
  Site site;            // where the first lane arrived
  std::array<LaneValue, 32> values = {};
  char order = 0;  // __syncwarp: what happened before, for ThreadSanitizer
};

struct Warp {
  uint32_t lanes = 0;  // that the block has threads for
  uint32_t exited = 0;
  uint64_t products = 0;         // that a warpgroup makes together
  int registers = 0;             // of a thread, as setmaxnreg said last
  std::deque<Meeting> meetings;  // open, or not yet read by all; the rest may be used again
};

struct Block {
  const Grid* grid = nullptr;
  uint3 index = {};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  int alive = 0, at_barrier = 0;
  // Barriers alternate between two orders: with one, a thread that is late to leave a barrier
  // would seem ordered after what others did since.
  int barriers_passed = 0;
  char barrier_order[2] = {};
  SharedMemory shared;
  AsyncProxy async;
};

class Simulation {
 public:
  void Run(const Grid& grid, const Options& options);
  uint64_t schedule_hash() const { return schedule_hash_; }

  Thread& current() { return *current_; }
  void SwitchToHost() { Fiber::SwitchToHost(); }
  void MakeReady(Thread& thread);
  bool RollsPreemption();
  // Prints the fault and aborts. `thread` is who is blamed.
  [[noreturn]] void Fail(const char* fault, const std::string& detail, const Thread& thread);

 private:
  static void ThreadBody();
  void Exit(Thread& thread);
  void Start(uint64_t block_number);
  void Finish(Block& block);
  void Step();
  void Blame(const Thread& thread, const std::string& fault);
  [[noreturn]] void FailStuck();
  uint32_t Random(size_t n);

  const Grid* grid_ = nullptr;
  uint64_t schedule_hash_ = 0;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Thread*> ready_;
  std::vector<std::unique_ptr<Fiber>> fibers_;  // all there are
  std::vector<Fiber*> idle_fibers_;
  Thread* current_ = nullptr;
  uint64_t alive_ = 0;
  char start_order_ = 0, end_order_ = 0;
};

// Lets the block's threads go on once all that are alive wait at its barrier.
void ReleaseBarrierIfComplete(Block& block);

// What a thread at a transaction barrier waits for.
std::string WaitsFor(const Thread& thread);
// What is left under way when the block's last thread ends, or "".
std::string UnfinishedWork(const Block& block);

// The one simulation of this process, and the thread that runs.
Simulation& TheSimulation();
Thread& Current();

std::string Text(Site site);

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_SIMULATION_H_
