// Leases: for how long a module reads the values of parameters.
#ifndef MOE_MOE_STATE_WEIGHT_LEASE_H_
#define MOE_MOE_STATE_WEIGHT_LEASE_H_

#include <cstdint>
#include <utility>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "moe/run/pass.h"
#include "moe/state/parameter.h"

namespace moe {

// Local experts [first, last) of a layer whose rows are known, under a lease of all of them.
struct ExpertRows {
  int first = 0, last = 0;
  absl::Span<const int64_t> offsets = {};     // rows of each local expert, [L + 1]
  absl::Span<Parameter* const> weights = {};  // [L] a matrix of each: names the expert
};
// Computes experts [first, last), whose values are readable until it returns.
using ComputeExperts = absl::FunctionRef<absl::Status(int first, int last)>;

// Provides values of parameters that are not in memory at all times: they are gathered from several
// ranks, or read from a file, shortly before a module needs them. Layers read what the source
// passes to ParameterStore::SetValues.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // The values of `parameters` are readable by what is enqueued on the pass's compute stream from
  // now on, until Release of as many. Several leases may have the same parameter.
  virtual absl::Status Acquire(const Pass& pass, absl::Span<Parameter* const> parameters) = 0;
  // All that reads them has been enqueued.
  virtual void Release(absl::Span<Parameter* const> parameters) = 0;
  // Calls `compute` until all experts that have rows are computed, each once: several times, in any
  // order, where a lease leaves experts out until it is known which of them have rows.
  virtual absl::Status ForExperts(const Pass& /*pass*/, const ExpertRows& experts,
                                  ComputeExperts compute) {
    return compute(experts.first, experts.last);
  }
};

// Computes experts under a lease of their layer.
inline absl::Status ForExperts(const Pass& pass, const ExpertRows& experts,
                               ComputeExperts compute) {
  if (pass.weights == nullptr) return compute(experts.first, experts.last);
  return pass.weights->ForExperts(pass, experts, compute);
}

// Holds the values of a module's parameters in memory for one pass, around all that reads them.
// Move-only.
class WeightLease {
 public:
  // Acquires `parameters`, which the caller keeps, for the compute stream. Without pass.weights all
  // values are resident, and the call costs a comparison. Collective where the values are in parts
  // (weight_source.h). Errors of WeightSource::Acquire.
  static absl::StatusOr<WeightLease> Take(const Pass& pass,
                                          absl::Span<Parameter* const> parameters) {
    if (pass.weights != nullptr) {
      MOE_RETURN_IF_ERROR(pass.weights->Acquire(pass, parameters));
    }
    return WeightLease(pass.weights, parameters);
  }
  WeightLease(WeightLease&& other) noexcept
      : source_(std::exchange(other.source_, nullptr)), parameters_(other.parameters_) {}
  WeightLease& operator=(WeightLease&&) = delete;
  ~WeightLease() {
    if (source_ != nullptr) source_->Release(parameters_);
  }

 private:
  WeightLease(WeightSource* source, absl::Span<Parameter* const> parameters)
      : source_(source), parameters_(parameters) {}

  WeightSource* source_;
  absl::Span<Parameter* const> parameters_;
};

}  // namespace moe

#endif  // MOE_MOE_STATE_WEIGHT_LEASE_H_
