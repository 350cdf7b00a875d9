#include "kernels/product/product.h"

#include "kernels/base/cuda_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/product/product_cuda.h"

namespace moe {
namespace {

constexpr int64_t kRowsPerTask = 64;

}  // namespace

template <typename T, typename U>
absl::Status MultiplyRows(MatrixView<const std::type_identity_t<U>> a, MatrixView<const float> b,
                          MatrixView<T> out, Write write, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckShape("MultiplyRows", "a", a, out.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape("MultiplyRows", "b", b, out.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape("MultiplyRows", "out", out, out.rows(), out.cols()));
  if (IsCuda(stream)) {
    return LaunchOn("MultiplyRows", stream, [&](auto cuda) {
      return product::Run(product::CudaProduct<T, U>{a, b, out, write}, cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(out.rows(), kRowsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t h = 0; h < out.cols(); ++h) {
          const float product = static_cast<float>(a(t, h)) * b(t, h);
          out(t, h) = static_cast<T>(write == Write::kAdd ? static_cast<float>(out(t, h)) + product
                                                          : product);
        }
      }
    });
    return absl::OkStatus();
  });
}

template absl::Status MultiplyRows<float>(MatrixView<const float>, MatrixView<const float>,
                                          MatrixView<float>, Write, Stream&);
template absl::Status MultiplyRows<BFloat16>(MatrixView<const BFloat16>, MatrixView<const float>,
                                             MatrixView<BFloat16>, Write, Stream&);
template absl::Status MultiplyRows<Float16>(MatrixView<const Float16>, MatrixView<const float>,
                                            MatrixView<Float16>, Write, Stream&);
template absl::Status MultiplyRows<BFloat16, float>(MatrixView<const float>,
                                                    MatrixView<const float>, MatrixView<BFloat16>,
                                                    Write, Stream&);
template absl::Status MultiplyRows<Float16, float>(MatrixView<const float>, MatrixView<const float>,
                                                   MatrixView<Float16>, Write, Stream&);

}  // namespace moe
