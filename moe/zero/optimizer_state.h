// Masters and moments: what an optimizer keeps of the parameters on this rank, bucket by bucket.
#ifndef MOE_MOE_ZERO_OPTIMIZER_STATE_H_
#define MOE_MOE_ZERO_OPTIMIZER_STATE_H_

#include <cstdint>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"
#include "moe/zero/shard_cut.h"

namespace moe {

// What layers read of a bucket, contiguous: bytes of a block that the buckets of a slab share, and
// which is aligned (ParameterStore::Pack).
struct BucketBlock {
  std::vector<int64_t> first_byte;     // of each parameter, and the end
  std::vector<int64_t> element_bytes;  // of each parameter
  std::vector<int64_t> part_bytes;     // of each rank's part
  absl::Span<uint8_t> own;             // this rank's part
  absl::Span<uint8_t> bytes;           // all parts; empty where weights are in parts
};

class OptimizerState {
 public:
  // An optimizer's share of a parameter on this rank: elements piece.range (all without ZeRO), in
  // memory of the parameter's device. Of the ranks with the same elements this one alone counts
  // `own`, whole row groups.
  struct Slice {
    ParameterPiece piece;
    ElementRange own;               // elements of the parameter
    absl::Span<float> kept_master;  // masters that the optimizer alone keeps; otherwise empty
    absl::Span<float> mean, mean_square;
    // What layers read of the same elements, where weights are in parts: the master itself unless
    // there is a kept_master. Otherwise empty: the parameter has it.
    absl::Span<uint8_t> weights;

    absl::Span<float> master() const {
      if (!kept_master.empty()) return kept_master;
      if (!weights.empty()) {
        return {reinterpret_cast<float*>(weights.data()), weights.size() / sizeof(float)};
      }
      return piece.parameter->master().subspan(static_cast<size_t>(piece.range.begin),
                                               static_cast<size_t>(piece.range.size()));
    }
  };

  // Moments start as zeros. For sharded buckets masters are copied here, and what layers read moves
  // into blocks (ParameterStore::Pack, with its errors), of which only the own part stays where
  // weights are in parts. Blocks the host. kResourceExhausted.
  static absl::StatusOr<OptimizerState> Create(absl::Span<const ParameterBucket> buckets,
                                               ParameterStore& store, const Context& context);

  absl::Span<const Slice> slices() const { return slices_; }
  absl::Span<const Slice> slices(size_t begin_bucket, size_t end_bucket) const {
    return slices().subspan(first_slice_[begin_bucket],
                            first_slice_[end_bucket] - first_slice_[begin_bucket]);
  }
  // Empty unless the bucket is sharded.
  const BucketBlock& block(size_t bucket) const { return blocks_[bucket]; }
  // Bytes of the moments, of the masters that the optimizer alone keeps, and of weights in parts.
  int64_t bytes() const;

 private:
  absl::Status Keep(const ParameterBucket& bucket, DType compute, const Context& context);
  absl::Status Pack(absl::Span<const size_t> pack, absl::Span<const ParameterBucket> buckets,
                    ParameterStore& store, const Context& context);
  absl::Status KeepOwn(size_t b, const ParameterBucket& bucket, const Context& context);

  std::vector<Buffer> values_;             // by bucket: means, means of squares, masters
  std::vector<Slice> slices_;              // in bucket order
  std::vector<size_t> first_slice_ = {0};  // first slice of each bucket, and the end
  std::vector<BucketBlock> blocks_;
  std::vector<Buffer> weights_;  // own parts, where weights are in parts
};

}  // namespace moe

#endif  // MOE_MOE_ZERO_OPTIMIZER_STATE_H_
