#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <type_traits>
#include <utility>

#include "kernels/base/status_macros.h"
#include "moe/cli/ckpt/ckpt.h"

namespace moe::ckpt {
namespace {

// Integers in the order of the numbers; both zeros are equal.
template <typename T>
auto Ordered(T value) {
  using Integer = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  const auto bits = std::bit_cast<Integer>(value);
  return static_cast<int64_t>(bits < 0 ? std::numeric_limits<Integer>::min() - bits : bits);
}

template <typename T>
void Compare(const std::vector<T>& a, const std::vector<T>& b, StateDifference& difference) {
  for (size_t i = 0; i < a.size(); ++i) {
    const int64_t x = Ordered(a[i]), y = Ordered(b[i]);
    if (x == y && std::signbit(a[i]) == std::signbit(b[i])) continue;
    ++difference.different;
    const uint64_t ulps =
        static_cast<uint64_t>(std::max(x, y)) - static_cast<uint64_t>(std::min(x, y));
    difference.max_ulps = std::max(difference.max_ulps, ulps);
    const double distance = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!std::isnan(distance)) difference.max_abs = std::max(difference.max_abs, distance);
  }
}

template <typename T>
absl::Status CompareState(const ManifestTensor& tensor, CheckpointReader& a, CheckpointReader& b,
                          StateDifference& difference) {
  std::vector<T> of_a, of_b;
  for (const TensorBox& box : PiecesOf(tensor)) {
    const auto read = [&](CheckpointReader& reader, std::vector<T>& memory) {
      memory.resize(box.rows() * box.cols());
      return reader.ReadBox(tensor.name, difference.state, box,
                            MatrixView<T>(memory.data(), box.rows(), box.cols()));
    };
    MOE_RETURN_IF_ERROR(read(a, of_a));
    MOE_RETURN_IF_ERROR(read(b, of_b));
    Compare(of_a, of_b, difference);
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<TensorBox> PiecesOf(const ManifestTensor& tensor) {
  constexpr int64_t kMostElements = int64_t{1} << 20;
  const int64_t cols = std::min(tensor.cols, kMostElements);
  const int64_t rows = kMostElements / cols;  // 1 if rows are cut
  std::vector<TensorBox> pieces;
  for (int64_t row = 0; row < tensor.rows; row += rows) {
    for (int64_t col = 0; col < tensor.cols; col += cols) {
      pieces.push_back({.row_begin = row,
                        .row_end = std::min(row + rows, tensor.rows),
                        .col_begin = col,
                        .col_end = std::min(col + cols, tensor.cols)});
    }
  }
  return pieces;
}

absl::StatusOr<std::vector<StateDifference>> Diff(CheckpointReader& a, CheckpointReader& b) {
  struct Sides {
    const ManifestTensor* a = nullptr;
    const ManifestTensor* b = nullptr;
  };
  std::map<std::pair<std::string, std::string>, Sides> states;
  for (const ManifestTensor& tensor : a.manifest().tensors) {
    for (const std::string& state : tensor.states) states[{tensor.name, state}].a = &tensor;
  }
  for (const ManifestTensor& tensor : b.manifest().tensors) {
    for (const std::string& state : tensor.states) states[{tensor.name, state}].b = &tensor;
  }
  std::vector<StateDifference> differences;
  for (const auto& [name, sides] : states) {
    const auto add = [&, &of = name](const ManifestTensor& tensor,
                                     const char* only) -> StateDifference& {
      differences.push_back({.tensor = of.first,
                             .state = of.second,
                             .elements = tensor.rows * tensor.cols,
                             .only = only});
      return differences.back();
    };
    const bool alike = sides.a != nullptr && sides.b != nullptr && sides.a->type == sides.b->type &&
                       sides.a->rows == sides.b->rows && sides.a->cols == sides.b->cols;
    if (!alike) {
      if (sides.a != nullptr) add(*sides.a, "A");
      if (sides.b != nullptr) add(*sides.b, "B");
      continue;
    }
    StateDifference& difference = add(*sides.a, "");
    MOE_RETURN_IF_ERROR(sides.a->type == SafetensorsType::kF32
                            ? CompareState<float>(*sides.a, a, b, difference)
                            : CompareState<double>(*sides.a, a, b, difference));
  }
  return differences;
}

}  // namespace moe::ckpt
