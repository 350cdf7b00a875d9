// Run-time choice of the storage type of rows and weights.
#ifndef MOE_KERNELS_BASE_STORAGE_TYPE_H_
#define MOE_KERNELS_BASE_STORAGE_TYPE_H_

#include "kernels/base/choice.h"
#include "kernels/base/dtype.h"

namespace moe {

// Floats of 16 bits: sums are computed in float32 and rounded once.
constexpr bool Is16BitFloat(DType type) {
  return type == DType::kBFloat16 || type == DType::kFloat16;
}

constexpr bool IsStorageType(DType type) {
  return type == DType::kFloat32 || Is16BitFloat(type);
}
inline constexpr Choice<DType> kStorageTypeWords[] = {
    {"f32", DType::kFloat32}, {"bf16", DType::kBFloat16}, {"f16", DType::kFloat16}};

// f(T()) for the storage type T that `type` names.
template <typename Function>
auto WithStorageType(DType type, Function f) {
  if (type == DType::kBFloat16) return f(BFloat16());
  if (type == DType::kFloat16) return f(Float16());
  return f(float());
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_STORAGE_TYPE_H_
