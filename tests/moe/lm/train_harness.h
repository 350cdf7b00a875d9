// Training runs that tests compare.
#ifndef MOE_TESTS_MOE_LM_TRAIN_HARNESS_H_
#define MOE_TESTS_MOE_LM_TRAIN_HARNESS_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "moe/lm/training_loop.h"
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

inline void ExpectSameTrace(const Trace& got, const Trace& expected) {
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(got.loss, expected.loss);  // float ==: no NaN, no -0 among losses
  EXPECT_EQ(got.validation_loss, expected.validation_loss);
  EXPECT_EQ(got.grad_norm, expected.grad_norm);
  EXPECT_EQ(got.loss_scale, expected.loss_scale);
  EXPECT_EQ(got.skipped, expected.skipped);
  EXPECT_EQ(got.learning_rate, expected.learning_rate);
  EXPECT_EQ(got.aux_loss, expected.aux_loss);
  EXPECT_EQ(got.router_entropy, expected.router_entropy);
  EXPECT_EQ(got.load, expected.load);
  EXPECT_EQ(got.weights, expected.weights);
}

}  // namespace moe::lm::testing

#endif  // MOE_TESTS_MOE_LM_TRAIN_HARNESS_H_
