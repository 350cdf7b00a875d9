// Training runs that tests compare.
#ifndef MOE_TESTS_MOE_LM_TRAIN_HARNESS_H_
#define MOE_TESTS_MOE_LM_TRAIN_HARNESS_H_

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/xxh3.h"
#include "moe/lm/training_loop.h"
#include "moe/state/boxes.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"

namespace moe::lm::testing {

// English-like text with structure at several lengths, so that there is something to learn.
inline Corpus MakeCorpus() {
  const std::string words[] = {"the ",   "expert ", "routes ", "a ",
                               "token ", "home. ",  "gate ",   "\n"};
  std::string text;
  for (uint32_t i = 0, state = 1; text.size() < 40000; ++i) {
    state = state * 1664525u + 1013904223u;
    text += words[(state >> 24) % 8];
  }
  Corpus corpus;
  corpus.text.assign(text.begin(), text.end());
  corpus.train.Add(absl::MakeSpan(corpus.text).first(36000), TokenType::kU8);
  corpus.held_out.Add(absl::MakeSpan(corpus.text).subspan(36000), TokenType::kU8);
  corpus.xxh3 = HashTokens(corpus);
  return corpus;
}

inline TrainConfig SmallConfig() {
  TrainConfig config;
  config.model = {.hidden_size = 16, .num_layers = 2, .num_attention_heads = 2, .init_std = 0.1};
  config.model.moe.router = {.num_experts = 5, .top_k = 2, .aux_loss_coeff = 0.01f};
  config.model.moe.ffn_hidden_size = 12;
  config.trainer.session.numerics = Numerics::kLayoutInvariant;
  config.sequence_length = 16;
  config.micro_batch_size = 2;
  config.trainer.micro_batches = 6;
  config.steps = 10;
  config.schedule = {.peak = 1e-2, .minimum = 1e-3, .warmup_steps = 2, .total_steps = 10};
  config.evaluation.interval = 5;
  config.evaluation.sequences = 7;  // an incomplete last micro-batch
  return config;
}

// Weights that are a function of tensor and element, whatever the layout.
inline absl::Status LoadByElement(ParameterStore& store, const Context& context) {
  for (const auto& p : store.parameters()) {
    for (const BoxInMemory& held : BoxesOf(*p)) {
      const uint64_t seed = Xxh3(held.tensor->name.data(), held.tensor->name.size()) % 1000;
      std::vector<float> values;
      for (int64_t r = held.box.row_begin; r < held.box.row_end; ++r) {
        for (int64_t c = held.box.col_begin; c < held.box.col_end; ++c) {
          const auto element = static_cast<double>(r * held.tensor->cols + c);
          values.push_back(
              static_cast<float>(0.5 * std::sin(static_cast<double>(seed) + 1.7 * element)));
        }
      }
      MOE_RETURN_IF_ERROR(store.WriteMaster(*p, values, StreamOf(*p, context), held.first));
    }
  }
  return context.compute->Synchronize();
}

// Scores of experts with a bias that steps move.
inline void LearnBias(RouterConfig& router) {
  router.gate = "topk";
  router.expert_bias = true;
  router.score_function = ScoreFunction::kSigmoid;
  router.bias_update_rate = 1e-3f;
}

// For state in parts: several buckets of each group, cut inside matrices; a router's bias, biases
// of experts, and ranks without a micro-batch in the last round.
inline TrainConfig ZeroConfig(DType dtype) {
  TrainConfig config = SmallConfig();
  config.model.hidden_size = 32;
  config.model.moe.ffn_hidden_size = 48;
  config.model.moe.router.num_experts = 4;
  config.model.moe.projection_biases = true;
  LearnBias(config.model.moe.router);
  config.trainer.dtype = dtype;
  config.micro_batch_size = 1;
  config.trainer.micro_batches = 5;
  config.trainer.bucket_bytes = 30'000;
  config.evaluation.interval = 0;
  config.evaluation.sequences = 1;
  config.verify_replicas = 5;
  return config;
}

// What two runs are compared by.
struct Trace {
  std::vector<float> loss, validation_loss;
  std::vector<double> grad_norm, aux_loss, router_entropy, loss_scale, learning_rate;
  std::vector<int64_t> skipped;  // steps
  std::vector<std::vector<std::vector<int64_t>>> load;
  uint64_t weights = 0;
  TrainReport report;
  absl::Status status;
};

inline TrainConfig LaidOut(TrainConfig config, const ::moe::testing::Layout& layout) {
  config.trainer.session.mesh.tensor = layout.tensor;
  config.trainer.session.mesh.expert_tensor = layout.expert_tensor;
  config.trainer.session.mesh.expert = layout.expert_parallel;
  config.trainer.session.threads = layout.threads;
  config.trainer.all_reduce = layout.all_reduce;
  config.model.moe = ::moe::testing::LaidOut(config.model.moe, layout);
  return config;
}

// On MakeCorpus. seen: after every step, on rank 0. stop: of all ranks.
inline Trace TrainIn(const TrainConfig& given, const ::moe::testing::Layout& layout = {},
                     const std::function<void(const StepMetrics&)>& seen = nullptr,
                     const StopSignal* stop = nullptr) {
  static const Corpus& corpus = *new Corpus(MakeCorpus());
  const TrainConfig config = LaidOut(given, layout);
  Trace trace;
  std::mutex mu;
  ::moe::testing::RunLocalRanks(layout.ranks, [&](std::unique_ptr<Communicator> world) {
    const auto report = Train(config, corpus, std::move(world),
                              {.on_step =
                                   [&](const StepMetrics& m) {
                                     trace.loss.push_back(m.loss);
                                     if (m.has_validation)
                                       trace.validation_loss.push_back(m.validation_loss);
                                     trace.grad_norm.push_back(m.grad_norm);
                                     trace.loss_scale.push_back(m.loss_scale);
                                     trace.learning_rate.push_back(m.learning_rate);
                                     if (m.skipped) trace.skipped.push_back(m.step);
                                     trace.aux_loss.push_back(m.aux_loss);
                                     trace.router_entropy.push_back(m.router_entropy);
                                     trace.load.push_back(m.expert_load);
                                     if (seen) seen(m);
                                     return absl::OkStatus();
                                   },
                               .stop = stop});
    const std::lock_guard<std::mutex> lock(mu);
    // The root cause, not the echo of a peer that ended first.
    if (trace.status.ok() || absl::IsAborted(trace.status)) trace.status = report.status();
    if (!report.ok()) return absl::OkStatus();
    trace.report = *report;
    trace.weights = report->weights_xxh3;
    return absl::OkStatus();
  });
  return trace;
}

// What `resumed` did after its checkpoint, if any, and what `whole` did from there on.
inline void ExpectSameEnd(const Trace& resumed, const Trace& whole) {
  ASSERT_TRUE(resumed.status.ok()) << resumed.status;
  const auto from = [&](const auto& steps) {
    return std::vector(steps.begin() + resumed.report.first_step, steps.end());
  };
  EXPECT_EQ(resumed.loss, from(whole.loss));  // float ==: no NaN, no -0 among losses
  EXPECT_EQ(resumed.grad_norm, from(whole.grad_norm));
  EXPECT_EQ(resumed.learning_rate, from(whole.learning_rate));
  EXPECT_EQ(resumed.loss_scale, from(whole.loss_scale));
  EXPECT_EQ(resumed.aux_loss, from(whole.aux_loss));
  EXPECT_EQ(resumed.router_entropy, from(whole.router_entropy));
  EXPECT_EQ(resumed.load, from(whole.load));
  EXPECT_EQ(resumed.weights, whole.weights);
}

inline void ExpectSameTrace(const Trace& got, const Trace& expected) {
  ExpectSameEnd(got, expected);
  EXPECT_EQ(got.validation_loss, expected.validation_loss);
  EXPECT_EQ(got.skipped, expected.skipped);
}

struct LaidOutRun {
  std::string name;
  TrainConfig config;
  ::moe::testing::Layout layout;
};

// Each of `saved` saves after two steps, from which each of `resumed` goes on as `whole` did.
inline void ExpectResumes(const std::vector<LaidOutRun>& saved,
                          const std::vector<LaidOutRun>& resumed, const Trace& whole) {
  const std::string folder = ::testing::TempDir() + "saved_by_" +
                             ::testing::UnitTest::GetInstance()->current_test_info()->name();
  for (LaidOutRun first : saved) {
    std::filesystem::remove_all(folder);
    first.config.steps = 2;
    first.config.checkpoints.folder = folder;
    const absl::Status status = TrainIn(first.config, first.layout).status;
    ASSERT_TRUE(status.ok()) << first.name << ": " << status;
    for (LaidOutRun second : resumed) {
      SCOPED_TRACE(first.name + " to " + second.name);
      second.config.checkpoints.resume = TrainCheckpoints::Resume::kPath;
      second.config.checkpoints.path = folder + "/step-00000002";
      const Trace end = TrainIn(second.config, second.layout);
      ExpectSameEnd(end, whole);
      EXPECT_EQ(end.report.first_step, 2);
    }
  }
  std::filesystem::remove_all(folder);
}

// Runs of config_ that save to a folder of the test's own and resume from it.
class SavedRunTest : public ::testing::Test {
 protected:
  using Resume = TrainCheckpoints::Resume;

  SavedRunTest() {
    config_.steps = 6;
    config_.evaluation.interval = 0;
    std::filesystem::remove_all(folder_);
  }
  ~SavedRunTest() override { std::filesystem::remove_all(folder_); }

  TrainConfig Saving(int64_t steps, Resume resume = Resume::kNone) const {
    TrainConfig config = config_;
    config.steps = steps;
    config.checkpoints.folder = folder_;
    config.checkpoints.resume = resume;
    return config;
  }
  std::string StepPath(int64_t step) const {
    return folder_ + "/step-0000000" + std::to_string(step);
  }

  const std::string folder_ = ::testing::TempDir() + "saved_run_" +
                              ::testing::UnitTest::GetInstance()->current_test_info()->name();
  TrainConfig config_ = SmallConfig();
};

}  // namespace moe::lm::testing

#endif  // MOE_TESTS_MOE_LM_TRAIN_HARNESS_H_
