#include "kernels/attention/attention.h"

#include <algorithm>
#include <atomic>

#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/base/device_arrays.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"

namespace moe {

absl::Status AttentionShape::Check(absl::string_view function, int64_t rows, int64_t cols) const {
  if (heads < 1 || cols < heads || cols % heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": ", cols, " columns for ", heads, " heads, expected a multiple"));
  }
  const absl::Span<const int64_t> offsets = sequence_offsets;
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        function, ": sequence_offsets [", offsets.size(), "]",
        offsets.empty() ? std::string()
                        : absl::StrCat(" from ", offsets.front(), " to ", offsets.back()),
        ", expected them from 0 to ", rows, ", the rows"));
  }
  for (size_t s = 1; s < offsets.size(); ++s) {
    if (offsets[s - 1] <= offsets[s]) continue;
    return absl::InvalidArgumentError(absl::StrCat(function, ": sequence_offsets[", s, "] is ",
                                                   offsets[s], ", expected at least ",
                                                   offsets[s - 1]));
  }
  return absl::OkStatus();
}

int64_t AttentionShape::LongestSequence() const {
  int64_t longest = 0;
  for (size_t s = 1; s < sequence_offsets.size(); ++s) {
    longest = std::max(longest, sequence_offsets[s] - sequence_offsets[s - 1]);
  }
  return longest;
}

namespace {

int64_t Sequences(const AttentionShape& shape) {
  return static_cast<int64_t>(shape.sequence_offsets.size()) - 1;
}

// Number of key-value heads, from the columns of k: whole heads of `depth`, whose number divides
// the query heads.
absl::StatusOr<int> KeyValueHeads(absl::string_view function, const AttentionShape& shape,
                                  int64_t depth, int64_t cols) {
  const int64_t heads = cols / depth;
  if (heads >= 1 && cols % depth == 0 && shape.heads % heads == 0) return static_cast<int>(heads);
  return absl::InvalidArgumentError(absl::StrCat(function, ": k has ", cols,
                                                 " columns, expected heads of ", depth,
                                                 ", as many as divide the ", shape.heads, " of q"));
}

// The sequence offsets, uploaded to the CUDA device, after a check that CUDA supports so many
// heads.
absl::StatusOr<absl::Span<const int64_t>> OffsetsOnCuda(absl::string_view function,
                                                        const AttentionShape& shape,
                                                        Workspace& workspace, Stream& stream) {
  if (shape.heads <= attention::kMostHeads) {
    return UploadArray(shape.sequence_offsets, workspace, stream);
  }
  return absl::InvalidArgumentError(absl::StrCat(function, ": ", shape.heads, " heads, at most ",
                                                 attention::kMostHeads, " on CUDA"));
}

// Selects one of `groups` equally wide groups of heads from a view: the rows of one sequence, or
// all rows.
struct GroupRange {
  int64_t begin, end;  // rows
  int64_t group, groups;

  template <typename T>
  MatrixView<T> AllRowsOf(MatrixView<T> m) const {
    const int64_t cols = m.cols() / groups;
    return ColumnRange(m, group * cols, (group + 1) * cols);
  }
  template <typename T>
  MatrixView<T> Of(MatrixView<T> m) const {
    return AllRowsOf(RowRange(m, begin, end));
  }
};

// One row of scratch for each thread that works on groups of heads.
absl::StatusOr<MatrixView<float>> TakeSlots(const AttentionShape& shape, int64_t groups,
                                            int64_t floats, const ThreadPool& threads,
                                            Workspace& workspace) {
  const int64_t slots = std::min<int64_t>(threads.threads(), Sequences(shape) * groups);
  return workspace.Matrix<float>(slots, (floats + 15) / 16 * 16);
}

// Calls run(range, scratch) for every group of heads of every sequence. Each thread takes the next
// group that is not taken yet, because sequences differ in length. A head's bits do not depend on
// the thread.
template <typename F>
void ForEachGroup(const AttentionShape& shape, int64_t groups, MatrixView<float> slots,
                  ThreadPool& threads, const F& run) {
  std::atomic<int64_t> next = 0;
  threads.For(slots.rows(), 1, [&](int64_t slot, int64_t) {
    while (true) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= Sequences(shape) * groups) return;
      const int64_t s = i / groups;
      const GroupRange range = {.begin = shape.sequence_offsets[s],
                                .end = shape.sequence_offsets[s + 1],
                                .group = i % groups,
                                .groups = groups};
      if (range.begin < range.end) run(range, slots.row(slot));
    }
  });
}

}  // namespace

