// Sums gradients over ranks while backward is still running.
#ifndef MOE_MOE_TRAIN_GRADIENT_REDUCER_H_
#define MOE_MOE_TRAIN_GRADIENT_REDUCER_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "comm/all_reduce.h"
#include "kernels/exact_sum/scaled_sum.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"
#include "moe/train/gradient_norm.h"
#include "moe/zero/shard_cut.h"

namespace moe {

struct GradientReducerOptions {
  int64_t bucket_bytes = int64_t{25} << 20;  // a bucket closes when it holds at least this much
  AllReduceAlgorithm algorithm = AllReduceAlgorithm::kRing;
  // Layout-invariant numerics. Required: how many terms are added to one gradient in a step, at
  // most, over all ranks: its micro-batches, times their row segments (moe/tensor/own_rows.h) and
  // ParameterSpec::partials. More could leave int64.
  int64_t max_terms = 0;
  StatePlacement placement = {};
};

// Packs the parameters of a store into buckets (MakeBuckets) and sums each bucket over its group on
// a stream of its own as soon as its last gradient is ready. Buckets start in a fixed order on
// every rank, whatever order gradients finish in, so ranks cannot cross. Source: Li et al.,
// "PyTorch Distributed" (VLDB 2020), arXiv:2006.15704, section 3.2.
//
// fast: float32 buckets. layout-invariant: int64 buckets on the exact grid, beside which each rank
// keeps a GridTally of its own partials of every parameter.
//
// A rank receives only the sums of its own part of a sharded bucket (ParameterBucket::own). Where
// the sums are in parts, partials of a round add up in a few buffers (RoundBuffersOf, unless
// backward has more buckets open at a time), from which they are added to the part's sum.
class GradientReducer {
 public:
  // Aborts the mesh if buckets still travel, and waits for them: they use memory of this object.
  ~GradientReducer();

  // `stream`: the compute stream, or a queue of its device. Allocates no memory for sums yet.
  static absl::StatusOr<std::unique_ptr<GradientReducer>> Create(
      const GradientReducerOptions& options, ParameterStore& store, const Context& context,
      Stream& stream);

  // Empties all buckets: the first partial of a parameter overwrites. To be called before the first
  // round of a step. The first call allocates the sums and gives every trainable parameter its
  // accumulator; MarkReady and Gradient refuse all other parameters (kInvalidArgument).
  // loss_scale_log2: the gradients that follow are 2^loss_scale_log2 times larger, and so is the
  // unit of the exact grid, otherwise 2^unit_log2.
  absl::Status Begin(int loss_scale_log2 = 0, int unit_log2 = ExactGrid().unit_log2);
  // Number of terms, over all ranks, that one gradient on the exact grid has room for.
  int64_t max_terms() const { return grid_.max_terms; }

  // To be called before every other round of a chunk (Parameter::chunk). kFailedPrecondition unless
  // the chunk's previous round has been marked ready, where buckets travel in each round
  // (travels_each_round).
  absl::Status BeginRound(int chunk = 0);
  // Whether the sums of `parameter` travel in each round; those of kEnds never do (OfEnds).
  bool travels_each_round(const Parameter& parameter) const {
    return travels_each_round() && parameter.spec().holders != MeshGroup::kEnds;
  }

  // The gradient of `parameter` is complete once the compute stream passes this point. Called once
  // per parameter and step, in the last round; once in each round where its bucket travels in each.
  // `site`: site of the exchanges that this call starts, under names of their own.
  absl::Status MarkReady(const Parameter& parameter, const Site& site = {});

  // Makes the compute stream wait for the last bucket. Those of kEnds travel now: the other end of
  // the pipeline may need passes of this one until its own are done.
  absl::Status Finish();

  // After Finish: norm of all summed gradients times `scale`, over the trainable parameters of all
  // ranks, every expert and every replica counted once, at any ZeRO stage. It is the root of an
  // exact sum of the units' sums of squares (unit_grid.h), each from the rank that owns the unit,
  // so it has the same bits at any layout in layout-invariant numerics. A unit's sum of squares of
  // 2^72 or more is not finite; with another grid unit than 2^-50 this limit is as much larger or
  // smaller. Collective over the world; blocks the host; one launch on CUDA. kFailedPrecondition
  // before Finish.
  absl::StatusOr<GradientNorm> Norm(double scale, const Site& site = {}) const;

  // After Finish: the first parameter, in the order of backward, that had a partial of this rank
  // which was not finite or, without the exact grid, a sum; nullptr: none. Blocks the host.
  absl::StatusOr<const Parameter*> NonFiniteParameter() const;

  // The summed gradient times `scale` (1 / number of micro-batches / loss scale): a view into the
  // bucket, in memory of the compute stream's device. kFailedPrecondition where ZeRO divides the
  // sum among several ranks.
  absl::StatusOr<ScaledSum> Sum(const Parameter& parameter, double scale) const;
  // The sums of all buckets, and the position in them of element `element` of bucket `b`, which is
  // one of the bucket's summed().
  ScaledSum Sums(double scale) const;
  int64_t At(size_t b, int64_t element) const;
  // Sum as float32 in `scratch`, memory of the same device with parameter.size() elements or more.
  absl::StatusOr<absl::Span<const float>> Gradient(const Parameter& parameter, double scale,
                                                   absl::Span<float> scratch, Stream& stream) const;

