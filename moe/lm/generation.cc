#include "moe/lm/generation.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/base/xxh3.h"
#include "moe/lm/evaluation.h"
#include "moe/lm/key_value_cache.h"
#include "moe/lm/run_settings.h"
#include "moe/lm/train_config.h"

namespace moe::lm {
namespace {

constexpr int64_t kPromptRows = 256;  // rows of one pass over the prompt

// Config with one set of experts over all ranks, packed weights where they are in memory, and a
// router that decides about each token by itself.
TrainConfig ForTokensOneByOne(TrainConfig config, const ModelWeights& weights, int ranks) {
  config.trainer.session.mesh = {.tensor = config.trainer.session.mesh.tensor, .expert = ranks};
  config.trainer.pipeline_schedule = ScheduleKind::k1F1B;
  config.trainer.pipeline_chunks = 1;
  config.model.pipeline_layout.clear();
  MoeLayerConfig& moe = config.model.moe;
  moe.pack_weights = !weights.file.has_value();  // else a copy of each would be in memory
  moe.overlap_degree = 1;
  moe.router.capacity_factor.reset();
  moe.router.pad_to_capacity = false;
  moe.router.token_group = {};
  return config;
}

absl::Status CheckOptions(const GenerationOptions& options, const TransformerConfig& model) {
  const Sampling& s = options.sampling;
  const bool good = options.max_new_tokens >= 1 && std::isfinite(s.temperature) &&
                    s.temperature >= 0 && s.top_k >= 0 && s.top_p > 0 && s.top_p <= 1;
  if (!good) {
    return absl::InvalidArgumentError(
        "Generate: expected max_new_tokens >= 1, temperature >= 0, top_k >= 0, 0 < top_p <= 1");
  }
  if (options.prompt.empty()) {
    return absl::InvalidArgumentError("the prompt is empty, expected at least one token");
  }
  for (size_t i = 0; i < options.prompt.size(); ++i) {
    if (options.prompt[i] >= 0 && options.prompt[i] < model.vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat("token ", i, " of the prompt is ",
                                                   options.prompt[i], ", expected 0 to ",
                                                   model.vocab_size - 1));
  }
  if (model.moe.router.gate != "expert-choice") return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--router is expert-choice, expected one whose tokens choose: later ones would decide about "
      "those before them");
}

std::vector<RunSetting> SettingsOf(const TrainConfig& config, int64_t step,
                                   const GenerationOptions& options) {
  std::vector<RunSetting> settings = SettingsOf(config, Corpus());
  const auto add = [&](const char* name, uint64_t value) {
    settings.push_back({.kind = SettingKind::kLayout, .name = name, .text = absl::StrCat(value)});
  };
  add("--checkpoint", step);
  add("--prompt", Xxh3(options.prompt.data(), options.prompt.size() * sizeof(int32_t)));
  add("--max-new-tokens", options.max_new_tokens);
  const auto& ends = options.end_tokens;
  add("--ignore-eos", Xxh3(ends.data(), ends.size() * sizeof(int32_t)));
  return settings;
}

// Whether the token of rank 0 ends the text. Collective over the world where there are end tokens.
absl::StatusOr<bool> Ends(int32_t token, absl::Span<const int32_t> end_tokens, int64_t position,
                          const Context& context) {
  if (end_tokens.empty()) return false;
  MOE_RETURN_IF_ERROR(context.mesh->world().Broadcast<int32_t>(
      {&token, 1}, 0, *context.host, {.name = "end of text", .step = position}));
  MOE_RETURN_IF_ERROR(context.host->Synchronize());
  return std::find(end_tokens.begin(), end_tokens.end(), token) != end_tokens.end();
}

template <typename T>
absl::StatusOr<GenerationReport> GenerateAs(const TrainConfig& config, const ModelWeights& weights,
                                            const GenerationOptions& options, Trainer& trainer) {
  const Context& context = trainer.context();
  const bool reports = context.mesh->world().rank() == 0;
  const bool first = context.mesh->index(MeshGroup::kData) == 0;  // of the ranks with the sequence
  const auto prompt = static_cast<int64_t>(options.prompt.size());
  MOE_ASSIGN_OR_RETURN(const LoadedModel<T> loaded, MakeModel<T>(config, weights, trainer));
  Stage<T>& model = loaded.model->chunk(0);
  WeightPager* const pager = loaded.pager.get();
  MOE_ASSIGN_OR_RETURN(
      auto cache, KeyValueCache<T>::Create(
                      config.model, first ? prompt + options.max_new_tokens : 0, ShareOf(context)));
  std::vector<float> logits(first ? config.model.vocab_size : 0);
  const MatrixView<float> last(logits.data(), first ? 1 : 0, config.model.vocab_size);

  GenerationReport report;
  int64_t start_ns = MonotonicNs();
  absl::Span<const int32_t> left = options.prompt;
  while (!left.empty()) {
    const auto part = left.subspan(0, kPromptRows);
    left.remove_prefix(part.size());
    MOE_RETURN_IF_ERROR(model.Extend(context, first ? part : absl::Span<const int32_t>(), cache,
                                     left.empty() ? last : MatrixView<float>(), pager));
  }
  for (int64_t n = 0; n < options.max_new_tokens; ++n) {
    int32_t token = 0;
    if (first) {
      MOE_ASSIGN_OR_RETURN(token, SampleToken(logits, options.sampling, prompt + n));
      if (reports) report.tokens.push_back(token);
    }
    if (n == 0) {
      report.prompt_seconds = SecondsSince(start_ns);
      start_ns = MonotonicNs();
    }
    if (reports && options.on_token) MOE_RETURN_IF_ERROR(options.on_token(token));
    if (n + 1 == options.max_new_tokens) break;
    MOE_ASSIGN_OR_RETURN(const bool ends, Ends(token, options.end_tokens, prompt + n, context));
    if (ends) break;
    MOE_RETURN_IF_ERROR(
        model.Extend(context, first ? absl::MakeConstSpan(&token, 1) : absl::Span<const int32_t>(),
                     cache, last, pager));
  }
  report.seconds = SecondsSince(start_ns);
  report.bfloat16_order = trainer.bfloat16_order();
  MOE_ASSIGN_OR_RETURN(report.paging, ReportOf(pager, context));
  return report;
}

}  // namespace

