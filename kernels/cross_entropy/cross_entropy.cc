#include "kernels/cross_entropy/cross_entropy.h"

#include <algorithm>

#include "kernels/base/cuda_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/cross_entropy/cross_entropy_cpu.h"
#include "kernels/cross_entropy/cross_entropy_cuda.h"

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
  if (IsCuda(stream)) {
    return LaunchOn(kFunction, stream, [&](auto cuda) {
      return cross_entropy::Run(
          cross_entropy::CudaCrossEntropy<T>{logits, target.data(), scale, loss.data(), d_logits},
          cuda);
    });
  }
  MOE_RETURN_IF_ERROR(CheckTargets(target, vocabulary));
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, vocabulary));
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        T* const gradient = loss_only ? nullptr : d_logits.row(t);
        loss[t] = CrossEntropyRow<T>(logits.row(t), vocabulary, target[t], scale, gradient);
      }
    });
    return absl::OkStatus();
  });
}

template absl::Status CrossEntropy(MatrixView<const float>, absl::Span<const int32_t>, float,
                                   absl::Span<float>, MatrixView<float>, Stream&);
template absl::Status CrossEntropy(MatrixView<const float>, absl::Span<const int32_t>, float,
                                   absl::Span<float>, MatrixView<BFloat16>, Stream&);
template absl::Status CrossEntropy(MatrixView<const float>, absl::Span<const int32_t>, float,
                                   absl::Span<float>, MatrixView<Float16>, Stream&);

}  // namespace moe
