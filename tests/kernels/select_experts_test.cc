// kernels/topk_gate: selection and weights by every rule, on every device; and what its CUDA kernel
// takes beside.
#include "kernels/topk_gate/select_experts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/topk_gate/gate_row.h"
#include "kernels/topk_gate/gate_rows.h"
#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::ForEachDevice;
using testing::kInfinity;
using testing::kLayouts;
using testing::Matrix;
using testing::MatrixLayout;
using testing::SameBits;
using testing::SameNumbers;
using testing::Simd;
using testing::TestDevice;

struct Result {
  Matrix<float> score, weight;
  Matrix<int32_t> expert;
  std::vector<float> log_sum_exp;
  std::vector<int64_t> count, slot_offset;
};

// On a device, before a gate writes it.
struct Outputs {
  Outputs(const TestDevice& on, int64_t tokens, int64_t experts, int64_t k, MatrixLayout layout)
      : device(on),
        score(on.Copy(Matrix<float>(tokens, experts, layout))),
        weight(on.Copy(Matrix<float>(tokens, k, layout))),
        expert(on.Copy(Matrix<int32_t>(tokens, k, layout))),
        log_sum_exp(on.Copy(std::vector<float>(size_t(tokens), -77.0f))),
        count(on.Copy(std::vector<int64_t>(size_t(experts), -77))),
        slot_offset(on.Copy(std::vector<int64_t>(size_t(tokens) + 1, -77))) {}
  Result Read() const {
    return {device.Read(score),       device.Read(weight), device.Read(expert),
            device.Read(log_sum_exp), device.Read(count),  device.Read(slot_offset)};
  }

  const TestDevice& device;
  testing::DeviceMatrix<float> score, weight;
  testing::DeviceMatrix<int32_t> expert;
  testing::DeviceArray<float> log_sum_exp;
  testing::DeviceArray<int64_t> count, slot_offset;
};

Result Select(const TestDevice& device, const GateRule& rule, const Matrix<float>& logits,
              int64_t k, const std::vector<float>& bias = {}, MatrixLayout layout = {}) {
  const auto in = device.Copy(logits);
  const auto expert_bias = device.Copy(bias);
  const Outputs out(device, logits.rows(), logits.cols(), k, layout);
  const absl::Status status =
      SelectExperts(rule, {.logits = in.view(), .expert_bias = expert_bias.span(), .value = {}},
                    {.score = out.score.view(),
                     .expert = out.expert.view(),
                     .weight = out.weight.view(),
                     .log_sum_exp = out.log_sum_exp.span(),
                     .count = out.count.span(),
                     .slot_offset = out.slot_offset.span()},
                    device.stream());
  EXPECT_TRUE(status.ok()) << status;
  return out.Read();
}

// v where the group of the expert is kept, -infinity elsewhere.
std::vector<float> MaskedByGroups(std::vector<float> v, const GateRule& rule) {
  const int32_t groups = rule.num_groups;
  const auto size = static_cast<int64_t>(v.size()) / groups;
  std::vector<float> worth(groups, 0.0f);
  for (int32_t g = 0; g < groups; ++g) {
    std::vector<float> members(v.begin() + g * size, v.begin() + (g + 1) * size);
    for (float& m : members) m = std::isnan(m) ? -kInfinity : m;
    std::sort(members.begin(), members.end(), std::greater<>());
    for (int64_t i = 0; i < std::min<int64_t>(rule.group_sum, size); ++i) worth[g] += members[i];
  }
  for (int32_t g = 0; g < groups; ++g) {
    int32_t before = 0;
    for (int32_t o = 0; o < groups; ++o) {
      if (worth[o] > worth[g] || (worth[o] == worth[g] && o < g)) ++before;
    }
    if (before >= rule.group_top_k) std::fill_n(v.begin() + g * size, size, -kInfinity);
  }
  return v;
}

