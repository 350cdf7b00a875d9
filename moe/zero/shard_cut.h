// How the ranks that hold the same parameters share them out, bucket by bucket.
#ifndef MOE_MOE_ZERO_SHARD_CUT_H_
#define MOE_MOE_ZERO_SHARD_CUT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include <absl/types/span.h>

#include "comm/communicator.h"
#include "comm/mesh/mesh.h"
#include "moe/state/parameter.h"

namespace moe {

// Which state the ranks that hold the same parameters share out (Rajbhandari et al., "ZeRO" (SC
// '20), arXiv:1910.02054). A step has the same bits in layout-invariant numerics; in fast numerics
// the order of a sum depends on it.
enum class ZeroStage : uint8_t {
  kNone,       // every rank keeps all of it
  kOptimizer,  // masters and moments: sums of gradients are scattered, weights gathered
  kGradients,  // ... and the sums, which travel after every round
};

// Bytes that each of `ranks` ranks keeps, in the mean, of an element of parameters that they share:
// what layers read, the sum of its gradients, its moments, its master where that is not what layers
// read. docs/zero.md
double StateBytesOfElement(ZeroStage zero, DType compute, Numerics numerics, int ranks);

// Elements [begin, end).
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};
// What is in both; of a size below 1 where nothing is.
inline ElementRange Common(ElementRange a, ElementRange b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Elements of each of `ranks` parts, in rank order, of parameters that lie one behind the other:
// cut between the row groups of their tensors (unit_grid.h), part i where such a cut is nearest to
// total * i / ranks. A part may be empty. `debts`, of each part or none: how many elements the
// parts up to it had less than their share in buckets before; they get them now, and what is left
// over goes there. So a rank's share of all buckets is even to a row group, whatever their number.
std::vector<int64_t> ShardCut(absl::Span<Parameter* const> parameters, int ranks,
                              absl::Span<int64_t> debts = {});

// Parameters whose gradients travel together, one behind the other.
struct ParameterBucket {
  MeshGroup holders = MeshGroup::kWorld;  // canonical (Mesh::Canonical)
  std::vector<Parameter*> parameters;
  std::vector<int64_t> first = {0};  // element of each, and the end
  std::vector<int64_t> counts;       // ShardCut over the holders
  ElementRange own;                  // this rank's part: it alone speaks for these elements
  bool sharded = false;              // by ZeRO: the state of `own` alone is kept here

  int64_t elements() const { return first.back(); }
  ElementRange kept() const { return sharded ? own : ElementRange{0, elements()}; }
};

// A part of one parameter. `bucket`: which elements of the bucket these are.
struct ParameterPiece {
  Parameter* parameter = nullptr;
  ElementRange range, bucket;
};

// The pieces of a bucket's parameters that lie in `range`, in its order.
std::vector<ParameterPiece> PiecesOf(const ParameterBucket& bucket, ElementRange range);

struct BucketOptions {
  int64_t bucket_bytes = 0;  // a bucket closes when its sums have this much
  int64_t element_bytes = 0;
  ZeroStage zero = ZeroStage::kNone;
};

// The trainable parameters, those of other holders apart, last first (the order in which backward
// ends with them), but those of a slab first to last: a bucket is where its first slab is.
std::vector<ParameterBucket> MakeBuckets(const ParameterStore& store, const BucketOptions& options,
                                         const Mesh& mesh);

}  // namespace moe

#endif  // MOE_MOE_ZERO_SHARD_CUT_H_
