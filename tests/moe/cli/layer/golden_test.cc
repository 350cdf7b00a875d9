// The public models' MoE blocks against transformers' own results (tests/golden/README.md), over
// expert-parallel ranks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/cli/layer/model_layer.h"
#include "moe/hf/family.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"
#include "tests/sanitizers.h"

namespace moe::hf {
namespace {

namespace fs = std::filesystem;
using cli::FindTokens;
using cli::ModelLayerInput;
using cli::ModelLayerOptions;
using cli::ModelLayerResult;
using cli::RunModelLayer;
using testing::ExpectSameBits;
using testing::Layout;

// Expected values are float64 results rounded once, so this bounds our own rounding alone. One
// float32 rounding has an error of at most u = 2^-24 = 6e-8 of the value. A row of y passes a dot
// product over H, an activation, one over F, a weight, and a sum over K choices; dx about twice as
// many. Errors of a dot product's terms are independent and add as sqrt(n) u, n <= 24 here, so that
// about 10 u = 6e-7 of the row's norm is expected, which is also the error of transformers' own
// float32 run (6.3e-7). 2e-6 is 33 u: three times that, and 1/250 of the effect of one wrong
// bfloat16.
constexpr double kBound = 2e-6;

std::vector<std::string> CaseNames() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(MOE_GOLDEN_DATA)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Only the first on a simulated device, which takes minutes for all, and under a sanitizer.
std::vector<Layout> LayoutsHere(std::vector<Layout> all) {
  if (testing::LayerDevice() == DeviceKind::kCuda || testing::kSanitized) all.resize(1);
  return all;
}

ModelLayerResult RunCase(const LayerWeights& weights, const ModelLayerInput& input,
                         const Layout& layout, const TrainerOptions& options = {}) {
  ModelLayerResult on_first;
  std::mutex mu;
  testing::RunLocalRanks(layout.ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool first = world->rank() == 0;
    ModelLayerOptions mine = {.trainer = options};
    mine.trainer.session.device = testing::LayerDevice();
    mine.trainer.session.mesh.expert = layout.expert_parallel;
    MOE_ASSIGN_OR_RETURN(ModelLayerResult result,
                         RunModelLayer(weights, input, mine, std::move(world)));
    const std::lock_guard<std::mutex> lock(mu);
    if (first) on_first = std::move(result);
    return absl::OkStatus();
  });
  return on_first;
}

double Norm(absl::Span<const float> row) {
  double sum = 0;
  for (const float v : row) sum += static_cast<double>(v) * static_cast<double>(v);
  return std::sqrt(sum);
}

std::vector<float> Floats(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsTensor* const tensor = file.Find(name);
  if (tensor == nullptr) {
    ADD_FAILURE() << file.path() << " has no " << name;
    return {};
  }
  std::vector<float> values(tensor->num_elements);
  EXPECT_TRUE(file.ReadFloat32(*tensor, absl::MakeSpan(values)).ok()) << name;
  return values;
}

// Each row of `got` is within kBound of its row's norm, or of the longest row's.
enum class Against { kOwnRow, kLongestRow };
void ExpectRows(const std::string& name, const std::vector<float>& got,
                const std::vector<float>& expected, int64_t width, Against against) {
  ASSERT_EQ(got.size(), expected.size()) << name;
  const int64_t rows = static_cast<int64_t>(got.size()) / width;
  double longest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    longest = std::max(longest, Norm(absl::MakeSpan(expected).subspan(r * width, width)));
  }
  for (int64_t r = 0; r < rows; ++r) {
    const auto row = absl::MakeConstSpan(expected).subspan(r * width, width);
    std::vector<float> error(width);
    for (int64_t i = 0; i < width; ++i) error[i] = got[r * width + i] - row[i];
    EXPECT_LE(Norm(error), kBound * (against == Against::kOwnRow ? Norm(row) : longest))
        << name << " row " << r;
  }
}

const std::string& NameOf(const ModelLayerResult::Gradient& gradient) {
  return gradient.of->found.tensor->name;
}

