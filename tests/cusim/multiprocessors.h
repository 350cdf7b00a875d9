// Room on the multiprocessors of a simulated device: which blocks can be there at the same time.
#ifndef MOE_TESTS_CUSIM_MULTIPROCESSORS_H_
#define MOE_TESTS_CUSIM_MULTIPROCESSORS_H_

#include <cstddef>
#include <vector>

#include "tests/cusim/cusim.h"

namespace cusim {

// What a block takes of a multiprocessor, and what blocks have taken.
struct BlockNeeds {
  int threads = 0;
  int registers = 0;  // of all threads
  size_t shared_bytes = 0;
};
BlockNeeds NeedsOf(const Grid& grid);

// The blocks of a grid. Those that are `on` a multiprocessor stay there until they end.
struct GridBlocks {
  BlockNeeds needs;
  int waiting = 0;
  std::vector<size_t> on = {};  // the multiprocessor of each
  int ended = 0;

  bool all_on() const { return waiting == 0 && ended == 0 && !on.empty(); }
};

// Of a kernel of NCCL's: bounds of 640 threads with 96 registers each.
inline constexpr BlockNeeds kNcclBlock = {
    .threads = 640, .registers = 96 * 640, .shared_bytes = 84 << 10};

class Multiprocessors {
 public:
  // Idle ones are added or removed.
  void Resize(int count) { taken_.resize(static_cast<size_t>(count)); }
  bool HasRoom(const BlockNeeds& needs) const;
  // As many of the waiting blocks as there is room for begin.
  void Begin(GridBlocks& blocks);
  // The blocks that have begun end.
  void End(GridBlocks& blocks);

 private:
  std::vector<BlockNeeds> taken_;  // by multiprocessor
};

// Whether a multiprocessor has shared memory for one such block alone, as of products for Hopper
// GPUs.
bool FillsSharedMemory(const BlockNeeds& needs);

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_MULTIPROCESSORS_H_
