// What a run resumes with: the parameters, the optimiser's moments, the routers' shares.
#ifndef MOE_MOE_CHECKPOINT_TRAINING_STATE_H_
#define MOE_MOE_CHECKPOINT_TRAINING_STATE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/writer.h"
#include "moe/run/context.h"
#include "moe/state/module.h"
#include "moe/state/parameter.h"
#include "moe/train/optimizer.h"

namespace moe {

// The training state of one rank, as states of canonical tensors:
//   master, m, v  of what is trained    value  of what is not (a router's expert bias)
//   share         of a router, float64: what the global balance loss compares the next step with
// Borrows what it is made of.
class TrainingState {
 public:
  TrainingState(ParameterStore& parameters, Optimizer& optimizer, std::vector<ModuleState> shares,
                const Context& context)
      : parameters_(parameters),
        optimizer_(&optimizer),
        shares_(std::move(shares)),
        context_(context) {}
  // The weights alone, to be restored.
  TrainingState(ParameterStore& parameters, const Context& context)
      : parameters_(parameters), context_(context) {}

  // What this rank writes: over all ranks each element once, by its owner (OptimizerState::Slice).
  // Valid until the state moves. On a CUDA device a copy in host memory. Parts whose values are in
  // a file have none (their data is null): ReadParts has them. Blocks the host.
  absl::StatusOr<absl::Span<const StatePart>> PartsToWrite();
  // Visits the parts that PartsToWrite returned last, in its order, with their values, which are
  // valid until `visit` returns: all at once, or in a file a page at a time. Errors of
  // OptimizerState::ForEach and of `visit`.
  absl::Status ReadParts(VisitParts visit);

  // Bytes of all parts that this rank writes once steps have been taken.
  int64_t BytesToWrite();

  // Sum of HashUnits over the canonical tensors of all ranks, masters and what is not trained:
  // equal weights give an equal hash at any layout. Collective, blocks the host.
  absl::StatusOr<uint64_t> HashWeights(const Site& site = {});

  // Reads all that this rank holds, and sets the steps taken. kInvalidArgument, naming the tensor:
  // the checkpoint has other tensors or shapes; kDataLoss: it is damaged, has values that are not
  // finite, or what all ranks read has another hash than what was written. After an error the state
  // is that of no run until a Restore, which overwrites all of it, succeeds. Collective, blocks the
  // host; the same status on every rank, but for errors of the communicator.
  absl::Status Restore(CheckpointReader& reader, int64_t steps_taken, const Site& site = {});

 private:
  struct Held;
  using Hashes = std::array<uint64_t, 4>;  // master, m, v, value
  // Whether the optimiser determines the elements of `parameter` that this rank keeps.
  bool IsSliced(const Parameter& parameter) const {
    return optimizer_ != nullptr && parameter.spec().trainable;
  }
  using VisitHeld = absl::FunctionRef<absl::Status(absl::Span<const Held>)>;
  // Visits all boxes: those of the optimiser as it visits its slices, and then the others. Without
  // a use at once, and without what is in a file alone.
  absl::Status ForEachHeld(std::optional<StateUse> use, VisitHeld visit);
  std::vector<Held> HeldOf(absl::Span<const OptimizerState::Slice> slices) const;
  std::vector<Held> HeldByStore() const;
  // Collects into parts_ what this rank owns of the states named.
  absl::Status CollectParts(absl::Span<const absl::string_view> states);
  void AddParts(absl::Span<const Held> held, absl::Span<const absl::string_view> states);
  void AddShares();
  bool AllInMemory() const;  // the values of parts_
  // Visits what CollectParts(states) would collect, with values, page by page; uses parts_.
  absl::Status VisitPages(absl::Span<const absl::string_view> states, VisitParts visit);
  absl::Status CopyToHost();
  absl::Status CheckTensors(const CheckpointReader& reader, const Site& site);
  absl::Status ReadAll(CheckpointReader& reader, Hashes& hashes);
  absl::Status Read(CheckpointReader& reader, const Held& held, Hashes& hashes);
  absl::Status SumOverRanks(Hashes& hashes, const Site& site);
  absl::Status CheckHashes(CheckpointReader& reader, const Hashes& hashes);
  absl::Status Agreed(const absl::Status& mine, const Site& site);

  ParameterStore& parameters_;
  Optimizer* const optimizer_ = nullptr;  // nullptr: weights alone
  const std::vector<ModuleState> shares_;
  const Context context_;
  std::vector<StatePart> parts_;
  std::vector<float> host_;  // copies of a CUDA device's memory
};

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_TRAINING_STATE_H_
