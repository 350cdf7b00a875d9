// Leases: for how long a module reads the values of parameters.
#ifndef MOE_MOE_STATE_WEIGHT_LEASE_H_
#define MOE_MOE_STATE_WEIGHT_LEASE_H_

#include <utility>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "moe/run/pass.h"
#include "moe/state/parameter.h"

namespace moe {

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
};

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
