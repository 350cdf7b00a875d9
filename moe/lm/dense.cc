#include "moe/lm/dense.h"

#include <iterator>

#include "kernels/base/device_arrays.h"
#include "kernels/base/workspace.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/permute/permute.h"

namespace moe::lm {
namespace {

// Of a weight's values those of the columns.
template <typename V>
absl::Span<V> Of(const NormColumns& columns, int64_t count, absl::Span<V> values) {
  if (columns.tree.leaves == 0) return values;
  return values.subspan(static_cast<size_t>(columns.first), static_cast<size_t>(count));
}

}  // namespace

template <typename T>
absl::StatusOr<Norm<T>> Norm<T>::Create(const std::string& name, int64_t hidden_size, float epsilon,
                                        ParameterStore& store) {
  MOE_ASSIGN_OR_RETURN(Parameter* const weight, store.Add({.name = name,
                                                           .rows = 1,
                                                           .cols = hidden_size,
                                                           .initializer = Initializer::kOnes,
                                                           .weight_decay = false}));
  return Norm(weight, epsilon);
}

template <typename T>
absl::Status Norm<T>::Forward(const Pass& pass, MatrixView<const T> x, NormSaved<T>& saved) const {
  MOE_ASSIGN_OR_RETURN(const auto y, pass.kept().Matrix<T>(x.rows(), x.cols()));
  return Forward(pass, x, y, saved);
}

template <typename T>
absl::Status Norm<T>::Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y,
                              NormSaved<T>& saved, const NormColumns& columns) const {
  saved.x = x;
  saved.y = y;
  const int64_t groups = columns.tree.leaves > 0 ? 1 : x.cols() / weight_->size();
  MOE_ASSIGN_OR_RETURN(saved.rstd, pass.kept().Array<float>(x.rows() * groups));
  return RmsNorm<T>(x, Of(columns, x.cols(), weight()), epsilon_, y, saved.rstd,
                    *pass.context.compute, columns.tree);
}

template <typename T>
absl::Status Norm<T>::AddPartial(const Pass& pass, MatrixView<const T> x,
                                 absl::Span<const float> rstd, MatrixView<const T> dy,
                                 MatrixView<T> dx, Write write_dx,
                                 const NormColumns& columns) const {
  const Context& context = pass.context;
  const bool apart = columns.tree.leaves > 0;
  MOE_ASSIGN_OR_RETURN(const GradAccumulator sum, weight_->OpenGradient());
  return sum.Add(
      [&](absl::Span<float> d_weight, Write write) -> absl::Status {
        if (apart && write == Write::kOverwrite) {
          const auto bytes = static_cast<int64_t>(d_weight.size() * sizeof(float));
          MOE_RETURN_IF_ERROR(context.compute->Zero(d_weight.data(), bytes));
        }
        return RmsNormBackward<T>(x, Of(columns, x.cols(), weight()), rstd, dy, dx, write_dx,
                                  Of(columns, x.cols(), d_weight), write, *context.compute,
                                  columns.tree);
      },
      *context.workspace, *context.compute);
}

template <typename T>
absl::Status Norm<T>::ColumnsBackward(const Pass& pass, const NormSaved<T>& saved,
                                      const NormColumns& columns, MatrixView<const T> dy,
                                      MatrixView<T> dx, GradientReady ready) const {
  MOE_RETURN_IF_ERROR(AddPartial(pass, saved.x, saved.rstd, dy, dx, Write::kOverwrite, columns));
  return ready(*weight_);
}

template <typename T>
absl::Status Norm<T>::Backward(const Pass& pass, const NormSaved<T>& saved,
                               absl::Span<const int64_t> segments, MatrixView<const T> dy,
                               MatrixView<T> dx, Write write_dx, GradientReady ready) const {
  for (size_t s = 0; s + 1 < segments.size(); ++s) {
    const int64_t begin = segments[s], end = segments[s + 1];
    if (begin == end) continue;
    MOE_RETURN_IF_ERROR(
        AddPartial(pass, RowRange(saved.x, begin, end),
                   saved.rstd.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
                   RowRange(dy, begin, end), RowRange(dx, begin, end), write_dx));
  }
  return ready(*weight_);
}

template <typename T>
absl::Status Norm<T>::GroupsBackward(const Pass& pass, const NormSaved<T>& saved,
                                     absl::Span<const int64_t> segments, MatrixView<const T> dy,
                                     MatrixView<T> dx, GradientReady ready) const {
  const int64_t width = weight_->size(), rows = dy.rows(), groups = dy.cols() / width;
  Stream& stream = *pass.context.compute;
  for (size_t s = 0; s + 1 < segments.size() && rows > 0; ++s) {
    const int64_t begin = segments[s], end = segments[s + 1], count = end - begin;
    if (count == 0) continue;
    const WorkspaceScope scope(*pass.context.workspace);
    absl::Span<const float> rstd = saved.rstd;
    if (count < groups) {
      MOE_ASSIGN_OR_RETURN(const auto part, pass.context.workspace->Matrix<float>(rows, count));
      const MatrixView<const float> all(saved.rstd.data(), rows, groups);
      MOE_RETURN_IF_ERROR(CopyRows<float>(ColumnRange(all, begin, end), part, stream));
      rstd = AllOf(part);
    }
    const auto columns = [&](auto of) {
      return ColumnRange(of, begin * width, end * width);
    };
    MOE_RETURN_IF_ERROR(
        AddPartial(pass, columns(saved.x), rstd, columns(dy), columns(dx), Write::kOverwrite));
  }
  return ready(*weight_);
}

template class Norm<float>;
template class Norm<BFloat16>;
template class Norm<Float16>;

}  // namespace moe::lm
