#include "tests/cusim/multiprocessors.h"

#include <algorithm>

#include "tests/cusim/async_proxy.h"

namespace cusim {
namespace {

// Of a multiprocessor of compute capability 9.0 (CUDA Programming Guide, "Compute Capabilities").
// A block takes kReserved bytes of shared memory beside its own.
constexpr int kMostThreads = 2048;
constexpr size_t kSharedBytes = 228 << 10, kReserved = 1 << 10;
// Of a thread of a small block, which no launch bounds limit: what many kernels have.
constexpr int kUsualRegisters = 64;

bool Fits(const BlockNeeds& needs, const BlockNeeds& taken) {
  return taken.threads + needs.threads <= kMostThreads &&
         taken.registers + needs.registers <= kRegisterFile &&
         taken.shared_bytes + needs.shared_bytes <= kSharedBytes;
}

}  // namespace

BlockNeeds NeedsOf(const Grid& grid) {
  const auto threads = static_cast<int>(grid.block.x * grid.block.y * grid.block.z);
  const int warps = (threads + 31) / 32, at_launch = RegistersAtLaunch(threads);
  return {.threads = warps * 32,
          .registers = warps * 32 * (at_launch == 0 ? kUsualRegisters : at_launch),
          .shared_bytes = grid.dynamic_shared_bytes + kReserved};
}

bool Multiprocessors::HasRoom(const BlockNeeds& needs) const {
  return std::any_of(taken_.begin(), taken_.end(), [&](const auto& t) { return Fits(needs, t); });
}

void Multiprocessors::Begin(GridBlocks& blocks) {
  const BlockNeeds& needs = blocks.needs;
  while (blocks.waiting > 0 && HasRoom(needs)) {  // one on each, then a second one
    for (size_t i = 0; i < taken_.size() && blocks.waiting > 0; ++i) {
      if (!Fits(needs, taken_[i])) continue;
      taken_[i].threads += needs.threads;
      taken_[i].registers += needs.registers;
      taken_[i].shared_bytes += needs.shared_bytes;
      blocks.on.push_back(i);
      --blocks.waiting;
    }
  }
}

void Multiprocessors::End(GridBlocks& blocks) {
  for (const size_t i : blocks.on) {
    taken_[i].threads -= blocks.needs.threads;
    taken_[i].registers -= blocks.needs.registers;
    taken_[i].shared_bytes -= blocks.needs.shared_bytes;
  }
  blocks.ended += static_cast<int>(blocks.on.size());
  blocks.on.clear();
}

bool FillsSharedMemory(const BlockNeeds& needs) {
  return 2 * needs.shared_bytes > kSharedBytes;
}

}  // namespace cusim
