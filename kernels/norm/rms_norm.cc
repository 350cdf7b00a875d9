#include "kernels/norm/rms_norm.h"

#include <cmath>

#include "kernels/base/fixed_dot.h"
#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/norm/rms_norm_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/rms_norm.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::rms_norm {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

template <typename T>
void Normalize(const T* x, const float* weight, float rstd, int64_t n, T* y) {
  const auto scale = hn::Set(FloatTag(), rstd);
  ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
    lanes.Store(hn::Mul(hn::Mul(lanes.Load(x + i), scale), lanes.Load(weight + i)), y + i);
  });
}

// sum_i (dy[i] * weight[i]) * x[i] in the order of FixedDot.
template <typename T>
HWY_INLINE float WeightedDot(const T* dy, const float* weight, const T* x, int64_t n) {
  return FixedSumOf(n, [&](int64_t i, auto lanes, FloatLanes sum) MOE_LANES {
    return hn::MulAdd(hn::Mul(lanes.Load(dy + i), lanes.Load(weight + i)), lanes.Load(x + i), sum);
  });
}

// dx of row t: rstd * (dy * weight - x * slope) (+ dx)
template <typename T>
void InputGradient(const Backward<T>& b, int64_t t) {
  const int64_t n = b.groups.cols;
  const T *const x = b.groups.Row(b.x, t), *const dy = b.groups.Row(b.dy, t);
  T* const dx = b.groups.Row(b.dx, t);
  const float dot = WeightedDot(dy, b.weight, x, n);
  const auto slope = hn::Set(FloatTag(), b.rstd[t] * b.rstd[t] * (dot / static_cast<float>(n)));
  const auto rstd = hn::Set(FloatTag(), b.rstd[t]);
  const bool add = b.write_dx == Write::kAdd;
  ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
    const auto scaled = hn::Mul(lanes.Load(dy + i), lanes.Load(b.weight + i));
    auto d = hn::Mul(rstd, hn::NegMulAdd(lanes.Load(x + i), slope, scaled));
    if (add) d = hn::Add(lanes.Load(dx + i), d);
    lanes.Store(d, dx + i);
  });
}

// Columns of d_weight at a time: few enough for their sums to stay in cache over all rows.
constexpr int64_t kColumns = 64;

// Columns [begin, end), at most kColumns, of
// d_weight[h] (+)= sum_t (dy[t, h] * x[t, h]) * rstd[t], t ascending.
template <typename T>
void WeightColumns(const Backward<T>& b, int64_t begin, int64_t end) {
  const int64_t n = end - begin;
  float sum[kColumns] = {};
  for (int64_t t = 0; t < b.rows(); ++t) {
    const T *const x = b.groups.Row(b.x, t) + begin, *const dy = b.groups.Row(b.dy, t) + begin;
    const auto scale = hn::Set(FloatTag(), b.rstd[t]);
    ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
      const auto product = hn::Mul(lanes.Load(dy + i), lanes.Load(x + i));
      StoreLanes(hn::MulAdd(product, scale, LoadLanes(sum + i)), sum + i);
    });
  }
  float* const d_weight = b.d_weight + begin;
  for (int64_t i = 0; i < n; ++i) {
    d_weight[i] = b.write_d_weight == Write::kAdd ? d_weight[i] + sum[i] : sum[i];
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::rms_norm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::rms_norm {

template <typename T>
void Run(const Forward<T>& f, ThreadPool& threads) {
  const int64_t cols = f.groups.cols;
  if (cols == 0) return;
  threads.For(f.rows(), RowGrain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* const x = f.groups.Row(f.x, t);
      f.rstd[t] = 1.0f / std::sqrt(FixedDot(x, x, cols) / static_cast<float>(cols) + f.epsilon);
      MOE_SIMD(Normalize<T>)(x, f.weight, f.rstd[t], cols, f.groups.Row(f.y, t));
    }
  });
}

template <typename T>
void Run(const Backward<T>& b, ThreadPool& threads) {
  // Threads share the weight's columns, so that every element adds its tokens in ascending order.
  threads.For(b.groups.cols, HWY_NAMESPACE::kColumns, [&](int64_t begin, int64_t end) {
    MOE_SIMD(WeightColumns<T>)(b, begin, end);
  });
  threads.For(b.rows(), RowGrain(b.groups.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) MOE_SIMD(InputGradient<T>)(b, t);
  });
}

}  // namespace moe::rms_norm

namespace moe {
namespace {

// Number of groups of the weight's length in the columns; 1 if they are not a multiple, which
// CheckShape of the weight then refuses.
rms_norm::Groups GroupsOf(int64_t cols, size_t weight) {
  const auto length = static_cast<int64_t>(weight);
  const bool several = length > 0 && cols % length == 0;
  return {several ? cols / length : 1, several ? length : cols};
}

}  // namespace

template <typename T>
absl::Status RmsNorm(MatrixView<const T> x, absl::Span<const float> weight, float epsilon,
                     MatrixView<T> y, absl::Span<float> rstd, Stream& stream) {
  constexpr const char* kFunction = "RmsNorm";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  const rms_norm::Groups groups = GroupsOf(x.cols(), weight.size());
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "weight", weight.size(), groups.cols));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "y", y, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "rstd", rstd.size(), x.rows() * groups.count));
  return RunOp(kFunction, rms_norm::Forward<T>{groups, x, weight.data(), epsilon, y, rstd.data()},
               stream);
}

template <typename T>
absl::Status RmsNormBackward(MatrixView<const T> x, absl::Span<const float> weight,
                             absl::Span<const float> rstd, MatrixView<const T> dy, MatrixView<T> dx,
                             Write write_dx, absl::Span<float> d_weight, Write write_d_weight,
                             Stream& stream) {
  constexpr const char* kFunction = "RmsNormBackward";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "x", x, x.rows(), x.cols()));
  const rms_norm::Groups groups = GroupsOf(x.cols(), weight.size());
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "weight", weight.size(), groups.cols));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "rstd", rstd.size(), x.rows() * groups.count));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", dy, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dx", dx, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_weight", d_weight.size(), groups.cols));
  return RunOp(kFunction,
               rms_norm::Backward<T>{groups, x, weight.data(), rstd.data(), dy, dx, write_dx,
                                     d_weight.data(), write_d_weight},
               stream);
}

MOE_INSTANTIATE_FOR_STORAGE(RmsNorm)
MOE_INSTANTIATE_FOR_STORAGE(RmsNormBackward)

}  // namespace moe
#endif  // HWY_ONCE
