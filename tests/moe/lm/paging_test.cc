// Models whose weights are partly in files, against the same models in memory.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "moe/io/file.h"
#include "moe/lm/evaluation.h"
#include "moe/lm/generation.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/moe/scratch_files.h"
#include "tests/moe/status_is.h"
#include "tests/sanitizers.h"

namespace moe::lm::testing {
namespace {

using ::moe::testing::kThreadSanitized;
using ::moe::testing::Layout;
using ::moe::testing::StatusIs;

constexpr char kNeeds[] = "expected at least ";

TrainConfig Config(DType dtype) {
  TrainConfig config = ZeroConfig(dtype);
  config.model.num_layers = 3;
  config.model.moe.shared_expert_ffn_hidden_size = 32;
  config.model.moe.projection_biases = false;
  config.evaluation.sequences = 5;
  config.trainer.session.tensor_leaves = 2;
  return config;
}

struct Result {
  absl::Status status;
  float loss = 0;
  std::vector<int32_t> tokens;
  std::optional<PagingReport> paging;
};

ModelWeights Weights(StoreUse use, std::optional<int64_t> memory_bytes) {
  ModelWeights weights = {.use = use, .load = LoadByElement};
  if (memory_bytes.has_value()) {
    weights.file = {.folder = ::testing::TempDir(), .memory_bytes = *memory_bytes};
  }
  return weights;
}

// Of the rank whose error is no echo of another's.
Result OnRanks(int ranks, const std::function<Result(std::unique_ptr<Communicator>)>& run) {
  Result result;
  std::mutex mu;
  ::moe::testing::RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> world) {
    const bool first = world->rank() == 0;
    const Result mine = run(std::move(world));
    const std::lock_guard<std::mutex> lock(mu);
    if (mine.status.ok() ? first && result.status.ok()
                         : result.status.ok() || absl::IsAborted(result.status)) {
      result = mine;
    }
    return absl::OkStatus();
  });
  return result;
}

Result Evaluated(const TrainConfig& given, const Layout& layout, const ModelWeights& weights) {
  static const Corpus& corpus = *new Corpus(MakeCorpus());
  const TrainConfig config = LaidOut(given, layout);
  return OnRanks(layout.ranks, [&](std::unique_ptr<Communicator> world) -> Result {
    const auto report = Evaluate(config, weights, corpus, &Corpus::held_out, std::move(world));
    if (!report.ok()) return {.status = report.status()};
    return {.loss = report->loss, .paging = report->paging};
  });
}

Result Generated(const TrainConfig& config, int ranks, const ModelWeights& weights,
                 const std::function<void(int32_t)>& seen = nullptr) {
  GenerationOptions options = {.prompt = {116, 104, 101, 32},
                               .max_new_tokens = 12,
                               .sampling = {.temperature = 1, .seed = 3}};
  options.on_token = [&](int32_t token) {
    if (seen) seen(token);
    return absl::OkStatus();
  };
  return OnRanks(ranks, [&](std::unique_ptr<Communicator> world) -> Result {
    const auto report = Generate(config, weights, options, std::move(world));
    if (!report.ok()) return {.status = report.status()};
    return {.tokens = report->tokens, .paging = report->paging};
  });
}

// The smallest memory that would do, as the refusal of less says.
int64_t LeastMemory(const Result& refused) {
  EXPECT_THAT(refused.status, StatusIs(absl::StatusCode::kInvalidArgument, kNeeds));
  const std::string message(refused.status.message());
  int64_t least = 0;
  const std::string number = message.substr(message.find(kNeeds) + sizeof(kNeeds) - 1);
  EXPECT_TRUE(absl::SimpleAtoi(number.substr(0, number.find(' ')), &least)) << message;
  return least;
}