// What a gate selects and weighs, given the scores that it wrote.
Result InPlainLoops(const GateRule& rule, const Matrix<float>& logits,
                    const std::vector<float>& bias, Result out) {
  const int64_t tokens = logits.rows(), experts = logits.cols(), k = out.expert.cols();
  const bool by_score = rule.num_groups > 0 || !bias.empty();
  Matrix<float> value = logits;
  for (int64_t t = 0; t < tokens && by_score; ++t) {
    std::vector<float> v(out.score.view().row(t), out.score.view().row(t) + experts);
    for (size_t e = 0; e < bias.size(); ++e) v[e] += bias[e];
    if (rule.num_groups > 0) v = MaskedByGroups(v, rule);
    std::copy(v.begin(), v.end(), value.view().row(t));
  }
  TopKSelectReference(value.view(), out.expert.view(), 0, tokens);
  std::fill(out.count.begin(), out.count.end(), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    const absl::Span<float> weight(out.weight.view().row(t), size_t(k));
    for (int64_t j = 0; j < k; ++j) {
      const int32_t id = out.expert.at(t, j);
      weight[j] = out.score.at(t, id);
      ++out.count[id];
    }
    if (rule.weights == GateWeights::kNormalised) Normalise(weight, rule.epsilon);
    for (float& w : weight) w *= rule.scale;
  }
  for (int64_t t = 0; t <= tokens; ++t) out.slot_offset[t] = t * k;
  return out;
}

void ExpectSame(const Result& got, const Result& want) {
  EXPECT_TRUE(SameBits(got.expert, want.expert));
  EXPECT_TRUE(SameNumbers(got.weight, want.weight));
  EXPECT_TRUE(got.score.edges_intact());
  EXPECT_EQ(got.count, want.count);
  EXPECT_EQ(got.slot_offset, want.slot_offset);
}

// s = 1/2, 3/4, 1/4, 1/2; v = 1/2, -1/4, 1/4, 3/5. The second pair is worth more.
TEST(SelectExpertsTest, SelectsByHandWithinTheBestGroupByBiasedScores) {
  const auto logits = Matrix<float>::Of(1, 4, {0, std::log(3.0f), -std::log(3.0f), 0});
  const GateRule rule = {.score = ScoreFunction::kSigmoid,
                         .num_groups = 2,
                         .group_top_k = 1,
                         .group_sum = 2,
                         .weights = GateWeights::kNormalised,
                         .scale = 2};
  ForEachDevice([&](const TestDevice& device) {
    const Result got = Select(device, rule, logits, 2, {0, -1, 0, 0.1f});
    EXPECT_EQ(got.expert.at(0, 0), 3);
    EXPECT_EQ(got.expert.at(0, 1), 2);
    EXPECT_EQ(got.count, (std::vector<int64_t>{0, 0, 1, 1}));
    EXPECT_EQ(got.slot_offset, (std::vector<int64_t>{0, 2}));
    EXPECT_FLOAT_EQ(got.weight.at(0, 0), 4.0f / 3);
    EXPECT_FLOAT_EQ(got.weight.at(0, 1), 2.0f / 3);
  });
}

struct Case {
  int64_t experts, k;
  int32_t groups, group_top_k, group_sum;
  bool biased;
};

