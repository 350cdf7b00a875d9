#include "tests/cusim/simulation.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "tests/cusim/fiber.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) (static_cast<void>(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) (static_cast<void>(address), (void)(size))
#endif

namespace cusim {
namespace {

constexpr size_t kSpareFibers = 32;
constexpr size_t kPreemptOneIn = 4;  // one in so many atomic operations

Options launch_options;

uint64_t Count(dim3 d) {
  return uint64_t{d.x} * d.y * d.z;
}

uint3 Coordinates(uint64_t i, dim3 size) {
  return {static_cast<unsigned>(i % size.x), static_cast<unsigned>(i / size.x % size.y),
          static_cast<unsigned>(i / size.x / size.y)};
}

std::ostream& operator<<(std::ostream& out, uint3 index) {
  return out << "(" << index.x << ", " << index.y << ", " << index.z << ")";
}

}  // namespace

Simulation& TheSimulation() {
  static Simulation simulation;
  return simulation;
}
Thread& Current() {
  return TheSimulation().current();
}

std::string Text(Site site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

// A fiber runs one thread after another.
void Simulation::ThreadBody() {
  Simulation& self = TheSimulation();
  for (;;) {
    TsanAcquire(&self.start_order_);
    self.current_->block->grid->body();
    self.Exit(*self.current_);
    TsanRelease(&self.end_order_);
    Fiber::SwitchToHost();
  }
}

void Simulation::Exit(Thread& thread) {
  Warp& warp = thread.block->warps[thread.warp];
  const uint32_t self = 1u << thread.lane;
  for (const Meeting& meeting : warp.meetings) {
    if ((meeting.mask & self) == 0 || meeting.arrived == meeting.mask) continue;
    std::ostringstream detail;
    detail << "lane " << thread.lane << " ends while others wait for it in " << meeting.operation
           << " at " << Text(meeting.site);
    Fail("exited lane", detail.str(), thread);
  }
  warp.exited |= self;
  thread.state = State::kDone;
}

void Simulation::MakeReady(Thread& thread) {
  thread.state = State::kReady;
  // A running thread is put back when it stops.
  if (&thread != current_) ready_.push_back(&thread);
}

uint32_t Simulation::Random(size_t n) {
  const auto choice = static_cast<uint32_t>(random_() % n);
  schedule_hash_ = (schedule_hash_ ^ choice) * 0x100000001b3u;  // FNV-1a
  return choice;
}

bool Simulation::RollsPreemption() {
  return Random(kPreemptOneIn) == 0;
}

void Simulation::StartCluster(uint64_t cluster_number) {
  auto cluster = std::make_unique<Cluster>();
  for (unsigned rank = 0; rank < grid_->cluster_blocks; ++rank) {
    cluster->blocks.push_back(std::make_unique<Block>());
    Block& block = *cluster->blocks.back();
    block.cluster = cluster.get();
    block.rank = rank;
    Start(block, cluster_number * grid_->cluster_blocks + rank);
  }
  clusters_.push_back(std::move(cluster));
}

void Simulation::Start(Block& block, uint64_t block_number) {
  block.grid = grid_;
  block.index = Coordinates(block_number, grid_->grid);
  const auto threads = static_cast<int>(Count(block.grid->block));
  block.threads.resize(threads);
  block.warps.resize((threads + 31) / 32);
  block.alive = threads;
  if (block.grid->dynamic_shared_bytes > 0) {
    block.shared.Get(nullptr, block.grid->dynamic_shared_bytes);
  }
  // ThreadSanitizer takes the fiber for the thread, so that threads of two blocks never race if
  // they share one. Therefore fibers are assigned at random, from more than there are threads.
  while (idle_fibers_.size() < static_cast<size_t>(threads) + kSpareFibers) {
    fibers_.push_back(std::make_unique<Fiber>(&Simulation::ThreadBody));
    idle_fibers_.push_back(fibers_.back().get());
  }
  for (int i = 0; i < threads; ++i) {
    Thread& thread = block.threads[i];
    std::swap(idle_fibers_[Random(idle_fibers_.size())], idle_fibers_.back());
    thread.block = &block;
    thread.fiber = idle_fibers_.back();
    thread.index = Coordinates(i, block.grid->block);
    thread.warp = i / 32;
    thread.lane = i % 32;
    idle_fibers_.pop_back();
    block.warps[thread.warp].lanes |= 1u << thread.lane;
    ready_.push_back(&thread);
  }
  alive_ += threads;
}

void Simulation::Check(Block& block) {
  const int overrun = block.shared.FindOverrun();
  if (overrun >= 0) {
    Fail("out-of-bounds write to shared memory",
         "found beside array " + std::to_string(overrun) + " when the block ended",
         block.threads.front());
  }
  const std::string unfinished = UnfinishedWork(block);
  if (block.signalled_after == block.ended_after) {
    Fail("missing cluster barrier", "between the last signal of another block and the end",
         block.threads.front());
  }
  if (!unfinished.empty()) Fail("unfinished work", unfinished, block.threads.front());
}

// Runs one thread, picked at random, until it waits, yields or ends.
void Simulation::Step() {
  std::swap(ready_[Random(ready_.size())], ready_.back());
  Thread& thread = *ready_.back();
  ready_.pop_back();
  current_ = &thread;
  thread.fiber->Resume();
  current_ = nullptr;
  if (thread.state == State::kReady) ready_.push_back(&thread);
  if (thread.state != State::kDone) return;
  idle_fibers_.push_back(thread.fiber);
  --alive_;
  Block& block = *thread.block;
  Cluster& cluster = *block.cluster;
  --block.alive;
  ReleaseBarrierIfComplete(block);
  if (block.alive == 0) block.ended_after = cluster.barriers_passed;
  ReleaseBarrierIfComplete(cluster);
  if (cluster.alive() > 0) return;
  for (const auto& ended : cluster.blocks) Check(*ended);
  std::erase_if(clusters_, [&](const auto& c) { return c.get() == &cluster; });
}

void Simulation::Run(const Grid& grid, const Options& options) {
  if (grid_ != nullptr) {
    std::fputs("cusim: a kernel was launched from inside a kernel\n", stderr);
    std::abort();
  }
  const TsanIgnore ignore;
  grid_ = &grid;
  most_shared_bytes_ = options.most_shared_bytes;
  random_.seed(options.seed);
  schedule_hash_ = 0xcbf29ce484222325u;
  std::vector<uint64_t> pending(Count(grid.grid) / grid.cluster_blocks);
  std::iota(pending.begin(), pending.end(), 0);
  TsanRelease(&start_order_);
  for (;;) {
    const auto room = [&] {
      return static_cast<int>(clusters_.size() * grid.cluster_blocks) < options.resident_blocks;
    };
    while (!pending.empty() && room()) {
      std::swap(pending[Random(pending.size())], pending.back());
      StartCluster(pending.back());
      pending.pop_back();
    }
    if (clusters_.empty()) break;
    if (ready_.empty()) FailStuck();
    Step();
  }
  TsanAcquire(&end_order_);
  grid_ = nullptr;
}

void Simulation::Blame(const Thread& thread, const std::string& fault) {
  std::ostringstream line;
  line << "cusim: " << fault << " [block " << thread.block->index << " thread " << thread.index
       << "]";
  if (thread.site.line > 0) line << " at " << Text(thread.site);
  std::fprintf(stderr, "%s\n", line.str().c_str());
}

void Simulation::Fail(const char* fault, const std::string& detail, const Thread& thread) {
  Blame(thread, std::string(fault) + ": " + detail);
  std::abort();
}

// Every living thread waits: reports what the first few wait for, last those that wait for their
// cluster, as threads without work do.
void Simulation::FailStuck() {
  constexpr int kShown = 8;
  int shown = 0;
  std::fprintf(stderr, "cusim: deadlock: %llu threads wait for each other\n",
               static_cast<unsigned long long>(alive_));
  const auto waits = [](const Thread& thread) -> std::string {
    switch (thread.state) {
      case State::kAtBarrier:
        return "  waits in __syncthreads";
      case State::kAtClusterBarrier:
        return "  waits in a barrier of its cluster";
      case State::kAtTransactionBarrier:
        return "  " + WaitsFor(thread);
      default:
        return "  waits in a warp operation";
    }
  };
  for (const bool at_end : {false, true}) {
    for (const auto& cluster : clusters_) {
      for (const auto& block : cluster->blocks) {
        for (const Thread& thread : block->threads) {
          if (thread.state == State::kDone) continue;
          if ((thread.state == State::kAtClusterBarrier) != at_end) continue;
          if (++shown <= kShown) Blame(thread, waits(thread));
        }
      }
    }
  }
  std::abort();
}

void RunGrid(const Grid& grid, const Options& options) {
  TheSimulation().Run(grid, options);
}
uint64_t LastScheduleHash() {
  return TheSimulation().schedule_hash();
}

const Options& LaunchOptions() {
  return launch_options;
}
Options Set(const Options& now) {
  return std::exchange(launch_options, now);
}

namespace {

constexpr unsigned char kRedZoneByte = 0xdb;
constexpr unsigned char kUnwrittenByte = 0xff;

size_t RoundUp(size_t n, size_t unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace

void* SharedMemory::Get(const void* site, size_t bytes) {
  for (const Array& array : arrays_) {
    if (array.site == site) return array.memory + kRedZoneBytes;
  }
  const TsanIgnore ignore;
  const size_t total = RoundUp(bytes + 2 * kRedZoneBytes, kAlignment);
  auto* const memory = static_cast<unsigned char*>(std::aligned_alloc(kAlignment, total));
  if (memory == nullptr) std::abort();
  std::memset(memory, kRedZoneByte, total);
  std::memset(memory + kRedZoneBytes, kUnwrittenByte, bytes);
  ASAN_POISON_MEMORY_REGION(memory, kRedZoneBytes);
  ASAN_POISON_MEMORY_REGION(memory + kRedZoneBytes + bytes, kRedZoneBytes);
  // Dynamic shared memory is declared with the alignment that swizzled tiles need.
  const size_t alignment = site == nullptr ? kDynamicAlignment : kChunkBytes;
  const auto address = static_cast<uint32_t>(RoundUp(next_address_, alignment));
  next_address_ = address + static_cast<uint32_t>(bytes);
  arrays_.push_back({site, bytes, memory, address});
  return memory + kRedZoneBytes;
}

size_t SharedMemory::bytes() const {
  size_t of_static = 0, of_dynamic = 0;
  for (const Array& array : arrays_) {
    (array.site == nullptr ? of_dynamic : of_static) += RoundUp(array.bytes, kChunkBytes);
  }
  return of_dynamic == 0 ? of_static : RoundUp(of_static, kDynamicAlignment) + of_dynamic;
}

const SharedMemory::Array* SharedMemory::Find(uint32_t address, size_t bytes) const {
  for (const Array& array : arrays_) {
    if (address >= array.address && address + bytes <= array.address + array.bytes) return &array;
  }
  return nullptr;
}

int64_t SharedMemory::AddressOf(const void* memory) const {
  const auto at = reinterpret_cast<uintptr_t>(memory);
  for (const Array& array : arrays_) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(array.memory) + kRedZoneBytes;
    if (at >= begin && at < begin + array.bytes) {
      return array.address + static_cast<int64_t>(at - begin);
    }
  }
  return -1;
}

unsigned char* SharedMemory::At(uint32_t address, size_t bytes) const {
  const Array* const array = Find(address, bytes);
  return array == nullptr ? nullptr : array->memory + kRedZoneBytes + (address - array->address);
}

unsigned char* SharedMemory::SeenAt(uint32_t address, size_t bytes) {
  auto* const array = const_cast<Array*>(Find(address, bytes));
  if (array == nullptr) return nullptr;
  if (array->seen.empty()) array->seen.assign(array->bytes, kUnwrittenByte);
  return array->seen.data() + (address - array->address);
}

int SharedMemory::FindOverrun() const {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const Array& array = arrays_[i];
    unsigned char* const after = array.memory + kRedZoneBytes + array.bytes;
    ASAN_UNPOISON_MEMORY_REGION(array.memory, kRedZoneBytes);
    ASAN_UNPOISON_MEMORY_REGION(after, kRedZoneBytes);
    for (size_t b = 0; b < kRedZoneBytes; ++b) {
      if (array.memory[b] != kRedZoneByte || after[b] != kRedZoneByte) return static_cast<int>(i);
    }
  }
  return -1;
}

SharedMemory::~SharedMemory() {
  const TsanIgnore ignore;
  for (const Array& array : arrays_) {
    ASAN_UNPOISON_MEMORY_REGION(array.memory, array.bytes + 2 * kRedZoneBytes);
    std::free(array.memory);
  }
}

}  // namespace cusim
