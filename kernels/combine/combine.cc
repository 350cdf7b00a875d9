#include "kernels/combine/combine.h"

#include <cmath>

#include <absl/strings/str_cat.h>

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/combine/combine_op.h"

namespace moe {
namespace combine {

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

}  // namespace combine

namespace {

// Tokens [T, H] on one side, rows [S, H] on the other, slots between them.
template <typename T>
absl::Status CheckCombine(absl::string_view function, MatrixView<const T> tokens,
                          MatrixView<const T> rows, absl::Span<const int64_t> slot_offset,
                          absl::Span<const int32_t> row_of_slot) {
  MOE_RETURN_IF_ERROR(CheckShape(function, "rows", rows, rows.rows(), tokens.cols()));
  // No tokens need no offsets at all.
  if (tokens.rows() == 0 && slot_offset.empty() && row_of_slot.empty()) return absl::OkStatus();
  return CheckLength(function, "slot_offset", slot_offset.size(), tokens.rows() + 1);
}

// How many slots there are stands in slot_offset, which on CUDA the host cannot read.
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

#define MOE_INSTANTIATE(T)                                                                 \
  template void combine::Reference(const combine::Combine<T>&);                            \
  template void combine::Reference(const combine::WeightGradient<T>&);                     \
  template absl::Status CombineRows<T>(MatrixView<const T>, absl::Span<const int64_t>,     \
                                       absl::Span<const int32_t>, absl::Span<const float>, \
                                       MatrixView<T>, Write, Stream&);                     \
  template absl::Status CombineWeightGradient<T>(                                          \
      MatrixView<const T>, MatrixView<const T>, absl::Span<const int64_t>,                 \
      absl::Span<const int32_t>, absl::Span<float>, Stream&);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