// Weights have the bits of Normalise, NaN and scores that underflowed among them.
TEST(SelectExpertsTest, IsTheRuleInPlainLoopsGivenTheScores) {
  const Case cases[] = {{24, 4, 0, 0, 1, true},    {24, 4, 4, 2, 2, true},
                        {24, 6, 8, 1, 1, false},   {32, 5, 32, 7, 9, true},
                        {130, 16, 10, 3, 2, true}, {1024, 8, 16, 4, 2, false},
                        {7, 1, 0, 0, 1, false},    {16, 2, 0, 0, 1, false},
                        {36, 3, 6, 3, 2, true},    {36, 9, 0, 0, 1, false}};
  ForEachDevice(
      [&](const TestDevice& device) {
        for (const Case& c : cases) {
          auto bias = testing::RandomFloats(c.biased ? c.experts : 0, 4);
          if (c.biased) bias[c.experts / 2] = bias[0];
          auto random = Matrix<float>::Random(5, c.experts, kLayouts[3], 6, 3);
          for (int64_t e = 0; e < c.experts; ++e) random.at(1, e) = -200;  // sigmoids underflow
          for (const auto& logits : {random, testing::WithTies(9, c.experts, {}, 5)}) {
            for (int i = 0; i < 4; ++i) {
              const bool normalised = i % 2 == 1;
              const GateRule rule = {
                  .score = i / 2 == 0 ? ScoreFunction::kSoftmax : ScoreFunction::kSigmoid,
                  .num_groups = c.groups,
                  .group_top_k = c.group_top_k,
                  .group_sum = c.group_sum,
                  .weights = normalised ? GateWeights::kNormalised : GateWeights::kScores,
                  .scale = i == 1 ? 1.0f : 2.5f,
                  .epsilon = i == 3 ? 0.5f : 0.0f};
              SCOPED_TRACE(::testing::Message() << c.experts << " " << c.groups << " " << i);
              const Result got = Select(device, rule, logits, c.k, bias, kLayouts[i]);
              ExpectSame(got, InPlainLoops(rule, logits, bias, got));
            }
          }
        }
      },
      Simd::kAll);
}

TEST(SelectExpertsTest, ScoresThatUnderflowGiveZeroWeights) {
  const auto logits = Matrix<float>::Of(1, 3, {-200, -200, -200});
  ForEachDevice([&](const TestDevice& device) {
    const Result got = Select(
        device, {.score = ScoreFunction::kSigmoid, .weights = GateWeights::kNormalised}, logits, 2);
    EXPECT_EQ(got.weight.values(), (std::vector<double>{0, 0}));
  });
}

TEST(SelectExpertsTest, NoTokensGiveZeroCounts) {
  ForEachDevice([](const TestDevice& device) {
    const Result got = Select(device, {}, Matrix<float>(0, 5), 2);
    EXPECT_EQ(got.count, std::vector<int64_t>(5, 0));
    EXPECT_EQ(got.slot_offset, std::vector<int64_t>{0});
  });
}

// The launcher, where a device is simulated: what the operations never ask for.
#if defined(MOE_TEST_SCHEDULES)
using topk_gate::CudaGate;

template <typename T>
class TopKGateCudaTest : public ::testing::Test {
 protected:
  // `rule` of logits in T, all outputs.
  static Result Run(const TestDevice& device, const GateRule& rule, const Matrix<T>& logits,
                    int64_t k) {
    const auto in = device.Copy(logits);
    const Outputs out(device, logits.rows(), logits.cols(), k, kLayouts[4]);
    EXPECT_EQ(topk_gate::Run(CudaGate<T>{.logits = in.view(),
                                         .rule = rule,
                                         .score = out.score.view(),
                                         .expert = out.expert.view(),
                                         .weight = out.weight.view(),
                                         .log_sum_exp = out.log_sum_exp.span().data(),
                                         .count = out.count.span().data(),
                                         .slot_offset = out.slot_offset.span().data()},
                             nullptr),
              cudaSuccess);
    return out.Read();
  }
};
using HalfTypes = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(TopKGateCudaTest, HalfTypes);

