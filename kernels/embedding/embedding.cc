#include "kernels/embedding/embedding.h"

#include <algorithm>

#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/embedding/embedding_op.h"

namespace moe {
namespace embedding {

// Threads share the columns, so that every element adds its tokens in ascending order. A cache line
// holds 16 float32.
constexpr int64_t kColumnBlock = 64;

template <typename T>
void Run(const Backward<T>& b, ThreadPool& threads) {
  threads.For(b.d_table.cols(), kColumnBlock, [&](int64_t begin, int64_t end) {
    for (int64_t v = 0; b.write == Write::kOverwrite && v < b.d_table.rows(); ++v) {
      std::fill(b.d_table.row(v) + begin, b.d_table.row(v) + end, 0.0f);
    }
    for (int64_t t = 0; t < b.dx.rows(); ++t) {
      const T* const in = b.dx.row(t);
      float* const out = b.d_table.row(b.ids[t]);
      for (int64_t h = begin; h < end; ++h) out[h] += static_cast<float>(in[h]);
    }
  });
}

}  // namespace embedding

namespace {

absl::Status CheckIds(absl::Span<const int32_t> ids, int64_t vocabulary) {
  for (size_t t = 0; t < ids.size(); ++t) {
    if (ids[t] >= 0 && ids[t] < vocabulary) continue;
    return absl::InvalidArgumentError(absl::StrCat("EmbeddingBackward: ids[", t, "] is ", ids[t],
                                                   ", expected 0 to ", vocabulary - 1));
  }
  return absl::OkStatus();
}

}  // namespace

template <typename T>
absl::Status EmbeddingBackward(absl::Span<const int32_t> ids, MatrixView<const T> dx,
                               MatrixView<float> d_table, Write write, Workspace& workspace,
                               Stream& stream) {
  MOE_RETURN_IF_ERROR(
      CheckShape("EmbeddingBackward", "dx", dx, static_cast<int64_t>(ids.size()), d_table.cols()));
  MOE_RETURN_IF_ERROR(
      CheckShape("EmbeddingBackward", "d_table", d_table, d_table.rows(), d_table.cols()));
  embedding::Backward<T> backward = {ids.data(), dx, d_table, write};
  if (!IsCuda(stream)) {
    MOE_RETURN_IF_ERROR(CheckIds(ids, d_table.rows()));
    return RunOp("EmbeddingBackward", backward, stream);
  }
  const WorkspaceScope scope(workspace);  // later work of the stream may use the memory again
  MOE_ASSIGN_OR_RETURN(const auto scratch,
                       workspace.Array<int32_t>(embedding::ScratchElements(dx.rows())));
  backward.scratch = scratch.data();
  return RunOp("EmbeddingBackward", backward, stream);
}

MOE_INSTANTIATE_FOR_STORAGE(EmbeddingBackward)

}  // namespace moe
