#include "kernels/draw/draw.h"

#include <algorithm>

#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/draw/draw_op.h"

namespace moe {
namespace draw {

constexpr int64_t kGrain = 1 << 14;

template <typename T>
void Run(const Uniform<T>& uniform, ThreadPool& threads) {
  threads.For((uniform.count + 3) / 4, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = 4 * begin; i < std::min(4 * end, uniform.count); i += 4) {
      const auto four = Philox(KeyOfItem(uniform.key, i), 0);
      for (int64_t j = i; j < std::min(i + 4, uniform.count); ++j) {
        uniform.values[j] = uniform.Of(four[static_cast<size_t>(j - i)]);
      }
    }
  });
}

template <typename T>
void Run(const Normal<T>& normal, ThreadPool& threads) {
  threads.For(normal.count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) normal.values[i] = normal(i);
  });
}

}  // namespace draw

template <typename T>
absl::Status DrawUniform(const RandomKey& key, absl::Span<T> values, Stream& stream) {
  const auto count = static_cast<int64_t>(values.size());
  return RunOp("DrawUniform", draw::Uniform<T>{key, values.data(), count}, stream);
}

template <typename T>
absl::Status DrawNormal(const RandomKey& key, absl::Span<T> values, Stream& stream) {
  const auto count = static_cast<int64_t>(values.size());
  return RunOp("DrawNormal", draw::Normal<T>{key, values.data(), count}, stream);
}

MOE_INSTANTIATE_FOR_STORAGE(DrawUniform)
MOE_INSTANTIATE_FOR_STORAGE(DrawNormal)

}  // namespace moe
