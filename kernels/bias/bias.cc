#include "kernels/bias/bias.h"

#include <algorithm>

#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/bias/bias_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bias/bias.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::bias {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

template <typename T>
void AddTo(const float* bias, int64_t n, T* y) {
  ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
    lanes.Store(hn::Add(lanes.Load(y + i), lanes.Load(bias + i)), y + i);
  });
}

// Columns of a block: few enough for their sums to stay in cache over all rows.
constexpr int64_t kColumns = 64;
template <typename T>
void SumColumns(const Gradient<T>& g, int64_t begin, int64_t end) {
  const int64_t n = end - begin;
  float sum[kColumns] = {};
  if (g.write == Write::kAdd) std::copy_n(g.d_bias + begin, n, sum);
  for (int64_t r = 0; r < g.dy.rows(); ++r) {
    const T* const row = g.dy.row(r) + begin;
    ForLanes(n, [&](int64_t i, auto lanes) MOE_LANES {
      StoreLanes(hn::Add(LoadLanes(sum + i), lanes.Load(row + i)), sum + i);
    });
  }
  std::copy_n(sum, n, g.d_bias + begin);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::bias
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::bias {

template <typename T>
void Run(const Add<T>& add, ThreadPool& threads) {
  const int64_t cols = add.y.cols();
  threads.For(add.y.rows(), RowGrain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) MOE_SIMD(AddTo<T>)(add.bias, cols, add.y.row(n));
  });
}

template <typename T>
void Run(const Gradient<T>& g, ThreadPool& threads) {
  threads.For(g.dy.cols(), HWY_NAMESPACE::kColumns, [&](int64_t begin, int64_t end) {
    MOE_SIMD(SumColumns<T>)(g, begin, end);
  });
}

template <typename T>
void Reference(const Add<T>& add) {
  for (int64_t n = 0; n < add.y.rows(); ++n) {
    for (int64_t c = 0; c < add.y.cols(); ++c) {
      add.y(n, c) = T(static_cast<float>(add.y(n, c)) + add.bias[c]);
    }
  }
}

template <typename T>
void Reference(const Gradient<T>& g) {
  for (int64_t c = 0; c < g.dy.cols(); ++c) {
    float sum = g.write == Write::kAdd ? g.d_bias[c] : 0.0f;
    for (int64_t n = 0; n < g.dy.rows(); ++n) sum += static_cast<float>(g.dy(n, c));
    g.d_bias[c] = sum;
  }
}

}  // namespace moe::bias

namespace moe {

template <typename T>
absl::Status AddBias(MatrixView<T> y, const GroupOffsets& offsets,
                     absl::Span<const absl::Span<const float>> bias, Stream& stream) {
  constexpr const char* kFunction = "AddBias";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "y", y, y.rows(), y.cols()));
  MOE_RETURN_IF_ERROR(CheckGroups(kFunction, "biases", offsets, bias.size(), y.rows()));
  for (const absl::Span<const float> b : bias) {
    MOE_RETURN_IF_ERROR(CheckLength(kFunction, "bias", b.size(), y.cols()));
  }
  for (size_t g = 0; g < bias.size(); ++g) {
    bias::Add<T> add = {.y = y, .bias = bias[g].data()};
    if (offsets.known_to_host()) {
      add.y = RowRange(y, offsets.host()[g], offsets.host()[g + 1]);
      if (add.y.rows() == 0) continue;
    } else {
      add.rows = &offsets.device()[g];
    }
    MOE_RETURN_IF_ERROR(RunOp(kFunction, add, stream));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status BiasGradient(MatrixView<const T> dy, const GroupOffsets& segments,
                          absl::Span<float> d_bias, Write write, Stream& stream) {
  constexpr const char* kFunction = "BiasGradient";
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "dy", dy, dy.rows(), dy.cols()));
  MOE_RETURN_IF_ERROR(CheckLength(kFunction, "d_bias", d_bias.size(), dy.cols()));
  bias::Gradient<T> gradient = {.dy = dy, .d_bias = d_bias.data(), .write = write};
  if (segments.known_to_host()) {
    gradient.dy = RowRange(dy, segments.host().front(), segments.host().back());
  } else {
    gradient.rows = segments.device().data();
    gradient.segments = static_cast<int64_t>(segments.size()) - 1;
  }
  return RunOp(kFunction, gradient, stream);
}

MOE_INSTANTIATE_OVERLOAD(void, bias::Reference, bias::Add)
MOE_INSTANTIATE_OVERLOAD(void, bias::Reference, bias::Gradient)
MOE_INSTANTIATE_FOR_STORAGE(AddBias)
#define MOE_INSTANTIATE(T)                                                                        \
  template absl::Status BiasGradient(MatrixView<const T>, const GroupOffsets&, absl::Span<float>, \
                                     Write, Stream&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
#endif  // HWY_ONCE
