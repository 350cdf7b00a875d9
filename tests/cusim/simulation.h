// What is alive during a run: blocks, warps, threads, and the scheduler. Internal to the simulator.
#ifndef MOE_TESTS_CUSIM_SIMULATION_H_
#define MOE_TESTS_CUSIM_SIMULATION_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/cusim/cusim.h"
#include "tests/cusim/fiber.h"
#include "tests/cusim/intrinsics.h"

namespace cusim {

// The shared memory of one block. Every array lies between two red zones: poisoned under
// AddressSanitizer, which then names the line of a read or write there; without it a write is found
// when the block ends. Arrays start out as bytes 0xff (floats: NaN, integers: -1), so that using
// one before it is written shows.
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

  static constexpr size_t kAlignment = 128;

 private:
  static constexpr size_t kRedZoneBytes = 256;
  struct Array {
    const void* site;
    size_t bytes;
    unsigned char* memory;  // red zone, array, red zone
  };
  std::vector<Array> arrays_;
};

struct Block;

enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kDone };

// One CUDA thread.
struct Thread {
  Block* block = nullptr;
  Fiber* fiber = nullptr;
  uint3 index = {};
  int warp = 0, lane = 0;
  State state = State::kReady;
  Site site;  // of the barrier or warp operation it waits in
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
  std::deque<Meeting> meetings;  // open, or not yet read by all; the rest may be used again
};

struct Block {
  const Grid* grid = nullptr;
  int grid_number = 0;
  uint3 index = {};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  int alive = 0, at_barrier = 0;
  // Barriers alternate between two orders: with one, a thread that is late to leave a barrier
  // would seem ordered after what others did since.
  int barriers_passed = 0;
  char barrier_order[2] = {};
  SharedMemory shared;
};

class Simulation {
 public:
  // `resident`: blocks at a time over all grids.
  void Run(const std::vector<Grid>& grids, const Options& options, int64_t resident);
  Stats stats() const { return stats_; }

  // For the thread that runs.
  Thread& current() { return *current_; }
  void SwitchToHost() { Fiber::SwitchToHost(); }
  void MakeReady(Thread& thread);
  bool RollsPreemption();
  // Prints the fault and aborts. `thread` is who is blamed.
  [[noreturn]] void Fail(const char* fault, const std::string& detail, const Thread& thread);

 private:
  struct PendingBlock {
    int grid;
    uint64_t number;
  };

  static void ThreadBody();
  void Exit(Thread& thread);
  void Start(const PendingBlock& pending);
  void Finish(Block& block);
  void Step();
  void Blame(const Thread& thread, const std::string& fault);
  [[noreturn]] void FailStuck();
  uint32_t Random(size_t n);

  const std::vector<Grid>* grids_ = nullptr;
  Options options_;
  Stats stats_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Thread*> ready_;
  std::vector<std::unique_ptr<Fiber>> fibers_;  // all there are
  std::vector<Fiber*> idle_fibers_;
  Thread* current_ = nullptr;
  uint64_t alive_ = 0, spins_ = 0;  // spins since a thread got further
  char start_order_ = 0, end_order_ = 0;

  friend void SpinWait();
};

// Lets the block's threads go on once all that are alive wait at its barrier.
void ReleaseBarrierIfComplete(Block& block);

// The one simulation of this process.
Simulation& TheSimulation();

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_SIMULATION_H_
