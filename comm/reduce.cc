#include "comm/reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int64_t kTile = 1024;  // elements; 8 KiB of accumulators stay in the L1 cache

// Integers wrap around: signed overflow would be undefined.
template <ReduceOp kOp, typename A>
A Apply(A a, A b) {
  if constexpr (kOp == ReduceOp::kMax) {
    return std::max(a, b);
  } else if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

// out[i] = a[i] op b[i]. T is stored, A is what it is reduced in. Element by element, so vector
// width does not change the bits.
template <ReduceOp kOp, typename A, typename X, typename T>
[[gnu::always_inline]] inline void CombineLoop(A* out, const X* a, const T* b, int64_t n) {
  // out may be a or b: each element is read before it is written.
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Apply<kOp>(static_cast<A>(a[i]), static_cast<A>(b[i]));
  }
}

#if defined(__x86_64__)
template <ReduceOp kOp, typename A, typename X, typename T>
[[gnu::target("avx2")]] void CombineAvx2(A* out, const X* a, const T* b, int64_t n) {
  CombineLoop<kOp>(out, a, b, n);
}
bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}
#endif

template <ReduceOp kOp, typename A, typename X, typename T>
void Combine(A* out, const X* a, const T* b, int64_t n) {
#if defined(__x86_64__)
  if (HasAvx2()) return CombineAvx2<kOp>(out, a, b, n);
#endif
  CombineLoop<kOp>(out, a, b, n);
}

template <ReduceOp kOp, typename T, typename A>
void ReduceTiles(absl::Span<const std::byte* const> inputs, absl::Span<std::byte* const> outputs,
                 int64_t begin, int64_t end) {
  alignas(64) A acc[kTile];
  alignas(64) T rounded[kTile];
  const auto input = [&](size_t r) {
    return reinterpret_cast<const T*>(inputs[r]);
  };
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t n = std::min(kTile, end - at);
    const void* result = acc;
    if (inputs.size() == 1) result = input(0) + at;
    if constexpr (std::is_same_v<T, A>) {
      if (inputs.size() == 2) {  // the sum goes straight to where it is kept: a pass less
        T* const to = reinterpret_cast<T*>(outputs[0]) + at;
        Combine<kOp>(to, input(0) + at, input(1) + at, n);
        result = to;
      }
    }
    if (result == acc) Combine<kOp>(acc, input(0) + at, input(1) + at, n);
    for (size_t r = 2; r < inputs.size(); ++r) {
      Combine<kOp>(acc, static_cast<const A*>(acc), input(r) + at, n);
    }
    if (!std::is_same_v<T, A> && inputs.size() > 1) {
      for (int64_t i = 0; i < n; ++i) rounded[i] = T(acc[i]);
      result = rounded;
    }
    for (std::byte* output : outputs) {
      std::byte* const to = output + at * static_cast<int64_t>(sizeof(T));
      if (to != result) std::memcpy(to, result, static_cast<size_t>(n) * sizeof(T));
    }
  }
}

template <typename T, typename A>
void Reduce(absl::Span<const std::byte* const> inputs, absl::Span<std::byte* const> outputs,
            int64_t begin, int64_t end, ReduceOp op) {
  if (op == ReduceOp::kSum) {
    ReduceTiles<ReduceOp::kSum, T, A>(inputs, outputs, begin, end);
  } else {
    ReduceTiles<ReduceOp::kMax, T, A>(inputs, outputs, begin, end);
  }
}

}  // namespace

bool IsReducible(DType type) {
  return type != DType::kUInt8;
}

void ReduceInOrder(absl::Span<const std::byte* const> inputs, absl::Span<std::byte* const> outputs,
                   int64_t begin, int64_t end, DType type, ReduceOp op) {
  switch (type) {
    case DType::kFloat32:
      return Reduce<float, float>(inputs, outputs, begin, end, op);
    case DType::kFloat64:
      return Reduce<double, double>(inputs, outputs, begin, end, op);
    case DType::kBFloat16:
      return Reduce<BFloat16, float>(inputs, outputs, begin, end, op);
    case DType::kFloat16:
      return Reduce<Float16, float>(inputs, outputs, begin, end, op);
    case DType::kInt32:
      return Reduce<int32_t, int32_t>(inputs, outputs, begin, end, op);
    case DType::kInt64:
      return Reduce<int64_t, int64_t>(inputs, outputs, begin, end, op);
    case DType::kUInt8:
      break;
  }
  MOE_CHECK(false);  // IsReducible is checked where the call enters
}

}  // namespace moe
