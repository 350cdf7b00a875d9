#include "kernels/topk_gate/topk_select.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>

#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/gate_launch_cuda.h"
#include "kernels/topk_gate/topk_gate_cpu.h"
#include "kernels/topk_gate/topk_select_cpu.h"

namespace moe {
namespace {

// The order of selection: larger first, then the lower id; a NaN after everything else.
bool Precedes(float a, int32_t id_a, float b, int32_t id_b) {
  if (std::isnan(a) != std::isnan(b)) return std::isnan(b);
  if (a != b && !std::isnan(a)) return a > b;
  return id_a < id_b;
}

}  // namespace

void TopKSelectReference(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                         int64_t end) {
  const auto experts = static_cast<int32_t>(value.cols());
  for (int64_t t = begin; t < end; ++t) {
    const float* const row = value.row(t);
    int32_t* const taken = expert.row(t);
    for (int64_t j = 0; j < expert.cols(); ++j) {
      int32_t best = -1;
      for (int32_t e = 0; e < experts; ++e) {
        if (std::find(taken, taken + j, e) != taken + j) continue;
        if (best < 0 || Precedes(row[e], e, row[best], best)) best = e;
      }
      taken[j] = best;
    }
  }
}

absl::Status TopKSelect(MatrixView<const float> value, MatrixView<int32_t> expert, Stream& stream) {
  constexpr const char* kFunction = "TopKSelect";
  const int64_t experts = value.cols();
  const int64_t k = expert.cols();
  MOE_RETURN_IF_ERROR(CheckSelection(kFunction, k, experts));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "value", value, value.rows(), experts));
  MOE_RETURN_IF_ERROR(CheckShape(kFunction, "expert", expert, value.rows(), k));
  if (IsCuda(stream)) {
    return LaunchGate(kFunction, {.logits = value, .expert = expert}, stream);
  }
  return stream.Enqueue([value, expert, &threads = stream.threads()] {
    threads.For(value.rows(), kGateRowsPerTask,
                [&](int64_t begin, int64_t end) { TopKSelectCpu(value, expert, begin, end); });
    return absl::OkStatus();
  });
}

}  // namespace moe