  // All buckets, in the order in which they travel.
  absl::Span<const ParameterBucket> buckets() const { return buckets_; }

  // The stream on which buckets travel.
  Stream& stream() const { return stream_; }

  // Traffic of this rank so far for the parameters that a group holds; zero where the group is one
  // rank.
  struct Traffic {
    int64_t buckets = 0;     // summed over ranks
    int64_t bytes_sent = 0;  // ring formula
  };
  const Traffic& traffic(MeshGroup holders) const {
    return traffic_[context_.mesh->Canonical(holders)];
  }
  // Bytes of the sums, including the buffers of rounds.
  int64_t bytes() const;

 private:
  // Buffer in which partials of one round add up until they have travelled.
  struct RoundSums {
    Buffer sum;
    Event travelled;
  };
  struct BucketSums {
    int ready = 0;      // parameters whose gradients are complete in this round
    int64_t first = 0;  // position in `sum_` of the elements that are summed here
    // Where sums are in parts: whether nothing has travelled in this step, and the buffer of this
    // round's partials.
    bool empty = true;
    RoundSums* round = nullptr;
    Event filled;
  };
  // Buckets of a chunk, which travel in their order: [begin, end), the first not yet launched.
  // Those of kEnds are a chunk of their own.
  struct Chunk {
    size_t begin = 0, end = 0, next = 0;
  };
  struct ParameterSums {
    int bucket = 0;
    int64_t first = 0;  // first element in the bucket
    bool empty = true;  // no partial yet in this step; where sums are in parts, in this round
  };

  GradientReducer(const GradientReducerOptions& options, ParameterStore& store,
                  const Context& context, Stream& stream)
      : options_(options),
        store_(store),
        context_(context),
        stream_(stream),
        grid_({.max_terms = std::max<int64_t>(1, options.max_terms)}) {}
  bool exact() const { return context_.numerics == Numerics::kLayoutInvariant; }
  int64_t element_bytes() const { return SumBytesOfElement(context_.numerics); }
  absl::Status Allocate();
  absl::StatusOr<RoundSums*> AddRoundSums();
  // Open: what Parameter::OpenGradient returns. OpenRound: finds memory for the bucket's sums of
  // this round.
  absl::StatusOr<GradAccumulator> Open(const Parameter& parameter);
  absl::Status OpenRound(size_t b);
  bool travels_each_round() const { return options_.placement.sums == Holding::kPart; }
  bool in_parts(size_t b) const { return buckets_[b].placement.sums == Holding::kPart; }
  template <typename T>
  absl::Span<T> SumsOf(size_t b) const {
    return sum_.span<T>().subspan(static_cast<size_t>(sums_[b].first),
                                  static_cast<size_t>(buckets_[b].summed().size()));
  }
  absl::Status ClearEmpty(size_t b);
  absl::Status Launch(size_t b, const Site& site);
  absl::Status LaunchReady(Chunk& chunk, const Site& site);
  template <typename T>
  absl::Status Travel(size_t b, const Site& site);
  Chunk& ChunkOf(const ParameterBucket& bucket) {
    return bucket.holders == MeshGroup::kEnds ? chunks_.back()
                                              : chunks_[static_cast<size_t>(bucket.chunk())];
  }
  absl::Status CheckLaunched(const Chunk& chunk) const;
  absl::Status CheckAllLaunched() const;
  Communicator& HoldersOf(const ParameterBucket& bucket) const {
    return context_.mesh->group(bucket.holders, MeshLane::kGradients);
  }

  const GradientReducerOptions options_;
  ParameterStore& store_;
  const Context context_;
  Stream& stream_;
  // Buckets were launched that Finish has not joined.
  std::optional<SpareMultiprocessors::Use> in_flight_;
  ExactGrid grid_;  // grid of this step
  int loss_scale_log2_ = 0;
  GroupMap<std::unique_ptr<AllReducer>> reducers_;  // by holders of buckets
  std::vector<ParameterSums> parameter_sums_;       // by parameter index
  std::vector<ParameterBucket> buckets_;            // in launch order
  std::vector<BucketSums> sums_;                    // by bucket; empty before the first step
  Buffer sum_;                                      // float32 or int64 sums of all buckets
  Buffer units_;                                    // SquaresUnit of the own parts
  Buffer tallies_;  // GridTally of this rank's partials in this step, by parameter index
  std::vector<std::unique_ptr<RoundSums>> rounds_;
  // Buffers without a bucket, the one that travelled longest ago first.
  std::deque<RoundSums*> free_;
  std::vector<Chunk> chunks_;  // by Parameter::chunk; the last one of kEnds
  Site ends_site_;             // of the passes that completed the latter
  GroupMap<Traffic> traffic_;
};

}  // namespace moe

#endif  // MOE_MOE_TRAIN_GRADIENT_REDUCER_H_