TYPED_TEST(TopKGateCudaTest, LogitsOf16BitsAreAsGoodAsTheFloatsThatTheyWidenTo) {
  using T = TypeParam;
  const TestDevice device(Device{DeviceKind::kCuda, 0});
  const auto check = [&](const Matrix<float>& floats, int64_t k, const GateRule& rule) {
    const Matrix<T> logits = floats.As<T>();
    const Result got = this->Run(device, rule, logits, k);
    const Result want = Select(device, rule, logits.template As<float>(), k, {}, kLayouts[4]);
    SCOPED_TRACE(floats.cols());
    ExpectSame(got, want);
    EXPECT_TRUE(SameNumbers(got.score, want.score));
    EXPECT_TRUE(SameNumbers(got.log_sum_exp, want.log_sum_exp));
  };
  const GateRule sigmoid = {.score = ScoreFunction::kSigmoid,
                            .num_groups = 2,
                            .group_top_k = 1,
                            .weights = GateWeights::kNormalised};
  for (const int64_t experts : {1, 7, 16, 33, 40, 128, 130, 257, 600, 1024}) {
    for (const MatrixLayout& layout : {kLayouts[0], kLayouts[3], kLayouts[4]}) {
      const int64_t k = std::min<int64_t>(experts, 8);
      check(Matrix<float>::Random(11, experts, layout, 1, 30), k, {});
      check(testing::WithTies(11, experts, layout, 2), k, experts % 2 == 0 ? sigmoid : GateRule());
    }
  }
}

// More rows than one round of all blocks: five warps take a second one. All to the same expert.
TEST(TopKGateLauncherTest, CountsEverySlotOfManyRows) {
  if (testing::kSanitized) GTEST_SKIP() << "a matter of size";
  const int64_t tokens = 2048 * 8 + 5;
  const std::vector<BFloat16> logits(tokens * 2, BFloat16(1.0f));
  std::vector<int32_t> expert(tokens, -1);
  std::vector<int64_t> count(2, -1);
  const auto run = [&](int64_t rows, int32_t* ids) {
    return topk_gate::Run(
        CudaGate<BFloat16>{
            .logits = {logits.data(), rows, 2}, .expert = {ids, rows, 1}, .count = count.data()},
        nullptr);
  };
  ASSERT_EQ(run(tokens, expert.data()), cudaSuccess);
  EXPECT_EQ(count, (std::vector<int64_t>{tokens, 0}));
  EXPECT_EQ(expert, std::vector<int32_t>(tokens, 0));
  count.assign(2, -1);
  ASSERT_EQ(run(3, nullptr), cudaSuccess);  // nobody asks for the ids
  EXPECT_EQ(count, (std::vector<int64_t>{3, 0}));
}

TEST(TopKGateLauncherTest, RefusesWhatItIsNotCompiledForAndWritesNothing) {
  const auto run = [](int64_t experts, int64_t k, int32_t groups = 0, int32_t top = 0,
                      int32_t sum = 1) {
    const std::vector<float> logits(size_t(experts), 1.0f);
    std::vector<int32_t> expert(size_t(k), -77);
    std::vector<int64_t> count(size_t(experts), -77);
    const auto count_before = count;
    const cudaError_t error = topk_gate::Run(
        CudaGate<float>{.logits = {logits.data(), 1, experts},
                        .rule = {.num_groups = groups, .group_top_k = top, .group_sum = sum},
                        .expert = {expert.data(), 1, k},
                        .count = count.data()},
        nullptr);
    EXPECT_EQ(error == cudaSuccess, count != count_before);
    return error;
  };
  EXPECT_EQ(run(1024, 16), cudaSuccess);
  EXPECT_EQ(run(1025, 16), cudaErrorInvalidValue);
  EXPECT_EQ(run(1024, 17), cudaErrorInvalidValue);
  EXPECT_EQ(run(3, 4), cudaErrorInvalidValue);
  EXPECT_EQ(run(0, 0), cudaErrorInvalidValue);
  EXPECT_EQ(run(64, 2, 32, 1, 1), cudaSuccess);
  EXPECT_EQ(run(66, 2, 33, 1, 1), cudaErrorInvalidValue);
  EXPECT_EQ(run(64, 2, 5, 1, 1), cudaErrorInvalidValue);
  EXPECT_EQ(run(64, 2, -1, 1, 1), cudaErrorInvalidValue);
  EXPECT_EQ(run(64, 2, 4, 0, 1), cudaErrorInvalidValue);
  EXPECT_EQ(run(64, 2, 4, 1, 0), cudaErrorInvalidValue);
}
#endif

}  // namespace
}  // namespace moe
