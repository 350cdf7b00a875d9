#include "comm/reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int64_t kTile = 1024;  // elements; 8 KiB of accumulators stay in the L1 cache

// Integers wrap around: signed overflow would be undefined.
template <typename A>
A Sum(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

// T is stored, A is what it is reduced in.
template <typename T, typename A>
struct Reducer {
  static void Load(A* acc, const T* in, int64_t n) {
    for (int64_t i = 0; i < n; ++i) acc[i] = static_cast<A>(in[i]);
  }
  static void Add(A* acc, const T* in, int64_t n) {
    for (int64_t i = 0; i < n; ++i) acc[i] = Sum(acc[i], static_cast<A>(in[i]));
  }
  static void Max(A* acc, const T* in, int64_t n) {
    for (int64_t i = 0; i < n; ++i) acc[i] = std::max(acc[i], static_cast<A>(in[i]));
  }

  static void Run(absl::Span<const std::byte* const> inputs, absl::Span<std::byte* const> outputs,
                  int64_t begin, int64_t end, ReduceOp op) {
    alignas(64) A acc[kTile];
    alignas(64) T out[kTile];
    for (int64_t at = begin; at < end; at += kTile) {
      const int64_t n = std::min(kTile, end - at);
      Load(acc, reinterpret_cast<const T*>(inputs[0]) + at, n);
      for (const std::byte* input : inputs.subspan(1)) {
        const T* const in = reinterpret_cast<const T*>(input) + at;
        op == ReduceOp::kSum ? Add(acc, in, n) : Max(acc, in, n);
      }
      const void* result = acc;
      if constexpr (!std::is_same_v<T, A>) {
        for (int64_t i = 0; i < n; ++i) out[i] = T(acc[i]);
        result = out;
      }
      const size_t bytes = static_cast<size_t>(n) * sizeof(T);
      for (std::byte* output : outputs) {
        std::memcpy(output + at * static_cast<int64_t>(sizeof(T)), result, bytes);
      }
    }
  }
};

}  // namespace

bool IsReducible(DType type) {
  return type != DType::kFloat16 && type != DType::kUInt8;
}

void ReduceInOrder(absl::Span<const std::byte* const> inputs, absl::Span<std::byte* const> outputs,
                   int64_t begin, int64_t end, DType type, ReduceOp op) {
  switch (type) {
    case DType::kFloat32:
      return Reducer<float, float>::Run(inputs, outputs, begin, end, op);
    case DType::kFloat64:
      return Reducer<double, double>::Run(inputs, outputs, begin, end, op);
    case DType::kBFloat16:
      return Reducer<BFloat16, float>::Run(inputs, outputs, begin, end, op);
    case DType::kInt32:
      return Reducer<int32_t, int32_t>::Run(inputs, outputs, begin, end, op);
    case DType::kInt64:
      return Reducer<int64_t, int64_t>::Run(inputs, outputs, begin, end, op);
    case DType::kFloat16:
    case DType::kUInt8:
      break;
  }
  MOE_CHECK(false);  // IsReducible is checked where the call enters
}

void AddPartial(float* acc, const float* partial, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = partial[i] + acc[i];
}

void AddPartial(int64_t* acc, const int64_t* partial, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = Sum(partial[i], acc[i]);
}

}  // namespace moe
