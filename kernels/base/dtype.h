// Element types that cross the library's interfaces.
// No Abseil here: .cu files include this header.
#ifndef MOE_KERNELS_BASE_DTYPE_H_
#define MOE_KERNELS_BASE_DTYPE_H_

#include <cstdint>

#include "kernels/base/tensor_view.h"

namespace moe {

enum class DType : uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16, kInt32, kInt64, kUInt8 };

// Conversions also run on devices. There nvcc supports __builtin_bit_cast, but std::bit_cast only
// with a flag.

// Storage of bfloat16: the upper half of a float32. Arithmetic happens in float32.
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  // Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
  MOE_HOST_DEVICE constexpr explicit BFloat16(float value) {
    const uint32_t u = __builtin_bit_cast(uint32_t, value);
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits =
        static_cast<uint16_t>(is_nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  MOE_HOST_DEVICE constexpr explicit operator float() const {
    return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  }
  bool operator==(const BFloat16&) const = default;
};

// Storage of IEEE binary16: 5 bits of exponent, 10 of mantissa, gradual underflow below 2^-14,
// infinity from 65520 on. Arithmetic happens in float32.
struct Float16 {
  uint16_t bits = 0;

  Float16() = default;
  // Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
  MOE_HOST_DEVICE constexpr explicit Float16(float value) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    const uint32_t u = __builtin_bit_cast(uint32_t, value);
    const uint32_t magnitude = u & 0x7fffffffu;
    bits = static_cast<uint16_t>((u >> 16 & 0x8000u) | Round(magnitude));
#endif
  }
  MOE_HOST_DEVICE constexpr explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t shifted = static_cast<uint32_t>(bits & 0x7fffu) << 13;
    // The exponents' biases differ by 112. The product is exact, below the normal range as well.
    const float scaled = __builtin_bit_cast(float, shifted) * 0x1p112f;
    const bool is_finite = (bits & 0x7c00u) != 0x7c00u;
    return __builtin_bit_cast(
        float, sign | (is_finite ? __builtin_bit_cast(uint32_t, scaled) : shifted | 0x7f800000u));
  }
  bool operator==(const Float16&) const = default;

 private:
  // The lower 15 bits of the result for those of a float32.
  static constexpr uint32_t Round(uint32_t u) {
    if (u > 0x7f800000u) return 0x7e00u | (u >> 13 & 0x3ffu);
    // 65536; smaller values that round up carry into infinity
    if (u >= 0x47800000u) return 0x7c00u;
    // Below 2^-14 the unit is 2^-24, that of the float32 from 0.5 to 1: the addition rounds.
    if (u < 0x38800000u) {
      return __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, u) + 0.5f) - 0x3f000000u;
    }
    return (u - 0x38000000u + 0xfffu + (u >> 13 & 1u)) >> 13;
  }
};

template <typename T>
struct DTypeOf;
#define MOE_DTYPE(T, dtype)                      \
  template <>                                    \
  struct DTypeOf<T> {                            \
    static constexpr DType value = DType::dtype; \
  };
MOE_DTYPE(float, kFloat32)
MOE_DTYPE(double, kFloat64)
MOE_DTYPE(BFloat16, kBFloat16)
MOE_DTYPE(Float16, kFloat16)
MOE_DTYPE(int32_t, kInt32)
MOE_DTYPE(int64_t, kInt64)
MOE_DTYPE(uint8_t, kUInt8)
#undef MOE_DTYPE

// Bytes of one element.
constexpr int64_t SizeOf(DType type) {
  switch (type) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kUInt8:
      return 1;
  }
  return 0;
}

// "f32", "bf16" ...: the names that flags and tables use.
constexpr const char* NameOf(DType type) {
  switch (type) {
    case DType::kFloat32:
      return "f32";
    case DType::kFloat64:
      return "f64";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "f16";
    case DType::kInt32:
      return "i32";
    case DType::kInt64:
      return "i64";
    case DType::kUInt8:
      return "u8";
  }
  return "?";
}

// instantiate(T) for every storage type of rows and weights.
#define MOE_FOR_STORAGE_TYPES(instantiate) \
  instantiate(float) instantiate(BFloat16) instantiate(Float16)

// Instantiates a function template without overloads for them ...
#define MOE_INSTANTIATE_FOR_STORAGE(function)               \
  template decltype(function<float>) function<float>;       \
  template decltype(function<BFloat16>) function<BFloat16>; \
  template decltype(function<Float16>) function<Float16>;

// ... and the overload `result function(const Op<T>&)`, or with another parameter behind that one.
#define MOE_INSTANTIATE_OVERLOAD(result, function, Op, ...)                 \
  template result function(const Op<float>& __VA_OPT__(, ) __VA_ARGS__);    \
  template result function(const Op<BFloat16>& __VA_OPT__(, ) __VA_ARGS__); \
  template result function(const Op<Float16>& __VA_OPT__(, ) __VA_ARGS__);

// Whether an operation replaces its output or adds to it.
enum class Write : uint8_t { kOverwrite, kAdd };

}  // namespace moe

#endif  // MOE_KERNELS_BASE_DTYPE_H_