TEST(PagingTest, AnEvaluationHasTheBitsOfWeightsInMemory) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    if (kThreadSanitized && dtype == DType::kFloat32) continue;
    const TrainConfig config = Config(dtype);
    const StoreUse use = dtype == DType::kFloat32 ? StoreUse::kInference : StoreUse::kReading;
    const Result expected = Evaluated(config, {}, Weights(use, std::nullopt));
    ASSERT_TRUE(expected.status.ok()) << expected.status;
    ASSERT_FALSE(expected.paging.has_value());
    for (const Layout& layout : {Layout{}, Layout{.ranks = 2, .expert_parallel = 2, .overlap = 2},
                                 Layout{.ranks = 2, .expert_parallel = 2, .tensor = 2}}) {
      SCOPED_TRACE(absl::StrCat(NameOf(dtype), ", ranks ", layout.ranks, ", tp ", layout.tensor));
      const int64_t least = LeastMemory(Evaluated(config, layout, Weights(use, 1000)));
      for (const int64_t memory : {least, least + 40'000, least + 120'000, int64_t{1} << 30}) {
        const Result got = Evaluated(config, layout, Weights(use, memory));
        ASSERT_TRUE(got.status.ok()) << memory << ": " << got.status;
        EXPECT_EQ(got.loss, expected.loss) << memory;
        EXPECT_LE(got.paging->memory_bytes, memory * layout.ranks);
        if (memory == least) {
          EXPECT_GT(got.paging->misses, 0);
          EXPECT_GT(got.paging->module_reads, 0);
        } else if (memory == 1 << 30) {
          EXPECT_EQ(got.paging->file_bytes, 0);
          EXPECT_EQ(got.paging->bytes_read, 0);
        }
      }
    }
  }
}

TEST(PagingTest, SharedExpertsAreRefused) {
  EXPECT_THAT(Evaluated(Config(DType::kFloat32), {.ranks = 2, .tensor = 2, .expert_tensor = 2},
                        Weights(StoreUse::kInference, 1 << 20))
                  .status,
              StatusIs(absl::StatusCode::kUnimplemented, "--offload weights with --etp 2"));
}

// Stages of a pipeline have pages of their own.
TEST(PagingTest, APipelineHasTheBitsOfWeightsInMemory) {
  const TrainConfig config = Config(DType::kFloat32);
  const Result expected = Evaluated(config, {}, Weights(StoreUse::kInference, std::nullopt));
  TrainConfig staged = config;
  staged.trainer.session.mesh.pipeline = 3;
  const Layout layout = {.ranks = 3};
  const int64_t least = LeastMemory(Evaluated(staged, layout, Weights(StoreUse::kInference, 1000)));
  const Result got = Evaluated(staged, layout, Weights(StoreUse::kInference, least));
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(got.loss, expected.loss);
  EXPECT_GT(got.paging->misses, 0);
}

TEST(PagingTest, GeneratesTheTokensOfWeightsInMemory) {
  for (const bool tied : {false, true}) {
    TrainConfig config = Config(DType::kBFloat16);
    config.model.tied_embeddings = tied;
    config.model.moe.projection_biases = !tied;
    const Result expected = Generated(config, 1, Weights(StoreUse::kInference, std::nullopt));
    ASSERT_EQ(expected.tokens.size(), 12u) << expected.status;
    for (const int ranks : {1, 2}) {
      const int64_t least =
          LeastMemory(Generated(config, ranks, Weights(StoreUse::kInference, 1000)));
      for (const int64_t memory : {least, least + 20'000, least + 90'000}) {
        const Result got = Generated(config, ranks, Weights(StoreUse::kInference, memory));
        ASSERT_TRUE(got.status.ok()) << memory << ": " << got.status;
        EXPECT_EQ(got.tokens, expected.tokens) << ranks << " ranks, " << memory;
        EXPECT_TRUE(memory != least || got.paging->misses > 0);
      }
    }
  }
}

TEST(PagingTest, ALostFileEndsEveryRank) {
  const TrainConfig config = Config(DType::kFloat32);
  const int64_t least = LeastMemory(Generated(config, 2, Weights(StoreUse::kInference, 1000)));
  int tokens = 0;
  const Result got = Generated(config, 2, Weights(StoreUse::kInference, least), [&](int32_t) {
    if (++tokens == 3) ::moe::testing::LoseOpenFiles("moe-weights-rank-0-");
  });
  EXPECT_THAT(got.status, StatusIs(absl::StatusCode::kUnavailable, "moe-weights-rank-0-"));
  EXPECT_EQ(FileFaultOf(got.status), FileFault::kRead);
  EXPECT_EQ(tokens, 3);
}

TEST(PagingTest, AFolderThatIsNotThereIsRefused) {
  ModelWeights weights = Weights(StoreUse::kInference, 1 << 20);
  weights.file->folder = "no-such-folder";
  weights.file->memory_bytes =
      LeastMemory(Generated(Config(DType::kFloat32), 1, Weights(StoreUse::kInference, 1000)));
  EXPECT_THAT(Generated(Config(DType::kFloat32), 1, weights).status,
              StatusIs(absl::StatusCode::kNotFound, "there is no folder 'no-such-folder'"));
}

}  // namespace
}  // namespace moe::lm::testing