absl::StatusOr<int32_t> SampleToken(absl::Span<const float> logits, const Sampling& sampling,
                                    int64_t place) {
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isfinite(logits[i])) continue;
    return absl::DataLossError(
        absl::StrCat("token ", place, ": logit ", i, " is ", logits[i], ", expected a finite one"));
  }
  if (sampling.temperature == 0) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (sampling.top_k > 0 && sampling.top_k < static_cast<int64_t>(ids.size())) {
    ids.resize(sampling.top_k);
  }
  const auto largest = static_cast<double>(logits[ids[0]]);
  std::vector<double> sums;  // unnormalised probabilities, summed up to each id
  double sum = 0;
  for (const int32_t id : ids) {
    sum += std::exp((static_cast<double>(logits[id]) - largest) / sampling.temperature);
    sums.push_back(sum);
  }
  const auto kept = std::lower_bound(sums.begin(), sums.end(), sampling.top_p * sum);
  sums.erase(std::min(kept, sums.end() - 1) + 1, sums.end());
  const double u = Uniform({.seed = sampling.seed,
                            .purpose = RandomPurpose::kSample,
                            .step = static_cast<uint64_t>(place)});
  const auto chosen = std::upper_bound(sums.begin(), sums.end() - 1, u * sums.back());
  return ids[chosen - sums.begin()];
}

absl::StatusOr<GenerationReport> Generate(const TrainConfig& given, const ModelWeights& weights,
                                          const GenerationOptions& options,
                                          std::unique_ptr<Communicator> world) {
  const TrainConfig config = ForTokensOneByOne(given, weights, world->size());
  MOE_RETURN_IF_ERROR(CheckAgreement(SettingsOf(config, weights.step, options), *world));
  MOE_RETURN_IF_ERROR(ValidateTrainConfig(config, world->size()));
  MOE_RETURN_IF_ERROR(CheckOptions(options, config.model));
  MOE_ASSIGN_OR_RETURN(const auto trainer, CreateTrainer(config, std::move(world)));
  return WithStorageType(config.trainer.dtype, [&]<typename T>(T) {
    return trainer->session().OrEnd(
        [&] { return GenerateAs<T>(config, weights, options, *trainer); });
  });
}

}  // namespace moe::lm
