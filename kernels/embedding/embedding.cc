#include "kernels/embedding/embedding.h"

#include <algorithm>

#include "kernels/base/cuda_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/embedding/embedding_cuda.h"

namespace moe {
namespace {

// Threads share the columns, so that every element sees its tokens in ascending order. A cache line
// holds 16 float32.
constexpr int64_t kColumnBlock = 64;

absl::Status CheckIds(absl::Span<const int32_t> ids, int64_t vocabulary) {
  for (size_t t = 0; t < ids.size(); ++t) {
    if (ids[t] >= 0 && ids[t] < vocabulary) continue;
    return absl::InvalidArgumentError(absl::StrCat("EmbeddingBackward: ids[", t, "] is ", ids[t],
                                                   ", expected 0 to ", vocabulary - 1));
  }
  return absl::OkStatus();
}

template <typename T>
void AddColumns(absl::Span<const int32_t> ids, MatrixView<const T> dx, MatrixView<float> d_table,
                Write write) {
  if (write == Write::kOverwrite) {
    for (int64_t v = 0; v < d_table.rows(); ++v) std::fill_n(d_table.row(v), d_table.cols(), 0.0f);
  }
  for (int64_t t = 0; t < dx.rows(); ++t) {
    const T* const in = dx.row(t);
    float* const out = d_table.row(ids[t]);
    for (int64_t h = 0; h < dx.cols(); ++h) out[h] += static_cast<float>(in[h]);
  }
}

}  // namespace

template <typename T>
absl::Status EmbeddingBackward(absl::Span<const int32_t> ids, MatrixView<const T> dx,
                               MatrixView<float> d_table, Write write, Stream& stream) {
  MOE_RETURN_IF_ERROR(
      CheckShape("EmbeddingBackward", "dx", dx, static_cast<int64_t>(ids.size()), d_table.cols()));
  MOE_RETURN_IF_ERROR(
      CheckShape("EmbeddingBackward", "d_table", d_table, d_table.rows(), d_table.cols()));
  if (IsCuda(stream)) {
    return LaunchOn("EmbeddingBackward", stream, [&](auto cuda) {
      return embedding::Run(embedding::CudaBackward<T>{ids.data(), dx, d_table, write}, cuda);
    });
  }
  MOE_RETURN_IF_ERROR(CheckIds(ids, d_table.rows()));
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    threads.For(d_table.cols(), kColumnBlock, [&](int64_t begin, int64_t end) {
      AddColumns<T>(ids, ColumnRange(dx, begin, end), ColumnRange(d_table, begin, end), write);
    });
    return absl::OkStatus();
  });
}

template absl::Status EmbeddingBackward(absl::Span<const int32_t>, MatrixView<const float>,
                                        MatrixView<float>, Write, Stream&);
template absl::Status EmbeddingBackward(absl::Span<const int32_t>, MatrixView<const BFloat16>,
                                        MatrixView<float>, Write, Stream&);
template absl::Status EmbeddingBackward(absl::Span<const int32_t>, MatrixView<const Float16>,
                                        MatrixView<float>, Write, Stream&);

}  // namespace moe
