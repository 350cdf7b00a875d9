// A small training state, saved by any number of ranks in any layout, and read back.
#ifndef MOE_TESTS_MOE_CHECKPOINT_CHECKPOINT_HARNESS_H_
#define MOE_TESTS_MOE_CHECKPOINT_CHECKPOINT_HARNESS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>

#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/writer.h"
#include "moe/state/canonical_tensor.h"

namespace moe::testing {

// How tensors are cut over ranks. kBlocks: of 2 x 3 elements, dealt round.
enum class Cut : uint8_t { kRows, kColumns, kBlocks, kFirstRankAlone };

// Every element says tensor, state, place and step.
double Element(int64_t tensor, int64_t state, int64_t row, int64_t col, int64_t step);

// Memory of the parts of one rank.
struct PartMemory {
  std::vector<StatePart> parts;
  std::vector<std::unique_ptr<std::vector<float>>> floats;
  std::vector<std::unique_ptr<std::vector<double>>> doubles;
};
PartMemory PartsOf(int rank, int ranks, Cut cut, int64_t step);

// run: what its manifest says of whose it is; empty: nothing.
CheckpointState StateOf(int64_t step, const std::string& run = "");

// Create, Start and Publish on every rank, which must have one status.
absl::Status Save(const CheckpointOptions& options, int ranks, Cut cut, int64_t step,
                  const std::string& run = "");

// Start and Publish of this rank's rows by a writer that is there, once all ranks have come.
absl::Status SaveRows(CheckpointWriter& writer, Communicator& world, int64_t step,
                      const std::string& run = "");

// Reads every state of every tensor, in boxes of `rows` x `cols`: kInternal names an element that
// is not the one that was saved.
absl::Status CheckElements(CheckpointReader& reader, int64_t rows, int64_t cols);

// FindCheckpoint, hashes and elements of what it found: its step; -1: none, -2: damaged, which
// fails the test. So does a damaged folder under a step's name.
int64_t NewestWholeStep(const std::string& folder);

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_CHECKPOINT_CHECKPOINT_HARNESS_H_
