#include "moe/lm/dense.h"

#include "kernels/norm/rms_norm.h"

namespace moe::lm {

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
                              NormSaved<T>& saved) const {
  saved.x = x;
  saved.y = y;
  const int64_t groups = x.cols() / weight_->size();
  MOE_ASSIGN_OR_RETURN(saved.rstd, pass.kept().Array<float>(x.rows() * groups));
  return RmsNorm<T>(x, weight_->vector(), epsilon_, y, saved.rstd, *pass.context.compute);
}

template <typename T>
absl::Status Norm<T>::Backward(const Pass& pass, const NormSaved<T>& saved, MatrixView<const T> dy,
                               MatrixView<T> dx, Write write_dx, GradientReady ready) const {
  const Context& context = pass.context;
  if (dy.rows() > 0) {
    MOE_ASSIGN_OR_RETURN(const GradAccumulator sum, weight_->OpenGradient());
    MOE_RETURN_IF_ERROR(sum.Add(
        [&](absl::Span<float> d_weight, Write write) {
          return RmsNormBackward<T>(saved.x, weight_->vector(), saved.rstd, dy, dx, write_dx,
                                    d_weight, write, *context.compute);
        },
        *context.workspace, *context.compute));
  }
  return ready(*weight_);
}

template class Norm<float>;
template class Norm<BFloat16>;
template class Norm<Float16>;

}  // namespace moe::lm
