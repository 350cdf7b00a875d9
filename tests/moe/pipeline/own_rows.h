// A layer as a model of one stage, which is given no rows.
#ifndef MOE_TESTS_MOE_PIPELINE_OWN_ROWS_H_
#define MOE_TESTS_MOE_PIPELINE_OWN_ROWS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "moe/layer/moe_layer.h"

namespace moe::testing {

class OwnRows final : public Module<float> {
 public:
  // backward: what a Backward returns at once, where it is an error.
  OwnRows(MoeLayer<float>& layer, int64_t rows, absl::Status backward = absl::OkStatus())
      : layer_(layer),
        rows_(rows),
        hidden_(layer.config().router.hidden_size),
        backward_(std::move(backward)),
        x_(static_cast<size_t>(rows_ * hidden_)) {
    for (size_t i = 0; i < x_.size(); ++i) x_[i] = std::sin(static_cast<float>(i));
  }
  absl::Span<Parameter* const> parameters() const override { return layer_.parameters(); }
  absl::Status Forward(const Pass& pass, MatrixView<const float>, MatrixView<float>) override {
    MOE_ASSIGN_OR_RETURN(const auto y, pass.kept().Matrix<float>(rows_, hidden_));
    return layer_.Forward(pass, {x_.data(), rows_, hidden_}, y);
  }
  absl::Status Backward(const Pass& pass, MatrixView<const float>, MatrixView<float>,
                        GradientReady ready) override {
    MOE_RETURN_IF_ERROR(backward_);
    MOE_ASSIGN_OR_RETURN(const auto dx, pass.kept().Matrix<float>(rows_, hidden_));
    return layer_.Backward(pass, {x_.data(), rows_, hidden_}, dx, ready);
  }

 private:
  MoeLayer<float>& layer_;
  const int64_t rows_, hidden_;
  const absl::Status backward_;
  std::vector<float> x_;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_PIPELINE_OWN_ROWS_H_
