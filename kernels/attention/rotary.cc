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
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

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

// One head of one row: pairs (d, d + half).
template <typename T>
void Rotate(const float* cosine, const float* sine, float direction, int64_t half, T* x) {
  for (int64_t d = 0; d < half; ++d) {
    const auto a = static_cast<float>(x[d]);
    const auto b = static_cast<float>(x[d + half]);
    const float s = direction * sine[d];
    x[d] = T(a * cosine[d] - b * s);
    x[d + half] = T(b * cosine[d] + a * s);
  }
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
        for (int64_t head = 0; head < shape.heads; ++head) {
          Rotate(table->cosine.data() + at, table->sine.data() + at, static_cast<float>(direction),
                 half, x.row(t) + head * depth);
        }
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
