// Barriers, warp operations and yielding: operations in which one thread waits for others.
#include <bit>
#include <sstream>
#include <string>

#include "tests/cusim/simulation.h"

namespace cusim {
namespace {

std::string Hex(uint32_t mask) {
  std::ostringstream text;
  text << "0x" << std::hex << mask;
  return text.str();
}

Warp& CurrentWarp() {
  return Current().block->warps[Current().warp];
}

// Detects what CUDA leaves undefined.
void CheckMask(const WarpOperation& operation) {
  Thread& thread = Current();
  const Warp& warp = CurrentWarp();
  const auto fail = [&](const char* fault, const std::string& what) {
    TheSimulation().Fail(
        fault, std::string(operation.name) + " with mask " + Hex(operation.mask) + " " + what,
        thread);
  };
  if ((operation.mask >> thread.lane & 1) == 0) {
    fail("wrong warp mask", "is called by lane " + std::to_string(thread.lane));
  }
  if ((operation.mask & ~warp.lanes) != 0) {
    fail("wrong warp mask", "names lanes of which the warp has only " + Hex(warp.lanes));
  }
  const uint32_t gone = operation.mask & warp.exited;
  if (gone != 0) {
    fail("exited lane",
         "waits for lane " + std::to_string(std::countr_zero(gone)) + ", which has ended");
  }
}

// The meeting that this lane belongs to: one that waits for it, or a new one. Lanes may wait for
// this one in another meeting if it does not wait for them in this one; it can still join that one
// later.
Meeting& FindMeeting(const WarpOperation& operation) {
  Thread& thread = Current();
  Warp& warp = CurrentWarp();
  for (Meeting& meeting : warp.meetings) {
    const bool waits_for_me =
        meeting.arrived != meeting.mask && (meeting.mask >> thread.lane & 1) != 0;
    if (!waits_for_me || (operation.mask & meeting.arrived) == 0) continue;
    if (meeting.mask != operation.mask) {
      TheSimulation().Fail("wrong warp mask",
                           std::string(operation.name) + " with mask " + Hex(operation.mask) +
                               ", but other lanes wait with " + Hex(meeting.mask) + " at " +
                               Text(meeting.site),
                           thread);
    }
    if (std::string(meeting.operation) != operation.name) {
      TheSimulation().Fail("divergent warp operation",
                           std::string(operation.name) + ", but other lanes wait in " +
                               meeting.operation + " at " + Text(meeting.site),
                           thread);
    }
    return meeting;
  }
  Meeting* free = nullptr;
  for (Meeting& meeting : warp.meetings) {
    if (meeting.unread == 0) free = &meeting;
  }
  if (free == nullptr) {
    const TsanIgnore ignore;
    free = &warp.meetings.emplace_back();
  }
  free->operation = operation.name;
  free->mask = operation.mask;
  free->unread = operation.mask;
  free->arrived = 0;
  free->site = operation.site;
  return *free;
}

uint3 Size(dim3 d) {
  return {d.x, d.y, d.z};
}

}  // namespace

uint3 ThreadIndex() {
  return Current().index;
}
uint3 BlockIndex() {
  return Current().block->index;
}
uint3 BlockDim() {
  return Size(Current().block->grid->block);
}
uint3 GridDim() {
  return Size(Current().block->grid->grid);
}
int Lane() {
  return Current().lane;
}

void ReleaseBarrierIfComplete(Block& block) {
  if (block.alive == 0 || block.at_barrier != block.alive) return;
  const Thread* first = nullptr;
  for (Thread& thread : block.threads) {
    if (thread.state != State::kAtBarrier) continue;
    if (first == nullptr) first = &thread;
    if (thread.site != first->site) {
      TheSimulation().Fail("divergent barrier",
                           "threads of one block wait in __syncthreads at " + Text(first->site) +
                               " and at " + Text(thread.site),
                           thread);
    }
  }
  block.at_barrier = 0;
  ++block.barriers_passed;
  for (Thread& thread : block.threads) {
    if (thread.state == State::kAtBarrier) TheSimulation().MakeReady(thread);
  }
}

void ReleaseBarrierIfComplete(Cluster& cluster) {
  if (cluster.at_barrier == 0 || cluster.at_barrier != cluster.alive()) return;
  cluster.at_barrier = 0;
  ++cluster.barriers_passed;
  for (const auto& block : cluster.blocks) {
    for (Thread& thread : block->threads) {
      if (thread.state == State::kAtClusterBarrier) TheSimulation().MakeReady(thread);
    }
  }
}

unsigned ClusterRank() {
  return Current().block->rank;
}
unsigned ClusterBlocks() {
  return static_cast<unsigned>(Current().block->cluster->blocks.size());
}

void ClusterBarrier(Site site) {
  Thread& thread = Current();
  Cluster& cluster = *thread.block->cluster;
  char* const order = &cluster.barrier_order[cluster.barriers_passed % 2];
  thread.site = site;
  thread.state = State::kAtClusterBarrier;
  ++cluster.at_barrier;
  TsanRelease(order);
  ReleaseBarrierIfComplete(cluster);
  TheSimulation().SwitchToHost();
  TsanAcquire(order);
}

void Barrier(Site site) {
  Thread& thread = Current();
  Block& block = *thread.block;
  char* const order = &block.barrier_order[block.barriers_passed % 2];
  thread.site = site;
  thread.state = State::kAtBarrier;
  ++block.at_barrier;
  TsanRelease(order);
  ReleaseBarrierIfComplete(block);
  TheSimulation().SwitchToHost();
  TsanAcquire(order);
}

std::array<LaneValue, 32> MeetInWarp(const WarpOperation& operation, const LaneValue& value) {
  Thread& thread = Current();
  thread.site = operation.site;
  CheckMask(operation);
  Meeting& meeting = FindMeeting(operation);
  const uint32_t self = 1u << thread.lane;
  meeting.values[thread.lane] = value;
  meeting.arrived |= self;
  if (operation.orders_memory) TsanRelease(&meeting.order);
  thread.state = State::kInWarp;
  if (meeting.arrived == meeting.mask) {
    const size_t warp_begin = static_cast<size_t>(thread.warp) * 32;
    for (uint32_t rest = meeting.mask; rest != 0; rest &= rest - 1) {
      TheSimulation().MakeReady(thread.block->threads[warp_begin + std::countr_zero(rest)]);
    }
  }
  // The last to arrive yields, too: the scheduler chooses who continues first.
  TheSimulation().SwitchToHost();
  if (operation.orders_memory) TsanAcquire(&meeting.order);
  const std::array<LaneValue, 32> values = meeting.values;
  meeting.unread &= ~self;
  return values;
}

void MaybePreempt() {
  if (TheSimulation().RollsPreemption()) TheSimulation().SwitchToHost();
}

void* StaticShared(const void* site, size_t bytes) {
  SharedMemory& shared = Current().block->shared;
  void* const array = shared.Get(site, bytes);
  const size_t most = TheSimulation().most_shared_bytes();
  if (shared.bytes() > most) {
    TheSimulation().Fail(
        "too much shared memory",
        std::to_string(shared.bytes()) + " bytes, static and dynamic, of " + std::to_string(most),
        Current());
  }
  return array;
}

void* DynamicShared() {
  return Current().block->shared.Get(nullptr, Current().block->grid->dynamic_shared_bytes);
}

const char* OtherThanGlobal(const void* memory) {
  const Thread& thread = Current();
  if (thread.block->shared.AddressOf(memory) >= 0) return "to shared memory";
  return thread.fiber->Holds(memory) ? "to a local variable" : nullptr;
}

void KernelFault(const char* fault, const char* detail, Site site) {
  Current().site = site;
  TheSimulation().Fail(fault, detail, Current());
}

}  // namespace cusim
