#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_shape.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/simd_targets.h"
#include "kernels/base/status_macros.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/rotary.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

struct Pair {
  FloatLanes first, second;
};

HWY_INLINE Pair Rotate(Pair x, FloatLanes cosine, FloatLanes sine) {
  return {hn::Sub(hn::Mul(x.first, cosine), hn::Mul(x.second, sine)),
          hn::Add(hn::Mul(x.second, cosine), hn::Mul(x.first, sine))};
}

// All heads of one row: pairs (d, d + half) by the table's row of its position.
template <typename T>
HWY_INLINE void RotateRow(const float* cosine, const float* sine, float direction, int64_t half,
                          int heads, T* x) {
  const auto sign = hn::Set(FloatTag(), direction);
  for (int head = 0; head < heads; ++head, x += 2 * half) {
    int64_t d = 0;
    for (; d + kLanes <= half; d += kLanes) {
      const Pair y = Rotate({LoadLanes(x + d), LoadLanes(x + half + d)}, LoadLanes(cosine + d),
                            hn::Mul(sign, LoadLanes(sine + d)));
      StoreLanes(y.first, x + d);
      StoreLanes(y.second, x + half + d);
    }
    if (d == half) continue;
    const int64_t rest = half - d;
    const Pair y = Rotate({LoadFirst(x + d, rest), LoadFirst(x + half + d, rest)},
                          LoadFirst(cosine + d, rest), hn::Mul(sign, LoadFirst(sine + d, rest)));
    StoreFirst(y.first, x + d, rest);
    StoreFirst(y.second, x + half + d, rest);
  }
}

void RotateF32(const float* cosine, const float* sine, float direction, int64_t half, int heads,
               float* x) {
  RotateRow(cosine, sine, direction, half, heads, x);
}
void RotateBF16(const float* cosine, const float* sine, float direction, int64_t half, int heads,
                BFloat16* x) {
  RotateRow(cosine, sine, direction, half, heads, x);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(RotateF32);
HWY_EXPORT(RotateBF16);

namespace {

void RotateRow(const float* cosine, const float* sine, float direction, int64_t half, int heads,
               float* x) {
  HWY_DYNAMIC_DISPATCH(RotateF32)(cosine, sine, direction, half, heads, x);
}
void RotateRow(const float* cosine, const float* sine, float direction, int64_t half, int heads,
               BFloat16* x) {
  HWY_DYNAMIC_DISPATCH(RotateBF16)(cosine, sine, direction, half, heads, x);
}

// cos and sin of position * base^(-2d/D), taken in float64: [positions, D/2] each.
struct RotaryTable {
  int64_t positions = 0;
  std::vector<float> cosine, sine;
};

std::shared_ptr<const RotaryTable> MakeTable(float base, int64_t half, int64_t positions) {
  auto table = std::make_shared<RotaryTable>();
  table->positions = positions;
  table->cosine.reserve(positions * half);
  table->sine.reserve(positions * half);
  std::vector<double> frequency;
  for (int64_t d = 0; d < half; ++d) {
    frequency.push_back(
        std::pow(static_cast<double>(base), -static_cast<double>(d) / static_cast<double>(half)));
  }
  for (int64_t t = 0; t < positions; ++t) {
    for (int64_t d = 0; d < half; ++d) {
      const double angle = static_cast<double>(t) * frequency[d];
      table->cosine.push_back(static_cast<float>(std::cos(angle)));
      table->sine.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

// A pure function of (base, D/2), kept for the process: computing it costs more than the rotation.
// Shared, because a caller may still read the old table when another makes a longer one.
std::shared_ptr<const RotaryTable> TableFor(float base, int64_t half, int64_t positions) {
  static std::mutex* const mu = new std::mutex;
  static auto* const tables =
      new std::map<std::pair<float, int64_t>, std::shared_ptr<const RotaryTable>>;  // guarded by mu
  const std::lock_guard<std::mutex> lock(*mu);
  auto& table = (*tables)[{base, half}];
  if (table == nullptr || table->positions < positions) {
    const int64_t old = table == nullptr ? 0 : table->positions;
    table = MakeTable(base, half, std::max({positions, 2 * old, int64_t{256}}));
  }
  return table;
}

}  // namespace

template <typename T>
absl::Status ApplyRotary(const AttentionShape& shape, float base, RotaryDirection direction,
                         MatrixView<T> x, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckCpu("ApplyRotary", stream));
  MOE_RETURN_IF_ERROR(CheckShape("ApplyRotary", "x", x, x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(CheckAttentionShape("ApplyRotary", shape, x.rows(), x.cols()));
  const int64_t depth = x.cols() / shape.heads;
  if (depth % 2 != 0 || !(base > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("ApplyRotary: head size ", depth, ", base ",
                                                   base, ", expected an even one and base > 0"));
  }
  ThreadPool& threads = stream.threads();
  return stream.Enqueue([=, &threads] {
    const absl::Span<const int64_t> offsets = shape.sequence_offsets;
    int64_t longest = 1;
    for (size_t s = 1; s < offsets.size(); ++s) {
      longest = std::max(longest, offsets[s] - offsets[s - 1]);
    }
    const int64_t half = depth / 2;
    const auto table = TableFor(base, half, longest);
    const int64_t grain = std::max<int64_t>(1, 8192 / x.cols());
    threads.For(x.rows(), grain, [&](int64_t begin, int64_t end) {
      // The sequence of row t starts at the last offset that is not above it.
      auto next = std::upper_bound(offsets.begin(), offsets.end(), begin);
      for (int64_t t = begin; t < end; ++t) {
        while (*next <= t) ++next;
        const int64_t at = (t - *(next - 1)) * half;
        RotateRow(table->cosine.data() + at, table->sine.data() + at, static_cast<float>(direction),
                  half, shape.heads, x.row(t));
      }
    });
    return absl::OkStatus();
  });
}

template absl::Status ApplyRotary(const AttentionShape&, float, RotaryDirection, MatrixView<float>,
                                  Stream&);
template absl::Status ApplyRotary(const AttentionShape&, float, RotaryDirection,
                                  MatrixView<BFloat16>, Stream&);

}  // namespace moe
#endif  // HWY_ONCE
