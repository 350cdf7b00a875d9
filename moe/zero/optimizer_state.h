// Masters and moments: what an optimizer keeps of the parameters on this rank, bucket by bucket.
#ifndef MOE_MOE_ZERO_OPTIMIZER_STATE_H_
#define MOE_MOE_ZERO_OPTIMIZER_STATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"
#include "moe/zero/offload.h"
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
    size_t bucket = 0;
    ElementRange own;  // elements of the parameter
    // Masters that the optimizer alone keeps, if keeps_master; empty while they are in a file.
    bool keeps_master = false;
    absl::Span<float> kept_master;
    absl::Span<float> mean, mean_square;  // empty while they are in a file
    // What layers read of the same elements, where weights are in parts: the master itself unless
    // there is a kept one. Otherwise empty: the parameter has it.
    absl::Span<uint8_t> weights;

    // [piece.range.size()]; nullptr while it is in a file.
    float* master() const {
      if (keeps_master) return kept_master.data();
      if (!weights.empty()) return reinterpret_cast<float*>(weights.data());
      return piece.parameter->master().data() + piece.range.begin;
    }
  };

  // Moments start as zeros. Masters of sharded buckets, and in a file those that layers do not
  // read, are copied here, and what layers read moves into blocks (ParameterStore::Pack, with its
  // errors), of which only the own part stays where weights are in parts. `file`: for buckets whose
  // placement names that tier. Blocks the host. kResourceExhausted; errors of StateFile::Create.
  static absl::StatusOr<OptimizerState> Create(absl::Span<const ParameterBucket> buckets,
                                               ParameterStore& store, const Context& context,
                                               const StateFileOptions& file = {});

  absl::Span<const Slice> slices() const { return slices_; }
  // Visits the slices of buckets [begin, end), in order, with their values in memory until `visit`
  // returns: all at once, or in a file page by page, of which the next is read meanwhile. After an
  // error of `visit` the state is undefined. Errors: those of `visit` and of StateFile::Acquire.
  using Visit = absl::FunctionRef<absl::Status(absl::Span<const Slice> slices)>;
  absl::Status ForEach(size_t begin_bucket, size_t end_bucket, StateUse use, Visit visit);
  absl::Status ForEach(StateUse use, Visit visit) { return ForEach(0, blocks_.size(), use, visit); }

  // Empty unless the bucket is sharded, or in a file without its masters.
  const BucketBlock& block(size_t bucket) const { return blocks_[bucket]; }
  // Bytes of memory: the moments and the masters that the optimizer alone keeps, or the buffers of
  // their file, and weights in parts.
  int64_t bytes() const;
  // Bytes of the largest page in a file, of which two are in memory; 0 where all state is.
  int64_t page_bytes() const { return page_bytes_; }

 private:
  // Elements of a bucket whose values lie together: means, means of squares, masters if kept.
  struct Page {
    ElementRange range;
    size_t begin_slice = 0, end_slice = 0;
    bool keeps_masters = false;

    int64_t bytes() const {
      return (keeps_masters ? 3 : 2) * range.size() * static_cast<int64_t>(sizeof(float));
    }
  };
  void AddPages(size_t b, const ParameterBucket& bucket, DType compute, int64_t page_bytes);
  absl::Status Keep(size_t b, const Context& context);
  absl::Status Pack(absl::Span<const size_t> pack, absl::Span<const ParameterBucket> buckets,
                    ParameterStore& store, const Context& context);
  absl::Status KeepOwn(size_t b, const ParameterBucket& bucket, const Context& context);
  // Sets the spans of the page's slices to their elements of `values`.
  void Place(const Page& page, absl::Span<float> values);
  void Hide(const Page& page);
  absl::Status CopyMasters(const Page& page, Stream& stream);

  std::vector<Slice> slices_;             // in bucket order
  std::vector<Page> pages_;               // in bucket order; in memory one a bucket
  std::vector<size_t> first_page_ = {0};  // first page of each bucket, and the end
  std::vector<BucketBlock> blocks_;
  std::vector<Buffer> weights_;  // own parts, where weights are in parts
  int64_t page_bytes_ = 0;
  Stream* stream_ = nullptr;
  std::vector<Buffer> values_;       // by page; empty where the pages are in a file
  std::unique_ptr<StateFile> file_;  // nullptr: all pages are in memory
};

}  // namespace moe

#endif  // MOE_MOE_ZERO_OPTIMIZER_STATE_H_
