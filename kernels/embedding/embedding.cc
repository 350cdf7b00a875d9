#include "kernels/embedding/embedding.h"

#include <algorithm>
#include <iterator>

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

template <typename T>
absl::Status AddEmbeddingGradient(absl::Span<const int32_t> ids, MatrixView<const T> dx,
                                  const GradAccumulator& grad, Workspace& workspace,
                                  Stream& stream) {
  const int64_t cols = dx.cols(), vocabulary = cols == 0 ? 0 : grad.size() / cols;
  if (!grad.exact() || IsCuda(stream)) {
    return grad.Add(
        [&](absl::Span<float> out, Write write) {
          return EmbeddingBackward<T>(ids, dx, {out.data(), vocabulary, cols}, write, workspace,
                                      stream);
        },
        workspace, stream);
  }
  MOE_RETURN_IF_ERROR(CheckIds(ids, vocabulary));
  const absl::Span<int64_t> sum = grad.exact_sum();
  if (grad.NextWrite() == Write::kOverwrite) {
    MOE_RETURN_IF_ERROR(stream.Zero(sum.data(), std::ssize(sum) * int64_t{sizeof(int64_t)}));
  }
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const auto rows, workspace.Array<int32_t>(std::ssize(ids)));
  MOE_ASSIGN_OR_RETURN(const auto places, workspace.Array<int32_t>(std::ssize(ids)));
  std::copy(ids.begin(), ids.end(), rows.begin());
  std::sort(rows.begin(), rows.end());
  const auto end = std::unique(rows.begin(), rows.end());
  for (size_t t = 0; t < ids.size(); ++t) {
    places[t] = static_cast<int32_t>(std::lower_bound(rows.begin(), end, ids[t]) - rows.begin());
  }
  MOE_ASSIGN_OR_RETURN(const auto table, workspace.Matrix<float>(end - rows.begin(), cols));
  MOE_RETURN_IF_ERROR(
      EmbeddingBackward<T>(places, dx, table, Write::kOverwrite, workspace, stream));
  const auto width = static_cast<size_t>(cols);
  for (int64_t r = 0; r < table.rows(); ++r) {
    const auto first = static_cast<size_t>(rows[static_cast<size_t>(r)]) * width;
    MOE_RETURN_IF_ERROR(ExactAccumulate(grad.grid(), {table.row(r), width},
                                        sum.subspan(first, width), Write::kAdd, grad.tally(),
                                        stream));
  }
  return absl::OkStatus();
}

MOE_INSTANTIATE_FOR_STORAGE(EmbeddingBackward)
MOE_INSTANTIATE_FOR_STORAGE(AddEmbeddingGradient)

}  // namespace moe