void ExpectSameBits(const ModelLayerResult& got, const ModelLayerResult& expected) {
  EXPECT_EQ(got.expert_ids, expected.expert_ids);
  ExpectSameBits("y", got.y, expected.y);
  ExpectSameBits("dx", got.dx, expected.dx);
  ExpectSameBits("expert_weights", got.expert_weights, expected.expert_weights);
  ExpectSameBits("router_logits", got.router_logits, expected.router_logits);
  ASSERT_EQ(got.gradients.size(), expected.gradients.size());
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    ExpectSameBits(NameOf(got.gradients[i]), got.gradients[i].values, expected.gradients[i].values);
  }
}

class GoldenTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const fs::path folder = fs::path(MOE_GOLDEN_DATA) / GetParam();
    auto config = ReadHfConfig(folder / "config.json").value();
    auto checkpoint = Checkpoint::Open(folder).value();
    weights_ = LayerWeights::Find(config, std::move(checkpoint), std::nullopt).value();
    io_ = SafetensorsFile::Open(folder / "io.safetensors").value();
    grads_ = SafetensorsFile::Open(folder / "grads.safetensors").value();
    const auto x = FindTokens(*io_, "x", std::nullopt, moe().router.hidden_size).value();
    const auto dy = FindTokens(*io_, "dy", x.tensor->shape[0], moe().router.hidden_size).value();
    input_ = {.x = x, .dy = dy};
  }

  const MoeLayerConfig& moe() const { return weights_->config().moe; }

  void ExpectGolden(const ModelLayerResult& result) const {
    const int64_t hidden = moe().router.hidden_size;
    const auto expect_rows = [&](const char* name, const std::vector<float>& got, int64_t width) {
      ExpectRows(name, got, Floats(*io_, name), width, Against::kOwnRow);
    };
    expect_rows("y", result.y, hidden);
    expect_rows("dx", result.dx, hidden);
    expect_rows("expert_weights", result.expert_weights, moe().router.top_k);
    expect_rows("router_logits", result.router_logits, moe().router.num_outputs());
    const auto ids = io_->Data(*io_->Find("expert_ids"));
    ASSERT_EQ(result.expert_ids.size() * sizeof(int64_t), ids.size());
    EXPECT_EQ(std::memcmp(result.expert_ids.data(), ids.data(), ids.size()), 0) << "expert_ids";
    EXPECT_EQ(result.gradients.size(), grads_->tensors().size());
    for (const ModelLayerResult::Gradient& gradient : result.gradients) {
      // Sums over tokens cancel, and some rows are exactly zero, so no bound holds relative to a
      // row's own norm (torch itself is off by 3.3e-6); rounding errors come from the terms, whose
      // size the longest row of the tensor indicates.
      const std::string& name = NameOf(gradient);
      ExpectRows(name, gradient.values, Floats(*grads_, name),
                 gradient.of->found.tensor->shape.back(), Against::kLongestRow);
    }
  }

  std::optional<LayerWeights> weights_;
  std::optional<SafetensorsFile> io_, grads_;
  ModelLayerInput input_;
};

TEST_P(GoldenTest, EveryExpertParallelSizeGivesTransformersResultsAndTheSameBits) {
  const ModelLayerResult one = RunCase(*weights_, input_, {});
  ExpectGolden(one);
  const ModelLayerResult forward = RunCase(*weights_, {.x = input_.x}, {});
  EXPECT_TRUE(forward.dx.empty());
  EXPECT_TRUE(forward.gradients.empty());
  ExpectSameBits("y without dy", forward.y, one.y);
  for (const Layout& layout : LayoutsHere({{3, 3}, {2, 2}, {4, 4}, {4, 2}})) {
    SCOPED_TRACE(::testing::Message()
                 << "ranks " << layout.ranks << " ep " << layout.expert_parallel);
    ExpectSameBits(RunCase(*weights_, input_, layout), one);
  }
}

TEST_P(GoldenTest, FastNumericsStayWithinTheBound) {
  ExpectGolden(RunCase(*weights_, input_, {.ranks = 3, .expert_parallel = 3},
                       {.session = {.threads = 2, .numerics = Numerics::kFast}}));
}

