// Weights in parts (ZeRO-3): gathered for a module shortly before it reads them.
#ifndef MOE_MOE_ZERO_WEIGHT_SOURCE_H_
#define MOE_MOE_ZERO_WEIGHT_SOURCE_H_

#include <cstdint>
#include <deque>
#include <vector>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"
#include "moe/state/weight_lease.h"
#include "moe/zero/optimizer_state.h"
#include "moe/zero/shard_cut.h"
#include "moe/zero/weight_gather.h"

namespace moe {

// Gathers what modules lease from the parts that the ranks of its holders keep, into one of two
// blocks of memory: one has the module that computes, the other the next one, which is gathered
// meanwhile. A block keeps its values after Release until the memory is needed. Parameters that no
// ranks share out cost a comparison.
//
// The next module is the one that came next when the same two were leased in a row before: the
// order forward, back and into the next round. Past the end of a round it is gathered ahead where
// the step before had more rounds, and not in evaluations.
//
// All ranks that hold a parameter lease the same modules in the same order, whatever tokens they
// have. Gathers run on a stream and in a lane of their own, so that they cross neither the
// exchanges of tokens nor the sums of gradients. A host that holds more leases at a time than two
// blocks have room for makes it take more.
class GatheredWeights final : public WeightSource {
 public:
  // Borrows all; the values of buckets with weights in parts are hidden so far
  // (OptimizerState::Create). `stream`: Session::WeightStream.
  GatheredWeights(absl::Span<const ParameterBucket> buckets, const OptimizerState& state,
                  ParameterStore& store, const Context& context, Stream& stream);
  // Waits for gathers: whoever gives up a step has aborted the mesh before.
  ~GatheredWeights() override;

  // Collective over the holders of what is gathered. Errors, which name the step and the layer:
  // those of the gather; kResourceExhausted for the block's memory, in the first steps alone.
  absl::Status Acquire(const Pass& pass, absl::Span<Parameter* const> parameters) override;
  void Release(absl::Span<Parameter* const> parameters) override;

  // To be called on all ranks before the parts change: what was gathered is of no use afterwards,
  // and what is still being gathered has left the parts. kFailedPrecondition under a lease.
  absl::Status Forget();

  // Bytes that this rank has sent so far; holders: canonical.
  int64_t bytes_sent(MeshGroup holders) const { return gather_.bytes_sent(holders); }
  // Bytes of the blocks: allocated, and by the formula, two of the largest module.
  int64_t bytes() const;
  int64_t formula_bytes() const;

 private:
  struct Tensor {
    Parameter* parameter;
    int64_t first_byte, bytes;  // in the block
  };
  // Bytes of one bucket that follow each other there and in the block.
  struct Run {
    size_t bucket;
    absl::Span<const uint8_t> own;
    int64_t first_byte, bytes;  // in the block
    std::vector<int64_t> part_bytes;
  };
  struct Bundle;
  // What was leased after a bundle, and after `before` and it, when this happened last.
  struct Next {
    const Bundle* before;
    bool training;
    Bundle* bundle = nullptr;
    bool next_round = false;
  };
  // What a module leases at once.
  struct Bundle {
    std::vector<Parameter*> parameters;
    std::vector<Tensor> tensors;  // of those in parts
    std::vector<Run> runs;
    int64_t bytes = 0, elements = 0;
    int32_t layer = -1;     // where it was leased last
    int block = -1;         // that has its values, or will have
    bool gathered = false;  // once at least
    bool rounded = false;   // vectors have been rounded since Forget
    std::vector<Next> next;
  };
  struct Block {
    Buffer memory;
    Bundle* bundle = nullptr;
    Event gathered;
    bool joined = false;  // the compute stream waits for `gathered`
    int64_t leases = 0;   // of its tensors
    int64_t used = 0;     // when: the larger, the later
  };
  struct Residence {
    int64_t bucket = -1;  // that has the parameter in parts
    size_t position = 0;  // in the bucket
    int64_t leases = 0;
    int block = -1;  // where a lease reads it
  };

  Bundle& BundleOf(absl::Span<Parameter* const> parameters);
  Bundle MakeBundle(absl::Span<Parameter* const> parameters) const;
  void AddRun(size_t bucket, size_t first, size_t last, Bundle& bundle) const;
  Next& NextOfNow();
  void Follow(Bundle& bundle, const Pass& pass);
  absl::Status GatherNext(const Site& site);
  int FreeBlock(bool must);
  absl::Status Gather(Bundle& bundle, int block, const Site& site);
  absl::Status Show(Bundle& bundle, const Site& site);
  absl::Status RoundVectors(const Bundle& bundle);
  Residence& ResidenceOf(const Parameter& parameter) {
    return residences_[static_cast<size_t>(parameter.index())];
  }

  const absl::Span<const ParameterBucket> buckets_;
  const OptimizerState& state_;
  ParameterStore& store_;
  const Context context_;
  Stream& stream_;
  std::vector<Residence> residences_;  // by Parameter::index
  std::deque<Bundle> bundles_;
  std::deque<Block> blocks_;
  int64_t gathered_bundles_ = 0, largest_bytes_ = 0, largest_elements_ = 0;
  int64_t uses_ = 0;
  // The two bundles that were leased last, where they were in one round, that of site_.
  Bundle *before_ = nullptr, *now_ = nullptr;
  Site site_;
  bool training_ = false;                 // whether site_ is not in an evaluation
  int64_t rounds_ = 0, last_rounds_ = 0;  // rounds of this step so far, and of the step before
  WeightGather gather_;                   // last: what is in flight ends before its memory goes
};

}  // namespace moe

#endif  // MOE_MOE_ZERO_WEIGHT_SOURCE_H_
