#include "kernels/topk_gate/topk_select_cpu.h"

#include <algorithm>
#include <cstdint>

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
  Ranking ranking(value.cols());
  for (int64_t first = begin; first < end; first += kRankRows) {
    const int64_t last = std::min(end, first + kRankRows);
    for (int64_t t = first; t < last; ++t) ranking.Add(t - first, value.row(t));
    ranking.TakeBest(RowRange(expert, first, last));
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