// By parameter name: layouts differ in tensors.
std::map<std::string, std::vector<float>> GradientsByParameter(const ModelLayerResult& result,
                                                               const MoeLayerConfig& config) {
  std::map<std::string, std::vector<float>> gradients;
  for (const ModelLayerResult::Gradient& tensor : result.gradients) {
    const TensorRule& rule = *tensor.of->rule;
    EXPECT_EQ(std::ssize(tensor.values), tensor.of->found.tensor->num_elements) << NameOf(tensor);
    const int64_t size = ShapeOf(rule.parameter, config).size();
    const bool stacked = rule.experts == ExpertAxis::kStacked;
    for (int32_t e = 0; e < (stacked ? config.router.num_experts : 1); ++e) {
      auto& whole = gradients[ParameterName(rule.parameter, stacked ? e : tensor.of->expert)];
      whole.resize(size);
      ForEachElement(rule, config,
                     [&](int64_t i, int64_t j) { whole[i] = tensor.values.at(e * size + j); });
    }
  }
  return gradients;
}

// As transformers 5 stores the weights in memory: for every family, except those that are published
// so.
TEST_P(GoldenTest, FusedExpertsGiveTheSameBits) {
  const fs::path file = fs::path(MOE_GOLDEN_DATA) / GetParam() / "fused.safetensors";
  const absl::string_view type = weights_->config().model_type();
  if (GetParam().back() != '1' || type == "gpt_oss" || type == "llama4_text") {
    GTEST_SKIP() << "published so, or not the first case of its model";
  }
  auto checkpoint = Checkpoint::Open(file).value();
  const auto fused =
      LayerWeights::Find(weights_->config(), std::move(checkpoint), std::nullopt).value();
  EXPECT_EQ(fused.layer(), weights_->layer());
  const ModelLayerResult expected = RunCase(*weights_, input_, {});
  const ModelLayerResult got = RunCase(fused, input_, {.ranks = 2, .expert_parallel = 2});
  ExpectSameBits("y", got.y, expected.y);
  ExpectSameBits("dx", got.dx, expected.dx);
  EXPECT_EQ(GradientsByParameter(got, moe()), GradientsByParameter(expected, moe()));
}

// Gradients far below and above the exact grid's default unit. Scaling dy by a power of two scales
// them likewise, to the bit, except for the losses of the grid: in either run 2^-24 of a tensor,
// and as much again from float32.
TEST_P(GoldenTest, GradientsKeepTheirPrecisionAtAnyScale) {
  if ((testing::LayerDevice() == DeviceKind::kCuda || testing::kSanitized) &&
      GetParam() != CaseNames().front()) {
    GTEST_SKIP() << "a family changes what is summed, not how the device or memory is used";
  }
  const fs::path path = fs::path(::testing::TempDir()) /
                        ("scaled_" + std::to_string(getpid()) + GetParam() + ".safetensors");
  const auto run = [&](int x_log2, int dy_log2, const Layout& layout, Numerics numerics) {
    std::vector<float> x = Floats(*io_, "x"), dy = Floats(*io_, "dy");
    for (float& v : x) v = std::ldexp(v, x_log2);
    for (float& v : dy) v = std::ldexp(v, dy_log2);
    const auto& shape = input_.x.tensor->shape;
    EXPECT_TRUE(
        WriteSafetensors(path, {{{.name = "x", .shape = shape, .bytes = BytesOf<float>(x)},
                                 {.name = "dy", .shape = shape, .bytes = BytesOf<float>(dy)}}})
            .ok());
    const auto io = SafetensorsFile::Open(path);
    const auto tokens = [&](const char* name) {
      return FindTokens(*io, name, shape[0], shape[1]).value();
    };
    return RunCase(*weights_, {.x = tokens("x"), .dy = tokens("dy")}, layout,
                   {.session = {.numerics = numerics}});
  };
  const auto expect = [&](const ModelLayerResult& got, const ModelLayerResult& want, int log2,
                          double bound) {
    for (size_t i = 0; i < want.gradients.size(); ++i) {
      const ModelLayerResult::Gradient& tensor = want.gradients[i];
      std::vector<float> scaled = tensor.values, error = got.gradients[i].values;
      for (size_t j = 0; j < error.size(); ++j) {
        scaled[j] = std::ldexp(scaled[j], log2);
        error[j] -= scaled[j];
      }
      EXPECT_LE(Norm(error), bound * Norm(scaled)) << NameOf(tensor) << " 2^" << log2;
    }
  };
  constexpr Numerics kExact = Numerics::kLayoutInvariant;
  const ModelLayerResult one = run(0, 0, {}, kExact);
  for (const int log2 : {-30, 30}) {
    const ModelLayerResult scaled = run(0, log2, {}, kExact);
    expect(scaled, one, log2, 4 * 0x1p-24);
    for (const Layout& layout : LayoutsHere({{2, 2}, {4, 2}})) {
      ExpectSameBits(run(0, log2, layout, kExact), scaled);
    }
  }
  for (const int log2 : {-10, -20}) {
    expect(run(log2, 0, {}, kExact), run(log2, 0, {}, Numerics::kFast), 0, kBound);
  }
  fs::remove(path);
}

