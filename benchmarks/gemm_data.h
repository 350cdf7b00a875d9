// The operands and outputs of every grouped product that gemm_bench measures, and their check.
#ifndef MOE_BENCHMARKS_GEMM_DATA_H_
#define MOE_BENCHMARKS_GEMM_DATA_H_

#include <cstdint>
#include <iterator>
#include <random>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/gemm_problem.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/packed_weights.h"

namespace moe::bench {

// `row_count` rows for each of the experts.
template <typename T>
struct GemmData {
  GemmData(int64_t row_count, int64_t in_features, int64_t out_features, int64_t expert_count)
      : rows(row_count), in(in_features), out(out_features), experts(expert_count) {
    std::minstd_rand engine(7);
    std::uniform_real_distribution<float> uniform(-1, 1);
    const auto fill = [&](absl::Span<T>& v, int64_t size) {
      v = Take<T>(size);
      for (T& e : v) e = T(uniform(engine));
    };
    fill(x, rows * experts * in);
    fill(dy, rows * experts * out);
    fill(w, experts * out * in);
    y = Take<T>(std::ssize(dy));
    packed_y = Take<T>(std::ssize(dy));
    dx = Take<T>(std::ssize(x));
    dw = Take<float>(std::ssize(w));
    for (int64_t e = 0; e <= experts; ++e) offsets.push_back(e * rows);
    for (int64_t e = 0; e < experts; ++e) weight.emplace_back(w.data() + e * out * in, out, in);
    read.resize(w.size() * sizeof(T) / sizeof(float), 1.0f);
  }

  absl::Status Pack(Workspace&, Stream& stream) {
    for (const MatrixView<const T>& one : weight) {
      const auto i = static_cast<size_t>(&one - weight.data());
      if (packed.size() <= i) {
        MOE_ASSIGN_OR_RETURN(auto made, PackedWeights<T>::Create(out, in));
        packed.push_back(std::move(made));
      }
      MOE_RETURN_IF_ERROR(packed[i].Pack(one, 0, stream));
    }
    return absl::OkStatus();
  }
  absl::Status PackedForward(Workspace& workspace, Stream& stream) {
    return GroupedGemm<T>({x.data(), rows * experts, in}, offsets, packed, 0,
                          {packed_y.data(), rows * experts, out}, workspace, stream);
  }

  absl::Status Forward(Workspace& workspace, Stream& stream) {
    return GroupedGemm<T>({x.data(), rows * experts, in}, offsets, weight,
                          {y.data(), rows * experts, out}, workspace, stream);
  }
  absl::Status InputGradient(Workspace& workspace, Stream& stream) {
    return GroupedGemmInputGradient<T>({dy.data(), rows * experts, out}, offsets, weight,
                                       {dx.data(), rows * experts, in}, workspace, stream);
  }
  absl::Status WeightGradient(Workspace& workspace, Stream& stream) {
    for (int64_t e = 0; e < experts; ++e) {
      MOE_RETURN_IF_ERROR(GemmWeightGradient<T>(
          {dy.data() + e * rows * out, rows, out}, {x.data() + e * rows * in, rows, in},
          {dw.data() + e * out * in, out, in}, Write::kOverwrite, workspace, stream));
    }
    return absl::OkStatus();
  }

  // Elements of the four outputs, spread evenly, that do not have the bits of the specification.
  int64_t Wrong() const {
    constexpr int64_t kSamples = 97;
    int64_t wrong = 0;
    for (int64_t s = 0; s < kSamples; ++s) {
      const int64_t n = rows * experts * s / kSamples, e = n / rows;
      const int64_t o = out * (s * 31 % kSamples) / kSamples;
      const int64_t k = in * (s * 57 % kSamples) / kSamples;
      using gemm::Layout;
      const T* const we = w.data() + e * out * in;
      const float want_y = Element({x.data() + n * in, 1, in}, {we + o * in, 1, in}, Layout::kPlain,
                                   Layout::kTransposed);
      const float want_dx = Element({dy.data() + n * out, 1, out}, {we + k, out, 1, in},
                                    Layout::kPlain, Layout::kPlain);
      const float want_dw =
          Element({dy.data() + e * rows * out + o, rows, 1, out},
                  {x.data() + e * rows * in + k, rows, 1, in}, Layout::kTransposed, Layout::kPlain);
      wrong += !(T(want_y) == y[n * out + o]) + !(T(want_y) == packed_y[n * out + o]) +
               !(T(want_dx) == dx[n * in + k]) + (want_dw != dw[(e * out + o) * in + k]);
    }
    return wrong;
  }
  // The one element of a product, by the specification.
  static float Element(MatrixView<const T> a, MatrixView<const T> b, gemm::Layout a_layout,
                       gemm::Layout b_layout) {
    float element = 0;
    gemm::Reference(gemm::Problem<T, float>{
        .a = a, .b = b, .c = {&element, 1, 1}, .a_layout = a_layout, .b_layout = b_layout});
    return element;
  }

  // Memory as tensors have it.
  template <typename U>
  absl::Span<U> Take(int64_t size) {
    memory.push_back(Buffer::Allocate(size * int64_t{sizeof(U)}).value());
    return memory.back().template span<U>();
  }

  int64_t rows, in, out, experts;
  std::vector<Buffer> memory;
  absl::Span<T> x, dy, w, y, packed_y, dx;
  absl::Span<float> dw;
  std::vector<int64_t> offsets;
  std::vector<MatrixView<const T>> weight;
  std::vector<PackedWeights<T>> packed;
  std::vector<float> read;  // as many bytes as the weights
};

}  // namespace moe::bench

#endif  // MOE_BENCHMARKS_GEMM_DATA_H_
