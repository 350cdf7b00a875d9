// SelectExperts on a device, and selection in plain loops.
#ifndef MOE_TESTS_KERNELS_GATE_RUN_H_
#define MOE_TESTS_KERNELS_GATE_RUN_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/topk_gate/gate_row.h"
#include "kernels/topk_gate/select_experts.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {

struct GateResult {
  Matrix<float> score, weight;
  Matrix<int32_t> expert;
  std::vector<float> log_sum_exp;
  std::vector<int64_t> count, slot_offset;

  std::vector<int32_t> Ids(int64_t t) const {
    return {expert.view().row(t), expert.view().row(t) + expert.cols()};
  }
};

// The outputs on a device, before a gate writes them.
struct GateOutputs {
  GateOutputs(const TestDevice& on, int64_t tokens, int64_t experts, int64_t k, MatrixLayout layout)
      : device(on),
        score(on.Copy(Matrix<float>(tokens, experts, layout))),
        weight(on.Copy(Matrix<float>(tokens, k, layout))),
        expert(on.Copy(Matrix<int32_t>(tokens, k, layout))),
        log_sum_exp(on.Copy(std::vector<float>(size_t(tokens), -77.0f))),
        count(on.Copy(std::vector<int64_t>(size_t(experts), -77))),
        slot_offset(on.Copy(std::vector<int64_t>(size_t(tokens) + 1, -77))) {}
  SelectExpertsOutput Views() const {
    return {.score = score.view(),
            .expert = expert.view(),
            .weight = weight.view(),
            .log_sum_exp = log_sum_exp.span(),
            .count = count.span(),
            .slot_offset = slot_offset.span()};
  }
  GateResult Read() const {
    return {device.Read(score),       device.Read(weight), device.Read(expert),
            device.Read(log_sum_exp), device.Read(count),  device.Read(slot_offset)};
  }

  const TestDevice& device;
  DeviceMatrix<float> score, weight;
  DeviceMatrix<int32_t> expert;
  DeviceArray<float> log_sum_exp;
  DeviceArray<int64_t> count, slot_offset;
};

inline GateResult RunGate(const TestDevice& device, const GateRule& rule,
                          const Matrix<float>& logits, int64_t k,
                          const std::vector<float>& bias = {}, MatrixLayout layout = {}) {
  const auto in = device.Copy(logits);
  const auto expert_bias = device.Copy(bias);
  const GateOutputs out(device, logits.rows(), logits.cols(), k, layout);
  EXPECT_OK(SelectExperts(rule, {.logits = in.view(), .expert_bias = expert_bias.span()},
                          out.Views(), device.stream()));
  return out.Read();
}

// The ids of the k best of a row, best first.
inline std::vector<int32_t> BestOf(const float* row, int64_t experts, int64_t k) {
  std::vector<int32_t> ids;
  for (int64_t j = 0; j < k; ++j) {
    int32_t best = -1;
    for (int32_t e = 0; e < experts; ++e) {
      if (std::find(ids.begin(), ids.end(), e) != ids.end()) continue;
      if (best < 0 || RanksBefore(row[e], e, row[best], best)) best = e;
    }
    ids.push_back(best);
  }
  return ids;
}

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_GATE_RUN_H_