TEST_P(GoldenTest, BFloat16HasTheSameBitsAtEveryExpertParallelSize) {
  if (testing::LayerDevice() == DeviceKind::kCuda && GetParam() != CaseNames().front()) {
    GTEST_SKIP() << "verify_test has every gate in bfloat16 on the device";
  }
  const TrainerOptions options = {.dtype = DType::kBFloat16};
  const ModelLayerResult one = RunCase(*weights_, input_, {}, options);
  for (const Layout& layout : LayoutsHere({{3, 3}, {4, 2}})) {
    ExpectSameBits(RunCase(*weights_, input_, layout, options), one);
  }
  // Rounded inputs may choose other experts; logits are sums of products of rounded factors, each
  // within 2 * 2^-9 of the exact ones: by Cauchy-Schwarz within 2^-8 |x| |w|, here in row norms.
  const std::vector<float> logits = Floats(*io_, "router_logits");
  const std::vector<float> x = Floats(*io_, "x");
  const int64_t hidden = moe().router.hidden_size;
  const LayerTensor& router = weights_->tensors().front();
  std::vector<float> w(router.found.tensor->num_elements);
  ASSERT_TRUE(router.found.file->ReadFloat32(*router.found.tensor, absl::MakeSpan(w)).ok());
  const int64_t experts = moe().router.num_outputs();
  for (size_t i = 0; i < logits.size(); ++i) {
    const auto row = [&](const std::vector<float>& of, size_t r) {
      return Norm(absl::MakeConstSpan(of).subspan(r * hidden, hidden));
    };
    EXPECT_NEAR(one.router_logits[i], logits[i],
                0x1.02p-8 * row(x, i / experts) * row(w, i % experts));
  }
}

bool IsOfRouter(ParameterKind kind) {
  return kind == ParameterKind::kRouterWeight || kind == ParameterKind::kRouterBias ||
         kind == ParameterKind::kExpertBias;
}