template <typename T>
absl::Status CausalAttention(const AttentionShape& shape, MatrixView<const T> q,
                             MatrixView<const T> k, MatrixView<const T> v, MatrixView<T> out,
                             MatrixView<float> log_sum_exp, Workspace& workspace, Stream& stream) {
  constexpr const char* kFunction = "CausalAttention";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "q", q, q.rows(), q.cols()));
  MOE_RETURN_IF_ERROR(shape.Check(kFunction, q.rows(), q.cols()));
  const int64_t depth = q.cols() / shape.heads;
  MOE_ASSIGN_OR_RETURN(const int kv_heads, KeyValueHeads(kFunction, shape, depth, k.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "k", k, q.rows(), k.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "v", v, q.rows(), k.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "out", out, q.rows(), q.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "log_sum_exp", log_sum_exp, q.rows(), shape.heads));
  if (IsCuda(stream)) {
    MOE_ASSIGN_OR_RETURN(const auto offsets, OffsetsOnCuda(kFunction, shape, workspace, stream));
    return LaunchOn(kFunction, stream, [&](auto cuda) {
      return attention::Run(attention::CudaForward<T>{.q = q,
                                                      .k = k,
                                                      .v = v,
                                                      .heads = shape.heads,
                                                      .group = shape.heads / kv_heads,
                                                      .sequence_offsets = offsets.data(),
                                                      .sequences = Sequences(shape),
                                                      .out = out,
                                                      .log_sum_exp = log_sum_exp},
                            cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  MOE_ASSIGN_OR_RETURN(
      const MatrixView<float> slots,
      TakeSlots(shape, kv_heads, HeadForwardScratch(shape.LongestSequence(), depth), threads,
                workspace));
  return stream.Enqueue([=, &threads] {
    ForEachGroup(shape, kv_heads, slots, threads, [&](const GroupRange& group, float* scratch) {
      AttendHeads<T>({.q = group.Of(q),
                      .k = group.Of(k),
                      .v = group.Of(v),
                      .out = group.Of(out),
                      .log_sum_exp = group.Of(log_sum_exp)},
                     scratch);
    });
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status CausalAttentionOfLast(int heads, MatrixView<const T> q, MatrixView<const T> k,
                                   MatrixView<const T> v, MatrixView<T> out, Workspace& workspace,
                                   Stream& stream) {
  constexpr const char* kFunction = "CausalAttentionOfLast";
  const int64_t offsets[] = {0, q.rows()};
  const AttentionShape shape = {.heads = heads, .sequence_offsets = offsets};
  MOE_RETURN_IF_ERROR(shape.Check(kFunction, q.rows(), q.cols()));
  const int64_t depth = q.cols() / heads;
  MOE_ASSIGN_OR_RETURN(const int kv_heads, KeyValueHeads(kFunction, shape, depth, k.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "v", v, k.rows(), k.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "out", out, q.rows(), q.cols()));
  if (k.rows() < q.rows()) {
    return absl::InvalidArgumentError(absl::StrCat(kFunction, ": ", k.rows(), " keys for ",
                                                   q.rows(), " queries, expected as many or more"));
  }
  if (IsCuda(stream)) {
    return absl::UnimplementedError(absl::StrCat(kFunction, ": on a CUDA device"));
  }
  if (q.rows() == 0) return absl::OkStatus();
  ThreadPool& threads = stream.threads();
  const int64_t tokens = k.rows() + kMaxBlockRows;
  MOE_ASSIGN_OR_RETURN(
      const MatrixView<float> slots,
      TakeSlots(shape, kv_heads, HeadForwardScratch(tokens, depth), threads, workspace));
  return stream.Enqueue([=, &threads] {
    const int64_t rows[] = {0, q.rows()};  // `offsets` may be gone when a queued stream runs this
    ForEachGroup({.heads = heads, .sequence_offsets = rows}, kv_heads, slots, threads,
                 [&](const GroupRange& group, float* scratch) {
                   AttendHeads<T>({.q = group.Of(q),
                                   .k = group.AllRowsOf(k),
                                   .v = group.AllRowsOf(v),
                                   .out = group.Of(out)},
                                  scratch);
                 });
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status CausalAttentionBackward(const AttentionShape& shape, MatrixView<const T> q,
                                     MatrixView<const T> k, MatrixView<const T> v,
                                     MatrixView<const T> out, MatrixView<const float> log_sum_exp,
                                     MatrixView<const T> d_out, MatrixView<T> d_q,
                                     MatrixView<T> d_k, MatrixView<T> d_v, Workspace& workspace,
                                     Stream& stream) {
  constexpr const char* kFunction = "CausalAttentionBackward";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "q", q, q.rows(), q.cols()));
  MOE_RETURN_IF_ERROR(shape.Check(kFunction, q.rows(), q.cols()));
  const int64_t depth = q.cols() / shape.heads;
  MOE_ASSIGN_OR_RETURN(const int kv_heads, KeyValueHeads(kFunction, shape, depth, k.cols()));
  const auto check = [&](const char* name, const auto& m, int64_t cols) {
    return CheckShape(kFunction, name, m, q.rows(), cols);
  };
  MOE_RETURN_IF_ERROR(check("k", k, k.cols()));
  MOE_RETURN_IF_ERROR(check("v", v, k.cols()));
  MOE_RETURN_IF_ERROR(check("out", out, q.cols()));
  MOE_RETURN_IF_ERROR(check("log_sum_exp", log_sum_exp, shape.heads));
  MOE_RETURN_IF_ERROR(check("d_out", d_out, q.cols()));
  MOE_RETURN_IF_ERROR(check("d_q", d_q, q.cols()));
  MOE_RETURN_IF_ERROR(check("d_k", d_k, k.cols()));
  MOE_RETURN_IF_ERROR(check("d_v", d_v, k.cols()));
  if (IsCuda(stream)) {
    MOE_ASSIGN_OR_RETURN(const auto offsets, OffsetsOnCuda(kFunction, shape, workspace, stream));
    MOE_ASSIGN_OR_RETURN(const MatrixView<float> row_dot,
                         workspace.Matrix<float>(q.rows(), shape.heads));
    return LaunchOn(kFunction, stream, [&](auto cuda) {
      return attention::Run(attention::CudaBackward<T>{.q = q,
                                                       .k = k,
                                                       .v = v,
                                                       .out = out,
                                                       .log_sum_exp = log_sum_exp,
                                                       .d_out = d_out,
                                                       .heads = shape.heads,
                                                       .group = shape.heads / kv_heads,
                                                       .sequence_offsets = offsets.data(),
                                                       .sequences = Sequences(shape),
                                                       .d_q = d_q,
                                                       .d_k = d_k,
                                                       .d_v = d_v,
                                                       .row_dot = row_dot},
                            cuda);
    });
  }
  ThreadPool& threads = stream.threads();
  MOE_ASSIGN_OR_RETURN(
      const MatrixView<float> slots,
      TakeSlots(shape, kv_heads, HeadBackwardScratch(shape.LongestSequence(), depth), threads,
                workspace));
  return stream.Enqueue([=, &threads] {
    ForEachGroup(shape, kv_heads, slots, threads, [&](const GroupRange& group, float* scratch) {
      AttendHeadsBackward<T>({.q = group.Of(q),
                              .k = group.Of(k),
                              .v = group.Of(v),
                              .out = group.Of(out),
                              .d_out = group.Of(d_out),
                              .log_sum_exp = group.Of(log_sum_exp),
                              .d_q = group.Of(d_q),
                              .d_k = group.Of(d_k),
                              .d_v = group.Of(d_v)},
                             scratch);
    });
    return absl::OkStatus();
  });
}

MOE_INSTANTIATE_FOR_STORAGE(CausalAttention)
MOE_INSTANTIATE_FOR_STORAGE(CausalAttentionOfLast)
MOE_INSTANTIATE_FOR_STORAGE(CausalAttentionBackward)

}  // namespace moe
