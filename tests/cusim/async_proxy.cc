#include "tests/cusim/async_proxy.h"

#include <cstring>
#include <string>

#include "tests/cusim/simulation.h"

namespace cusim {
namespace {

Block& CurrentBlock() {
  return *Current().block;
}

[[noreturn]] void Fault(const char* fault, const std::string& detail, Site site) {
  Current().site = site;
  TheSimulation().Fail(fault, detail, Current());
}

// A block of this cluster, whose shared memory the caller accesses.
Block& BlockOfCluster(unsigned rank, Site site) {
  const auto& blocks = CurrentBlock().cluster->blocks;
  if (rank >= blocks.size()) {
    Fault("wrong block of a cluster", std::to_string(rank) + " of " + std::to_string(blocks.size()),
          site);
  }
  Block& block = *blocks[rank];
  if (&block == &CurrentBlock()) return block;
  if (block.alive == 0) {
    Fault("block that has ended", "another one of its cluster still signals it", site);
  }
  block.signalled_after = block.cluster->barriers_passed;
  if (block.signalled_after == 0) {
    Fault("missing cluster barrier", "before the first signal to another block", site);
  }
  return block;
}

// Whether the async proxy sees bytes other than other accesses do.
bool Unseen(Block& block, uint32_t address, size_t bytes) {
  SharedMemory& shared = block.shared;
  return std::memcmp(shared.At(address, bytes), shared.SeenAt(address, bytes), bytes) != 0;
}

TransactionBarrier& Find(Block& block, uint32_t address, Site site) {
  const auto found = block.async.barriers.find(address);
  if (found == block.async.barriers.end()) {
    Fault("transaction barrier", "used before it was initialised", site);
  }
  return found->second;
}
TransactionBarrier& Find(const void* barrier, Site site) {
  return Find(CurrentBlock(), SharedAddress(barrier, site), site);
}

void Wake(Block& block, uint32_t barrier) {
  for (Thread& thread : block.threads) {
    if (thread.state == State::kAtTransactionBarrier && thread.barrier == barrier) {
      TheSimulation().MakeReady(thread);
    }
  }
}

// Ends the phase if nothing is pending.
void CompletePhase(Block& block, TransactionBarrier& barrier, uint32_t address, Site site) {
  if (barrier.pending > 0) return;
  if (barrier.bytes < 0 || (barrier.bytes == 0 && !barrier.copies.empty())) {
    Fault("too few transaction bytes",
          "the phase of the barrier of " + Text(barrier.site) +
              " expected fewer bytes than are copied",
          site);
  }
  if (barrier.bytes == 0) {
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
  }
  Wake(block, address);  // or there are copies that a waiting thread must make
}

void Arrive(Block& block, uint32_t address, uint32_t expected_bytes, Site site) {
  TransactionBarrier& b = Find(block, address, site);
  if (b.pending == 0) {
    Fault("transaction barrier",
          "more arrivals than the " + std::to_string(b.arrivals) + " of a phase", site);
  }
  TsanRelease(&b.phase_order[b.phase % 2]);
  b.bytes += expected_bytes;
  --b.pending;
  CompletePhase(block, b, address, site);
  MaybePreempt();
}

// Begins a copy to one block.
void IssueCopyTo(Block& block, const BulkCopy& copy, uint32_t barrier, Site site) {
  TransactionBarrier& b = Find(block, barrier, site);
  if (Unseen(block, barrier, sizeof(uint64_t))) {
    Fault("missing fence.proxy.async",
          "between the initialisation of a barrier and a bulk copy that completes on it", site);
  }
  for (uint32_t at = copy.to; at < copy.to + copy.bytes(); at += kChunkBytes) {
    if (block.shared.At(at, kChunkBytes) == nullptr) {
      Fault("not shared memory", "a bulk copy leaves its array", site);
    }
    AsyncProxy::Chunk& chunk = block.async.chunks[at];
    if (chunk.products > 0) {
      Fault("write to operands in flight", "a bulk copy begins before their product has ended",
            site);
    }
    ++chunk.copies;
  }
  b.copies.push_back(copy);
  TsanRelease(&b.issue_order);
  if (b.pending == 0) Wake(block, barrier);
}

int RegistersAtLaunch(const Block& block) {
  return cusim::RegistersAtLaunch(static_cast<int>(block.threads.size()));
}

// "" or the fault; `unset`: registers of a thread before its first setmaxnreg.
std::string TooManyRegisters(const Block& block, int unset) {
  const int at_launch = RegistersAtLaunch(block);
  const int most =
      at_launch == 0 ? kRegisterFile : at_launch * static_cast<int>(block.warps.size()) * 32;
  int sum = 0;
  for (const Warp& warp : block.warps) sum += (warp.registers != 0 ? warp.registers : unset) * 32;
  if (sum <= most) return "";
  return std::to_string(sum) + " registers in one block of " + std::to_string(most);
}

}  // namespace

int RegistersAtLaunch(int threads) {
  return threads <= 256 ? 0 : kRegisterFile / threads / 8 * 8;
}

uint32_t SharedAddress(const void* shared, Site site) {
  const int64_t address = CurrentBlock().shared.AddressOf(shared);
  if (address < 0) Fault("not shared memory", "an address that lies in no array", site);
  return static_cast<uint32_t>(address);
}

unsigned char* SharedChunk(uint32_t address, Site site) {
  unsigned char* const memory = CurrentBlock().shared.At(address, kChunkBytes);
  if (memory == nullptr) Fault("not shared memory", "an operand leaves its array", site);
  return memory;
}

void FenceAsyncProxy(Site site) {
  const TsanIgnore ignore;
  auto& chunks = CurrentBlock().async.chunks;
  CurrentBlock().shared.ForUnseen(
      [&](uint32_t address, const unsigned char* memory, unsigned char* seen, size_t bytes) {
        const auto chunk = chunks.find(address);
        if (chunk != chunks.end() && chunk->second.products > 0) {
          Fault("write to operands in flight", "found by a fence", site);
        }
        std::memcpy(seen, memory, bytes);
      });
}

void InitBarrier(void* barrier, uint32_t arrivals, Site site) {
  const TsanIgnore ignore;
  CurrentBlock().async.barriers[SharedAddress(barrier, site)] = {
      .arrivals = arrivals, .pending = arrivals, .site = site};
}

void ArriveAtBarrier(void* barrier, uint32_t expected_bytes, Site site) {
  Arrive(CurrentBlock(), SharedAddress(barrier, site), expected_bytes, site);
}

void ArriveAtBarrierIn(unsigned block, void* barrier, Site site) {
  Arrive(BlockOfCluster(block, site), SharedAddress(barrier, site), 0, site);
}

void IssueCopy(const BulkCopy& copy, void* barrier, Site site, uint32_t cluster_mask) {
  const TsanIgnore ignore;
  const uint32_t address = SharedAddress(barrier, site);
  if (copy.map.magic != TensorMap::kMagic) Fault("tensor map", "of other bytes", site);
  if (copy.to % 128 != 0) {
    Fault("misaligned bulk copy", "to shared memory, expected a multiple of 128", site);
  }
  if (cluster_mask == 0) IssueCopyTo(CurrentBlock(), copy, address, site);
  for (unsigned rank = 0; cluster_mask >> rank != 0; ++rank) {
    if ((cluster_mask >> rank & 1) != 0) {
      IssueCopyTo(BlockOfCluster(rank, site), copy, address, site);
    }
  }
}

bool AwaitBarrier(void* barrier, uint32_t parity, Site site, BulkCopy& copy) {
  Thread& thread = Current();
  TransactionBarrier& b = Find(barrier, site);
  if (parity > 1) Fault("transaction barrier", "a parity that is neither 0 nor 1", site);
  while (b.phase % 2 == parity) {
    if (b.pending == 0 && !b.copies.empty()) {
      const TsanIgnore ignore;
      copy = b.copies.front();
      b.copies.pop_front();
      TsanAcquire(&b.issue_order);
      return true;
    }
    thread.site = site;
    thread.barrier = SharedAddress(barrier, site);
    thread.parity = parity;
    thread.state = State::kAtTransactionBarrier;
    TheSimulation().SwitchToHost();
  }
  TsanAcquire(&b.phase_order[parity]);
  return false;
}

void FinishCopy(void* barrier, const BulkCopy& copy, Site site) {
  const TsanIgnore ignore;
  TransactionBarrier& b = Find(barrier, site);
  SharedMemory& shared = CurrentBlock().shared;
  for (uint32_t at = copy.to; at < copy.to + copy.bytes(); at += kChunkBytes) {
    --CurrentBlock().async.chunks[at].copies;
    std::memcpy(shared.SeenAt(at, kChunkBytes), shared.At(at, kChunkBytes), kChunkBytes);
  }
  TsanRelease(&b.phase_order[b.phase % 2]);
  b.bytes -= copy.bytes();
  CompletePhase(CurrentBlock(), b, SharedAddress(barrier, site), site);
}

void BeginRead(uint32_t address, Site site) {
  const TsanIgnore ignore;
  SharedChunk(address, site);
  AsyncProxy::Chunk& chunk = CurrentBlock().async.chunks[address];
  if (chunk.copies > 0) {
    Fault("operand that is not there yet", "its bulk copy was not waited for", site);
  }
  if (Unseen(CurrentBlock(), address, kChunkBytes)) {
    Fault("missing fence.proxy.async", "between a write to an operand and its product", site);
  }
  ++chunk.products;
  ++CurrentBlock().async.reads;
}

void FinishRead(uint32_t address, Site site) {
  const TsanIgnore ignore;
  if (Unseen(CurrentBlock(), address, kChunkBytes)) {
    Fault("write to operands in flight", "found when their product ended", site);
  }
  --CurrentBlock().async.chunks[address].products;
  --CurrentBlock().async.reads;
}

bool IsLastLane() {
  return ++CurrentBlock().warps[Current().warp].lanes_done % 32 == 0;
}

void CountProduct(Site site) {
  if (CurrentBlock().warps.size() % 4 != 0) {
    Fault("divergent warpgroup", "a block of other than whole warpgroups", site);
  }
  ++CurrentBlock().warps[Current().warp].products;
}

void SetRegisters(int registers, bool more, Site site) {
  constexpr int kFewest = 24, kMost = 256;
  if (registers < kFewest || registers > kMost || registers % 8 != 0) {
    Fault("wrong number of registers", std::to_string(registers), site);
  }
  const int at_launch = RegistersAtLaunch(CurrentBlock());
  int& mine = CurrentBlock().warps[Current().warp].registers;
  const int before = mine != 0 ? mine : at_launch;
  if (before != 0 && before != registers && (before < registers) != more) {
    Fault("wrong number of registers",
          (more ? "setmaxnreg.inc from " : "setmaxnreg.dec from ") + std::to_string(before) +
              " to " + std::to_string(registers),
          site);
  }
  mine = registers;
  const std::string fault = TooManyRegisters(CurrentBlock(), 0);
  if (!fault.empty()) Fault("wrong number of registers", fault, site);
}

std::shared_ptr<void>& ThreadSlot() {
  return Current().slot;
}

std::string WaitsFor(const Thread& thread) {
  const TransactionBarrier& b = thread.block->async.barriers.at(thread.barrier);
  return "waits for parity " + std::to_string(thread.parity) + " of the barrier of " +
         Text(b.site) + ", shared address " + std::to_string(thread.barrier) + ", which misses " +
         std::to_string(b.pending) + " arrivals and " + std::to_string(b.bytes) + " bytes,";
}

std::string UnfinishedWork(const Block& block) {
  if (block.async.reads > 0) return "the block ends before its products do";
  for (const auto& [address, barrier] : block.async.barriers) {
    if (!barrier.copies.empty()) {
      return "the block ends before a bulk copy that nobody waited for, on the barrier of " +
             Text(barrier.site);
    }
  }
  for (size_t w = 0; w < block.warps.size(); ++w) {
    if (block.warps[w].products != block.warps[w / 4 * 4].products) {
      return "divergent warpgroup: its warps made different numbers of products";
    }
  }
  // Whoever takes registers waits until they are free.
  return TooManyRegisters(block, RegistersAtLaunch(block));
}

}  // namespace cusim
