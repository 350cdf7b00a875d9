#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

absl::Status CheckAttentionShape(absl::string_view function, const AttentionShape& shape,
                                 int64_t rows, int64_t cols) {
  if (shape.heads < 1 || cols % shape.heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(function, ": ", shape.heads, " heads for ", cols,
                                                   " columns, expected a divisor >= 1"));
  }
  const auto& offsets = shape.sequence_offsets;
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != rows) {
    return absl::InvalidArgumentError(absl::StrCat(function, ": sequence_offsets [", offsets.size(),
                                                   "], expected 0 first and ", rows,
                                                   " (the rows) last"));
  }
  if (!std::is_sorted(offsets.begin(), offsets.end())) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": sequence_offsets descend, expected ascending"));
  }
  return absl::OkStatus();
}

struct Task {
  int64_t begin, end, column, depth;
  int head;
};

template <typename F>
void ForEachHead(const AttentionShape& shape, int64_t cols, ThreadPool& threads, const F& run) {
  const int64_t depth = cols / shape.heads;
  const auto sequences = static_cast<int64_t>(shape.sequence_offsets.size()) - 1;
  threads.For(sequences * shape.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = i / shape.heads;
      const int head = static_cast<int>(i % shape.heads);
      run(Task{shape.sequence_offsets[s], shape.sequence_offsets[s + 1], head * depth, depth,
               head});
    }
  });
}

template <typename A, typename B>
float DotRow(const A* a, const B* b, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  return sum;
}

}  // namespace

template <typename T>
absl::Status ApplyRotary(const AttentionShape& shape, float base, RotaryDirection direction,
                         MatrixView<T> x, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckCpu("ApplyRotary", stream));
  MOE_RETURN_IF_ERROR(CheckAttentionShape("ApplyRotary", shape, x.rows(), x.cols()));
  const int64_t depth = x.cols() / shape.heads;
  if (depth % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ApplyRotary: head size ", depth, ", expected an even one"));
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    ForEachHead(shape, x.cols(), threads, [&](const Task& task) {
      const int64_t half = task.depth / 2;
      for (int64_t t = task.begin; t < task.end; ++t) {
        T* const row = x.row(t) + task.column;
        for (int64_t d = 0; d < half; ++d) {
          const double angle =
              static_cast<double>(t - task.begin) *
              std::pow(static_cast<double>(base),
                       -2.0 * static_cast<double>(d) / static_cast<double>(task.depth));
          const auto c = static_cast<float>(std::cos(angle));
          const auto s = static_cast<float>(std::sin(angle)) * static_cast<float>(direction);
          const auto a = static_cast<float>(row[d]);
          const auto b = static_cast<float>(row[d + half]);
          row[d] = T(a * c - b * s);
          row[d + half] = T(b * c + a * s);
        }
      }
    });
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status CausalAttention(const AttentionShape& shape, MatrixView<const T> q,
                             MatrixView<const T> k, MatrixView<const T> v, MatrixView<T> out,
                             MatrixView<float> log_sum_exp, Workspace&, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckCpu("CausalAttention", stream));
  MOE_RETURN_IF_ERROR(CheckAttentionShape("CausalAttention", shape, q.rows(), q.cols()));
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    ForEachHead(shape, q.cols(), threads, [&](const Task& task) {
      const float scale = 1.0f / std::sqrt(static_cast<float>(task.depth));
      std::vector<float> p(task.end - task.begin), o(task.depth);
      for (int64_t i = task.begin; i < task.end; ++i) {
        float max = -INFINITY, sum = 0;
        for (int64_t j = task.begin; j <= i; ++j) {
          p[j - task.begin] =
              scale * DotRow(q.row(i) + task.column, k.row(j) + task.column, task.depth);
          max = std::max(max, p[j - task.begin]);
        }
        std::fill(o.begin(), o.end(), 0.0f);
        for (int64_t j = task.begin; j <= i; ++j) {
          const float e = std::exp(p[j - task.begin] - max);
          sum += e;
          for (int64_t d = 0; d < task.depth; ++d)
            o[d] += e * static_cast<float>(v.row(j)[task.column + d]);
        }
        for (int64_t d = 0; d < task.depth; ++d) out.row(i)[task.column + d] = T(o[d] / sum);
        log_sum_exp.row(i)[task.head] = max + std::log(sum);
      }
    });
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status CausalAttentionBackward(const AttentionShape& shape, MatrixView<const T> q,
                                     MatrixView<const T> k, MatrixView<const T> v,
                                     MatrixView<const T> out, MatrixView<const float> log_sum_exp,
                                     MatrixView<const T> d_out, MatrixView<T> d_q,
                                     MatrixView<T> d_k, MatrixView<T> d_v, Workspace&,
                                     Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckCpu("CausalAttentionBackward", stream));
  MOE_RETURN_IF_ERROR(CheckAttentionShape("CausalAttentionBackward", shape, q.rows(), q.cols()));
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    ForEachHead(shape, q.cols(), threads, [&](const Task& task) {
      const int64_t n = task.end - task.begin, depth = task.depth, c = task.column;
      const float scale = 1.0f / std::sqrt(static_cast<float>(depth));
      std::vector<float> dk(n * depth), dv(n * depth), dq(depth);
      for (int64_t i = 0; i < n; ++i) {
        const T* const qi = q.row(task.begin + i) + c;
        const T* const doi = d_out.row(task.begin + i) + c;
        const float delta = DotRow(doi, out.row(task.begin + i) + c, depth);
        std::fill(dq.begin(), dq.end(), 0.0f);
        for (int64_t j = 0; j <= i; ++j) {
          const T* const kj = k.row(task.begin + j) + c;
          const float p =
              std::exp(scale * DotRow(qi, kj, depth) - log_sum_exp.row(task.begin + i)[task.head]);
          const float ds = p * (DotRow(doi, v.row(task.begin + j) + c, depth) - delta) * scale;
          for (int64_t d = 0; d < depth; ++d) {
            dv[j * depth + d] += p * static_cast<float>(doi[d]);
            dk[j * depth + d] += ds * static_cast<float>(qi[d]);
            dq[d] += ds * static_cast<float>(kj[d]);
          }
        }
        for (int64_t d = 0; d < depth; ++d) d_q.row(task.begin + i)[c + d] = T(dq[d]);
      }
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t d = 0; d < depth; ++d) {
          d_k.row(task.begin + j)[c + d] = T(dk[j * depth + d]);
          d_v.row(task.begin + j)[c + d] = T(dv[j * depth + d]);
        }
      }
    });
    return absl::OkStatus();
  });
}

#define MOE_INSTANTIATE(T)                                                                        \
  template absl::Status ApplyRotary(const AttentionShape&, float, RotaryDirection, MatrixView<T>, \
                                    Stream&);                                                     \
  template absl::Status CausalAttention(const AttentionShape&, MatrixView<const T>,               \
                                        MatrixView<const T>, MatrixView<const T>, MatrixView<T>,  \
                                        MatrixView<float>, Workspace&, Stream&);                  \
  template absl::Status CausalAttentionBackward(                                                  \
      const AttentionShape&, MatrixView<const T>, MatrixView<const T>, MatrixView<const T>,       \
      MatrixView<const T>, MatrixView<const float>, MatrixView<const T>, MatrixView<T>,           \
      MatrixView<T>, MatrixView<T>, Workspace&, Stream&);
MOE_INSTANTIATE(float)
MOE_INSTANTIATE(BFloat16)

}  // namespace moe
