// Sums gradients over ranks while backward is still running.
#ifndef MOE_MOE_GRADIENT_REDUCER_H_
#define MOE_MOE_GRADIENT_REDUCER_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "comm/all_reduce.h"
#include "kernels/exact_sum/scaled_sum.h"
#include "moe/context.h"
#include "moe/parameter.h"

namespace moe {

struct GradientReducerOptions {
  int64_t bucket_bytes = int64_t{25} << 20;  // a bucket closes when it holds at least this much
  AllReduceAlgorithm algorithm = AllReduceAlgorithm::kRing;
  // Layout-invariant numerics. Required: how many terms are added to one gradient in a step, at
  // most, over all ranks: its micro-batches, times ParameterSpec::partials. More could leave int64.
  int64_t max_terms = 0;
  int unit_log2 = ExactGrid().unit_log2;  // of the exact grid
};

// Packs the parameters of a store into buckets, last parameter first (the order backward fills
// them), replicated and expert parameters apart, and sums each bucket over its group on a stream of
// its own as soon as its last gradient is ready. Buckets start in a fixed order on every rank,
// whatever order gradients finish in, so ranks cannot cross.
// Source: Li et al., "PyTorch Distributed" (VLDB 2020), arXiv:2006.15704, section 3.2.
//
// fast: float32 buckets. layout-invariant: int64 buckets on the exact grid, each with one more
// element that counts the values the grid could not hold.
class GradientReducer {
 public:
  // Buckets that still travel end first: what sums them uses memory of this object.
  ~GradientReducer();

  // Gives every trainable parameter of `store` its accumulator; MarkReady and Gradient refuse the
  // others (kInvalidArgument). `stream`: the compute stream, or a queue of its device.
  static absl::StatusOr<std::unique_ptr<GradientReducer>> Create(
      const GradientReducerOptions& options, ParameterStore& store, const Context& context,
      Stream& stream);

  // Empties all buckets: the first partial of a parameter overwrites. Before the first round of a
  // step. loss_scale_log2: the gradients to come are 2^loss_scale_log2 times larger, and so is the
  // unit of the exact grid.
  absl::Status Begin(int loss_scale_log2 = 0);

  // The gradient of `parameter` is complete once the compute stream passes this point. Once per
  // parameter and step, in the last round.
  absl::Status MarkReady(const Parameter& parameter);

  // Makes the compute stream wait for the last bucket.
  absl::Status Finish();

  // After Finish: how many gradient elements over all ranks of this rank's buckets of a group were
  // NaN, infinite or off the grid (layout-invariant; 0 in fast). Blocks the host.
  absl::StatusOr<int64_t> NonFinite(ParameterGroup group) const;
  // This rank's share of them all: the sum over an expert-parallel group has each element once.
  absl::StatusOr<int64_t> NonFiniteShare() const;

  // The summed gradient times `scale` (1 / number of micro-batches / loss scale): a view into the
  // bucket, in memory of the compute stream's device.
  absl::StatusOr<ScaledSum> Sum(const Parameter& parameter, double scale) const;
  // The same as float32 in `scratch`, which has parameter.size() elements or more there.
  absl::StatusOr<absl::Span<const float>> Gradient(const Parameter& parameter, double scale,
                                                   absl::Span<float> scratch, Stream& stream) const;

  int buckets() const { return static_cast<int>(buckets_.size()); }
  // What this rank has done so far for the parameters of a group, if that is more than one rank.
  struct Traffic {
    int64_t buckets = 0;     // summed over ranks
    int64_t bytes_sent = 0;  // ring formula
  };
  const Traffic& traffic(ParameterGroup group) const { return traffic_[static_cast<int>(group)]; }

 private:
  struct Bucket {
    ParameterGroup group = ParameterGroup::kReplicated;
    int64_t elements = 0;  // without the counter
    int parameters = 0;
    int ready = 0;
    Buffer sum;  // float32, or int64 with one counter at the end
    Event filled;
  };

  struct Place {
    int bucket = 0;
    int64_t offset = 0;  // elements
    bool empty = true;   // of this step's partials
  };

  GradientReducer(const GradientReducerOptions& options, ParameterStore& store,
                  const Context& context, Stream& stream)
      : options_(options),
        store_(store),
        context_(context),
        stream_(stream),
        grid_({.unit_log2 = options.unit_log2,
               .max_terms = std::max<int64_t>(1, options.max_terms)}) {}
  static std::vector<std::vector<const Parameter*>> Partition(const ParameterStore& store,
                                                              int64_t bucket_bytes,
                                                              int64_t element_bytes);
  absl::Status Launch(Bucket& bucket);
  void SetAccumulators();
  int64_t* NonFiniteOf(const Bucket& bucket) const {
    return &bucket.sum.span<int64_t>()[static_cast<size_t>(bucket.elements)];
  }

  const GradientReducerOptions options_;
  ParameterStore& store_;
  const Context context_;
  Stream& stream_;
  bool in_flight_ = false;  // buckets were launched that Finish has not joined
  ExactGrid grid_;          // of this step
  std::unique_ptr<AllReducer> world_, expert_;
  std::vector<Place> place_;     // by parameter index
  std::vector<Bucket> buckets_;  // in launch order
  size_t next_ = 0;              // first bucket not yet launched
  Traffic traffic_[2];           // by group
};

}  // namespace moe

#endif  // MOE_MOE_GRADIENT_REDUCER_H_