// A copy of the case's weights in which the last expert's element of `tensor` is NaN: bits that are
// all ones are NaN in every floating-point type.
void WriteDamaged(const fs::path& from, const LayerTensor& tensor, int32_t experts,
                  const fs::path& to) {
  std::ifstream in(from, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const auto data = tensor.found.file->Data(*tensor.found.tensor);
  const auto at = bytes.find(std::string(data.begin(), data.end()));
  ASSERT_NE(at, std::string::npos);
  const size_t row = data.size() / experts;
  bytes.replace(at + (experts - 1) * row, BitsOf(tensor.found.tensor->type) / 8,
                BitsOf(tensor.found.tensor->type) / 8, '\xff');
  std::ofstream(to, std::ios::binary) << bytes;
}

// Gates with sigmoid scores never choose such an expert, and the outputs are finite.
TEST_P(GoldenTest, ANaNInTheRouterIsNamedByLayerAndExpert) {
  const int32_t experts = moe().router.num_outputs();
  const fs::path damaged = fs::path(::testing::TempDir()) /
                           ("golden_" + std::to_string(getpid()) + GetParam() + ".safetensors");
  for (const LayerTensor& tensor : weights_->tensors()) {
    if (!IsOfRouter(tensor.rule->parameter)) continue;
    SCOPED_TRACE(tensor.found.tensor->name);
    ASSERT_NO_FATAL_FAILURE(WriteDamaged(tensor.found.file->path(), tensor, experts, damaged));
    auto checkpoint = Checkpoint::Open(damaged).value();
    const auto weights =
        LayerWeights::Find(weights_->config(), std::move(checkpoint), weights_->layer());
    if (absl::IsDataLoss(weights.status())) continue;  // for a checkpoint in several files
    ASSERT_TRUE(weights.ok()) << weights.status();
    testing::RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) {
      const absl::Status status =
          RunModelLayer(*weights, {.x = input_.x},
                        {.trainer = {.session = {.device = testing::LayerDevice()}}},
                        std::move(world))
              .status();
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_THAT(
          std::string(status.message()),
          ::testing::AllOf(::testing::HasSubstr("layer " + std::to_string(weights->layer()) + ":"),
                           ::testing::HasSubstr("expert " + std::to_string(experts - 1))));
      return absl::OkStatus();
    });
  }
  fs::remove(damaged);
}

INSTANTIATE_TEST_SUITE_P(Cases, GoldenTest, ::testing::ValuesIn(CaseNames()),
                         [](const ::testing::TestParamInfo<std::string>& param) {
                           std::string name = param.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(GoldenData, HoldsEveryModel) {
  std::vector<std::string> models;
  for (const std::string& name : CaseNames()) {
    const auto config = ReadHfConfig(fs::path(MOE_GOLDEN_DATA) / name / "config.json").value();
    models.emplace_back(config.model_type());
  }
  for (const Family& family : Families()) {
    EXPECT_THAT(models, ::testing::Contains(std::string(family.model_type)));
  }
}

// The configuration that transformers writes without any settings shows the meaning of absent keys.
TEST(GoldenData, AbsentKeysMeanWhatTransformersWritesForThem) {
  std::ifstream in(fs::path(MOE_GOLDEN_DATA) / "defaults.json");
  const nlohmann::json models = nlohmann::json::parse(in);
  for (const Family& family : Families()) {
    const std::string type(family.model_type);
    SCOPED_TRACE(type);
    ASSERT_TRUE(models.contains(type));
    const auto written = ParseHfConfig("c", models[type].dump());
    const auto bare = ParseHfConfig("c", nlohmann::json{{"model_type", type}}.dump());
    ASSERT_EQ(written.status(), bare.status());  // some have no default for a required key
    if (!bare.ok()) continue;
    const MoeLayerConfig &a = written->moe, &b = bare->moe;
    EXPECT_EQ(a.router.num_experts, b.router.num_experts);
    EXPECT_EQ(a.router.num_zero_experts, b.router.num_zero_experts);
    EXPECT_EQ(a.router.top_k, b.router.top_k);
    EXPECT_EQ(a.router.hidden_size, b.router.hidden_size);
    EXPECT_EQ(a.router.norm_topk_prob, b.router.norm_topk_prob);
    EXPECT_EQ(a.router.scaling_factor, b.router.scaling_factor);
    EXPECT_EQ(a.router.router_jitter, b.router.router_jitter);
    EXPECT_EQ(a.router.num_groups, b.router.num_groups);
    EXPECT_EQ(a.router.group_top_k, b.router.group_top_k);
    EXPECT_EQ(a.ffn_hidden_size, b.ffn_hidden_size);
    EXPECT_EQ(a.shared_expert_ffn_hidden_size, b.shared_expert_ffn_hidden_size);
    EXPECT_EQ(a.activation.alpha, b.activation.alpha);
    EXPECT_EQ(a.activation.limit, b.activation.limit);
    EXPECT_EQ(written->has_experts, bare->has_experts);
  }
}

}  // namespace
}  // namespace moe::hf
