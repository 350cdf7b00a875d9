#include "kernels/topk_gate/topk_select_cpu.h"

#include <cstdint>
#include <vector>

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/topk_gate/topk_select_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/topk_gate/gate_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

void SelectRows(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                int64_t end) {
  const int64_t experts = value.cols();
  const int64_t padded = PaddedExperts(experts);
  std::vector<int32_t> keys(static_cast<size_t>(padded));
  for (int64_t t = begin; t < end; ++t) {
    WriteKeys(value.row(t), experts, padded, keys.data());
    for (int64_t j = 0; j < expert.cols(); ++j) expert(t, j) = TakeLargest(padded, keys.data());
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(SelectRows);

void TopKSelectCpu(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                   int64_t end) {
  HWY_DYNAMIC_DISPATCH(SelectRows)(value, expert, begin, end);
}

}  // namespace moe
#endif  // HWY_ONCE
