// What transformers computes of the models of tests/golden/models, and what this library does.
#ifndef MOE_TESTS_MOE_HF_GOLDEN_RUN_H_
#define MOE_TESTS_MOE_HF_GOLDEN_RUN_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/hf/hf_model.h"
#include "moe/io/safetensors.h"
#include "tests/moe/hf/golden_model.h"
#include "tests/moe/lm/transformer_harness.h"

namespace moe::hf {

struct GoldenRun {
  std::vector<int32_t> tokens;
  std::vector<float> logits;  // [T, V]
};

inline GoldenRun ReadRun(const std::string& family) {
  const auto file = SafetensorsFile::Open(GoldenFolder(family) + "/io.safetensors");
  EXPECT_TRUE(file.ok()) << file.status();
  GoldenRun run;
  const SafetensorsTensor& tokens = *file->Find("tokens");
  std::vector<int64_t> ids(tokens.num_elements);
  std::memcpy(ids.data(), file->Data(tokens).data(), tokens.size_bytes);
  run.tokens.assign(ids.begin(), ids.end());
  run.logits.resize(file->Find("logits")->num_elements);
  EXPECT_TRUE(file->ReadFloat32(*file->Find("logits"), absl::MakeSpan(run.logits)).ok());
  return run;
}

// The losses of all tokens, should these targets follow them.
template <typename T>
std::vector<float> Losses(lm::Stage<T>& model, const Context& context,
                          const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) {
  const int64_t offsets[] = {0, static_cast<int64_t>(tokens.size())};
  std::vector<float> losses(tokens.size());
  const absl::Status status = ::moe::testing::RunPasses(
      model,
      {.context = context, .batch = {.sequence_offsets = offsets, .mode = Mode::kEvaluation}},
      {tokens, targets, absl::MakeSpan(losses)});
  EXPECT_TRUE(status.ok()) << status;
  return losses;
}

// The same, should `target` follow each of them.
template <typename T>
std::vector<float> Losses(lm::Stage<T>& model, const Context& context,
                          const std::vector<int32_t>& tokens, int32_t target) {
  return Losses(model, context, tokens, std::vector<int32_t>(tokens.size(), target));
}

// Ranks that share the experts of a model have the losses of one, bit for bit.
inline void ExpectTheBitsOfOneRankOnTwo(const HfModel& hf, const std::vector<int32_t>& tokens) {
  ::moe::testing::OneRank<float> one(hf.config());
  ASSERT_TRUE(hf.Load(one.store, one.session->context()).ok());
  const std::vector<float> expected = Losses(*one.model, one.context(), tokens, 3);
  ::moe::testing::RunSessions(2, {.mesh = {.expert = 2}}, [&](Session& session) -> absl::Status {
    ParameterStore store(DType::kFloat32, 3);
    MOE_ASSIGN_OR_RETURN(const auto model,
                         lm::Stage<float>::Create(hf.config(), store, session.context()));
    MOE_RETURN_IF_ERROR(hf.Load(store, session.context()));
    EXPECT_EQ(Losses(*model, session.context(), tokens, 3), expected);
    return absl::OkStatus();
  });
}

// Minus the logarithm of the probability that transformers gives `target` behind token t.
inline double GoldenLoss(const GoldenRun& golden, int64_t vocab, size_t t, int64_t target) {
  double sum = 0;
  for (int64_t w = 0; w < vocab; ++w) sum += std::exp(double{golden.logits[t * vocab + w]});
  return std::log(sum) - double{golden.logits[t * vocab + target]};
}

}  // namespace moe::hf

#endif  // MOE_TESTS_MOE_HF_GOLDEN_RUN_H_
