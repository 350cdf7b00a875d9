#include "kernels/cross_entropy/cross_entropy.h"

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/cross_entropy/cross_entropy_op.h"

namespace moe {
namespace {

constexpr const char* kFunction = "CrossEntropy";

absl::Status CheckTargets(absl::Span<const int32_t> target, int64_t vocabulary) {
  for (size_t t = 0; t < target.size(); ++t) {
    if (target[t] >= 0 && target[t] < vocabulary) continue;
    return absl::InvalidArgumentError(absl::StrCat(kFunction, ": target[", t, "] is ", target[t],
                                                   ", expected 0 to ", vocabulary - 1));
  }
  return absl::OkStatus();
}

}  // namespace

template <typename T>
absl::Status CrossEntropy(MatrixView<const float> logits, absl::Span<const int32_t> target,
                          float scale, absl::Span<float> loss, MatrixView<T> d_logits,
                          Stream& stream) {
  const int64_t tokens = logits.rows();
  const int64_t vocabulary = logits.cols();
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "logits", logits, tokens, vocabulary));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "target", target.size(), tokens));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "loss", loss.size(), tokens));
  const bool loss_only = d_logits.data() == nullptr && d_logits.rows() == 0;
  if (!loss_only) {
    MOE_RETURN_IF_ERROR(CheckShape(kFunction, "d_logits", d_logits, tokens, vocabulary));
  }
  if (!IsCuda(stream)) MOE_RETURN_IF_ERROR(CheckTargets(target, vocabulary));
  return RunOp(kFunction,
               cross_entropy::CrossEntropy<T>{logits, target.data(), scale, loss.data(), d_logits},
               stream);
}

#define MOE_INSTANTIATE(T)                                                                      \
  template absl::Status CrossEntropy(MatrixView<const float>, absl::Span<const int32_t>, float, \
                                     absl::Span<float>, MatrixView<T>, Stream&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
