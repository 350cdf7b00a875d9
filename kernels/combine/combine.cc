#include "kernels/combine/combine.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/fixed_dot.h"
#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/combine/combine_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/combine/combine.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::combine {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

// Columns [h, h + kVectors * kLanes) of one token: the sums stay in registers over its slots.
template <int kVectors, typename T>
HWY_INLINE void CombineColumns(const Combine<T>& c, int64_t token, int64_t h) {
  const FloatTag d;
  T* const out = c.out.row(token) + h;
  FloatLanes sum[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    sum[v] = c.write == Write::kAdd ? LoadLanes(out + v * kLanes) : hn::Zero(d);
  }
  for (int64_t s = c.slot_offset[token]; s < c.slot_offset[token + 1]; ++s) {
    if (c.row_of_slot[s] < 0) continue;
    const T* const row = c.rows.row(c.row_of_slot[s]) + h;
    if (c.weight == nullptr) {
      for (int v = 0; v < kVectors; ++v) sum[v] = hn::Add(sum[v], LoadLanes(row + v * kLanes));
      continue;
    }
    const FloatLanes weight = hn::Set(d, c.weight[s]);
    for (int v = 0; v < kVectors; ++v) {
      sum[v] = hn::MulAdd(weight, LoadLanes(row + v * kLanes), sum[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) StoreLanes(sum[v], out + v * kLanes);
}

// The last `n` < kLanes columns.
template <typename T>
HWY_INLINE void CombineTail(const Combine<T>& c, int64_t token, int64_t h, int64_t n) {
  const FloatTag d;
  T* const out = c.out.row(token) + h;
  FloatLanes sum = c.write == Write::kAdd ? LoadFirst(out, n) : hn::Zero(d);
  for (int64_t s = c.slot_offset[token]; s < c.slot_offset[token + 1]; ++s) {
    if (c.row_of_slot[s] < 0) continue;
    const FloatLanes row = LoadFirst(c.rows.row(c.row_of_slot[s]) + h, n);
    sum = c.weight == nullptr ? hn::Add(sum, row) : hn::MulAdd(hn::Set(d, c.weight[s]), row, sum);
  }
  StoreFirst(sum, out, n);
}

template <typename T>
void CombineTokens(const Combine<T>& c, int64_t begin, int64_t end) {
  constexpr int kVectors = 4;  // enough independent sums to cover the latency of an addition
  const int64_t hidden = c.out.cols();
  for (int64_t token = begin; token < end; ++token) {
    int64_t h = 0;
    for (; h + kVectors * kLanes <= hidden; h += kVectors * kLanes) {
      CombineColumns<kVectors>(c, token, h);
    }
    for (; h + kLanes <= hidden; h += kLanes) CombineColumns<1>(c, token, h);
    if (h < hidden) CombineTail(c, token, h, hidden - h);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::combine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::combine {

namespace {

// Tokens a range: about 32 Ki elements of the output.
int64_t Grain(int64_t hidden) {
  return std::max<int64_t>(1, (int64_t{32} << 10) / std::max<int64_t>(hidden, 1));
}

}  // namespace

template <typename T>
void Run(const Combine<T>& combine, ThreadPool& threads) {
  threads.For(combine.out.rows(), Grain(combine.out.cols()), [&](int64_t begin, int64_t end) {
    MOE_SIMD(CombineTokens<T>)(combine, begin, end);
  });
}

template <typename T>
void Run(const WeightGradient<T>& g, ThreadPool& threads) {
  threads.For(g.dy.rows(), Grain(g.dy.cols()), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t s = g.slot_offset[t]; s < g.slot_offset[t + 1]; ++s) {
        const int32_t row = g.row_of_slot[s];
        g.d_weight[s] =
            row < 0 ? 0.0f
                    : static_cast<float>(WideDot<T>(g.dy.row(t), g.rows.row(row), g.dy.cols()));
      }
    }
  });
}

template <typename T>
void Reference(const Combine<T>& c) {
  for (int64_t t = 0; t < c.out.rows(); ++t) {
    for (int64_t h = 0; h < c.out.cols(); ++h) {
      float sum = c.write == Write::kAdd ? static_cast<float>(c.out(t, h)) : 0.0f;
      for (int64_t s = c.slot_offset[t]; s < c.slot_offset[t + 1]; ++s) {
        if (c.row_of_slot[s] < 0) continue;
        const auto value = static_cast<float>(c.rows(c.row_of_slot[s], h));
        sum = c.weight == nullptr ? sum + value : std::fma(c.weight[s], value, sum);
      }
      c.out(t, h) = T(sum);
    }
  }
}

template <typename T>
void Reference(const WeightGradient<T>& g) {
  for (int64_t t = 0; t < g.dy.rows(); ++t) {
    for (int64_t s = g.slot_offset[t]; s < g.slot_offset[t + 1]; ++s) {
      double partial[16] = {};
      for (int64_t h = 0; g.row_of_slot[s] >= 0 && h < g.dy.cols(); ++h) {
        partial[h % 16] += static_cast<double>(static_cast<float>(g.dy(t, h))) *
                           static_cast<double>(static_cast<float>(g.rows(g.row_of_slot[s], h)));
      }
      for (int width = 8; width >= 1; width /= 2) {
        for (int i = 0; i < width; ++i) partial[i] += partial[i + width];
      }
      g.d_weight[s] = static_cast<float>(partial[0]);
    }
  }
}

}  // namespace moe::combine

namespace moe {
namespace {

// Tokens [T, H] on one side, rows [S, H] on the other, slots between them.
template <typename T>
absl::Status CheckCombine(absl::string_view function, MatrixView<const T> tokens,
                          MatrixView<const T> rows, absl::Span<const int64_t> slot_offset,
                          absl::Span<const int32_t> row_of_slot) {
  MOE_RETURN_IF_ERROR(CheckShape(function, "rows", rows, rows.rows(), tokens.cols()));
  // Without tokens the offsets may be empty.
  if (tokens.rows() == 0 && slot_offset.empty() && row_of_slot.empty()) return absl::OkStatus();
  return CheckLength(function, "slot_offset", slot_offset.size(), tokens.rows() + 1);
}

// The number of slots is in slot_offset, which the host cannot read on CUDA.
absl::Status CheckSlots(absl::string_view function, absl::Span<const int64_t> slot_offset,
                        absl::Span<const int32_t> row_of_slot, const Stream& stream) {
  if (IsCuda(stream)) return absl::OkStatus();
  const int64_t slots = slot_offset.empty() ? 0 : slot_offset.back();
  return CheckLength(function, "row_of_slot", row_of_slot.size(), slots);
}

}  // namespace

template <typename T>
absl::Status CombineRows(MatrixView<const T> rows, absl::Span<const int64_t> slot_offset,
                         absl::Span<const int32_t> row_of_slot, absl::Span<const float> weight,
                         MatrixView<T> out, Write write, Stream& stream) {
  constexpr char kName[] = "CombineRows";
  MOE_RETURN_IF_ERROR(CheckCombine<T>(kName, out, rows, slot_offset, row_of_slot));
  if (!weight.empty()) {
    MOE_RETURN_IF_ERROR(
        CheckLength(kName, "weight", weight.size(), static_cast<int64_t>(row_of_slot.size())));
  }
  MOE_RETURN_IF_ERROR(CheckSlots(kName, slot_offset, row_of_slot, stream));
  return RunOp(kName,
               combine::Combine<T>{rows, slot_offset.data(), row_of_slot.data(),
                                   weight.empty() ? nullptr : weight.data(), out, write},
               stream);
}

template <typename T>
absl::Status CombineWeightGradient(MatrixView<const T> dy, MatrixView<const T> rows,
                                   absl::Span<const int64_t> slot_offset,
                                   absl::Span<const int32_t> row_of_slot,
                                   absl::Span<float> d_weight, Stream& stream) {
  constexpr char kName[] = "CombineWeightGradient";
  MOE_RETURN_IF_ERROR(CheckCombine<T>(kName, dy, rows, slot_offset, row_of_slot));
  MOE_RETURN_IF_ERROR(
      CheckLength(kName, "d_weight", d_weight.size(), static_cast<int64_t>(row_of_slot.size())));
  MOE_RETURN_IF_ERROR(CheckSlots(kName, slot_offset, row_of_slot, stream));
  return RunOp(
      kName,
      combine::WeightGradient<T>{dy, rows, slot_offset.data(), row_of_slot.data(), d_weight.data()},
      stream);
}

MOE_INSTANTIATE_OVERLOAD(void, combine::Reference, combine::Combine)
MOE_INSTANTIATE_OVERLOAD(void, combine::Reference, combine::WeightGradient)
MOE_INSTANTIATE_FOR_STORAGE(CombineRows)
MOE_INSTANTIATE_FOR_STORAGE(CombineWeightGradient)

}  // namespace moe
#endif  // HWY_ONCE
