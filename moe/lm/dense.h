// What the dense parts of the reference model share: timing, normalisation.
#ifndef MOE_MOE_LM_DENSE_H_
#define MOE_MOE_LM_DENSE_H_

#include <string>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "kernels/norm/rms_norm.h"
#include "moe/run/pass.h"
#include "moe/state/parameter.h"

namespace moe::lm {

// Runs `body` and counts its time in the compute stream as dense work; `name`, a literal, is what a
// time line calls it.
template <typename Body>
absl::Status TimedDense(const Pass& pass, const char* name, Body body) {
  return Timed(pass, {.phase = Phase::kDense, .name = name}, *pass.context.compute, body);
}

// What backward needs of one normalisation.
template <typename T>
struct NormSaved {
  MatrixView<const T> x;   // [T, G H]
  MatrixView<T> y;         // [T, G H]
  absl::Span<float> rstd;  // [T G]
};

// Columns of rows that ranks hold apart, [first, first + x.cols()), and the sums along whole rows.
struct NormColumns {
  int64_t first = 0;
  RowTree tree = {};  // without leaves: columns are whole rows, or groups
};

// RMSNorm with its weight "<name>" [H], which starts as ones; of every one of the G groups of H
// columns (heads) that x has.
template <typename T>
class Norm {
 public:
  static absl::StatusOr<Norm> Create(const std::string& name, int64_t hidden_size, float epsilon,
                                     ParameterStore& store);

  // saved.y = RMSNorm(x); takes kept memory for saved.y and saved.rstd.
  absl::Status Forward(const Pass& pass, MatrixView<const T> x, NormSaved<T>& saved) const;
  // The same into y, which becomes saved.y.
  absl::Status Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y,
                       NormSaved<T>& saved, const NormColumns& columns = {}) const;
  // dx (+)= gradient by x; a partial of the weight for each segment [S + 1] of the rows is added,
  // and the weight marked ready. A segment without rows has no partial.
  absl::Status Backward(const Pass& pass, const NormSaved<T>& saved,
                        absl::Span<const int64_t> segments, MatrixView<const T> dy,
                        MatrixView<T> dx, Write write_dx, GradientReady ready) const;
  // The same of G groups, whose segments are of these: a partial of all rows for each that has
  // some, [S + 1].
  absl::Status GroupsBackward(const Pass& pass, const NormSaved<T>& saved,
                              absl::Span<const int64_t> segments, MatrixView<const T> dy,
                              MatrixView<T> dx, GradientReady ready) const;
  // The same of columns of one group: a partial of all rows, 0 in other columns.
  absl::Status ColumnsBackward(const Pass& pass, const NormSaved<T>& saved,
                               const NormColumns& columns, MatrixView<const T> dy, MatrixView<T> dx,
                               GradientReady ready) const;

  absl::Span<const float> weight() const { return weight_->vector(); }

 private:
  // One partial, of rows with `rstd`.
  absl::Status AddPartial(const Pass& pass, MatrixView<const T> x, absl::Span<const float> rstd,
                          MatrixView<const T> dy, MatrixView<T> dx, Write write_dx,
                          const NormColumns& columns = {}) const;
  Norm(Parameter* weight, float epsilon) : weight_(weight), epsilon_(epsilon) {}

  Parameter* weight_;
  float epsilon_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_DENSE_H_
