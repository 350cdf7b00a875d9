// How the ranks that hold the same parameters share them out, bucket by bucket.
#ifndef MOE_MOE_ZERO_SHARD_CUT_H_
#define MOE_MOE_ZERO_SHARD_CUT_H_

#include <cstdint>
#include <vector>

#include <absl/types/span.h>

#include "comm/mesh/mesh.h"
#include "moe/state/boxes.h"
#include "moe/state/parameter.h"
#include "moe/zero/state_placement.h"

namespace moe {

// Number of elements of each of `ranks` parts, in rank order, of contiguous parameters: cut between
// the row groups of their tensors (unit_grid.h), part i where such a cut is nearest to total * i /
// ranks. A part may be empty. `debts`, none or one for each part: by how many elements the parts up
// to it fell short of their share in earlier buckets; they receive these now, and the remainder is
// stored there. A rank's share of all buckets is therefore even to a row group, whatever their
// number.
std::vector<int64_t> ShardCut(absl::Span<Parameter* const> parameters, int ranks,
                              absl::Span<int64_t> debts = {});

// Parameters whose gradients travel together, contiguous in the bucket.
struct ParameterBucket {
  MeshGroup holders = MeshGroup::kWorld;  // canonical (Mesh::Canonical)
  std::vector<Parameter*> parameters;
  std::vector<int64_t> first = {0};  // element of each, and the end
  std::vector<int64_t> counts;       // ShardCut over the holders
  ElementRange own;                  // this rank's part: it alone counts these elements
  StatePlacement placement;          // all is whole where one rank holds the bucket

  int64_t elements() const { return first.back(); }
  int chunk() const { return parameters.front()->chunk(); }
  // Whether ranks scatter the sums and gather the weights, since each moves its own part alone.
  bool sharded() const { return placement.optimizer == Holding::kPart; }
  // Whether they gather them as soon as they have moved, and not when a module leases them.
  bool gathers_at_once() const { return sharded() && placement.weights == Holding::kWhole; }
  // The elements whose sums, and whose moments and masters, this rank keeps.
  ElementRange summed() const { return Held(placement.sums); }
  ElementRange kept() const { return Held(placement.optimizer); }

 private:
  ElementRange Held(Holding holding) const {
    return holding == Holding::kPart ? own : ElementRange{0, elements()};
  }
};

// A part of one parameter. `bucket`: which elements of the bucket these are.
struct ParameterPiece {
  Parameter* parameter = nullptr;
  ElementRange range, bucket;
};

// The pieces of a bucket's parameters in `range`, in the bucket's order.
std::vector<ParameterPiece> PiecesOf(const ParameterBucket& bucket, ElementRange range);

// The cut of the bucket between row groups, or its end, that is nearest to `element`.
int64_t CutNear(const ParameterBucket& bucket, int64_t element);

struct BucketOptions {
  int64_t bucket_bytes = 0;  // a bucket closes when its sums have at least this size
  int64_t element_bytes = 0;
  StatePlacement placement = {};
};

// The trainable parameters, those of other holders or chunks apart, last first (the order in which
// backward ends with them), but those of a slab first to last: a bucket is where its first slab is.
std::vector<ParameterBucket> MakeBuckets(const ParameterStore& store, const BucketOptions& options,
                                         const Mesh& mesh);

// Where sums are in parts, partials of a round add up in buffers of their own until they have
// travelled: as many elements as the largest of the buckets, and `count` of them, two for each
// group of holders but for one with a single bucket.
struct RoundBuffers {
  int64_t count = 0, elements = 0;
};
RoundBuffers RoundBuffersOf(absl::Span<const ParameterBucket> buckets);

// Bytes of memory for parameters, sums and optimizer state that a rank of `mesh` keeps, by
// BytesOfElement and RoundBuffersOf, without the buffers of state in a file.
double StateBytesOf(absl::Span<const ParameterBucket> buckets, DType compute, Numerics numerics,
                    const Mesh& mesh);

}  // namespace moe

#endif  // MOE_MOE_ZERO_SHARD_CUT_H_
