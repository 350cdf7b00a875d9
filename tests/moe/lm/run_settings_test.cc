// The settings of a run against those of a checkpoint.
#include "moe/lm/run_settings.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/io/file.h"

namespace moe::lm {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A checkpoint that does not say it was written by a program that knew only the one choice.
TEST(RunSettings, WhatAnOlderCheckpointLeavesOutIsWhatItWas) {
  TrainConfig config;
  const std::string json = SettingsJson(SettingsOf(config, {}), SettingKind::kModel);
  const std::string older = absl::StrReplaceAll(
      json, {{R"("num_query_groups":"4",)", ""}, {R"("tie_word_embeddings":"0",)", ""}});
  ASSERT_LT(older.size(), json.size());
  EXPECT_THAT(Differences(SettingsOf(config, {}), SettingKind::kModel, older),
              ::testing::IsEmpty());
  EXPECT_EQ(
      VersionDifference({.numerics = SettingsJson(SettingsOf(config, {}), SettingKind::kNumerics)}),
      "");
  EXPECT_THAT(VersionDifference({.numerics = R"({"version_of_the_numerics":"1"})"}),
              ::testing::MatchesRegex("version of the numerics is [0-9]+, 1 in the checkpoint"));
  // Version 3 had no row segments, which are one for each leaf.
  EXPECT_EQ(
      VersionDifference({.numerics = R"({"version_of_the_numerics":"3","tensor_leaves":"1"})"}),
      "");
  EXPECT_EQ(
      VersionDifference({.numerics = R"({"version_of_the_numerics":"3","tensor_leaves":"8"})"}),
      "version of the numerics is 5, 3 in the checkpoint");
  // Version 4 had no leaves in norms of all heads.
  const auto version_4 = [](const char* leaves, const char* norm) {
    return VersionDifference(
        {.numerics =
             absl::StrCat(R"({"version_of_the_numerics":"4","tensor_leaves":")", leaves, R"("})"),
         .model = absl::StrCat(R"({"qk_layernorm":")", norm, R"("})")});
  };
  EXPECT_EQ(version_4("8", "1"), "");
  EXPECT_EQ(version_4("1", "2"), "");
  EXPECT_EQ(version_4("8", "2"), "version of the numerics is 5, 4 in the checkpoint");
  config.model.num_query_groups = 2;
  EXPECT_THAT(Differences(SettingsOf(config, {}), SettingKind::kModel, older),
              ::testing::ElementsAre("--num-query-groups is 2, 4 in the checkpoint"));
}

// The program before these rows wrote the sections, with few defaults among the settings.
TEST(RunSettings, AStoredCheckpointIsReadAndWrittenByteForByte) {
  const CheckpointSections stored = {
      .numerics =
          R"({"version_of_the_numerics":"5","device":"0","dtype":"f16","numerics":"1",)"
          R"("tensor_leaves":"2","bf16_order":"-1","grid_unit_log2":"-60","grouped_gemm":"0",)"
          R"("seq_length":"16",)"
          R"("micro_batch_size":"2","micro_batches":"3"})",
      .model = R"({"router":"topk","vocab_size":"256","hidden_size":"32","num_layers":"2",)"
               R"("num_attention_heads":"4","num_query_groups":"2","kv_channels":"16",)"
               R"("add_qkv_bias":"1","qk_layernorm":"2","tie_word_embeddings":"1",)"
               R"("rotary_base":"0x1.f4p+8","norm_epsilon":"0x1.a36e2ep-14",)"
               R"("init_std":"0x1.eb851eb851eb8p-6","moe_layer_freq":"2",)"
               R"("dense_ffn_hidden_size":"24","num_experts":"4","moe_ffn_hidden_size":"20",)"
               R"("moe_shared_expert_intermediate_size":"8","moe_shared_expert_gate":"1",)"
               R"("activation":"5","activation_alpha":"0x1.b3b646p+0",)"
               R"("activation_limit":"0x1.cp+2","moe_projection_biases":"0"})",
      .trainer = R"({"seed":"-1","max_position_embeddings":"99","bos_token_id":"1",)"
                 R"("eos_token_id":"2,3","num_zero_experts":"0","moe_router_topk":"2",)"
                 R"("moe_router_score_function":"1","moe_router_pre_softmax":"0",)"
                 R"("moe_router_num_groups":"2","moe_router_group_topk":"1",)"
                 R"("moe_router_topk_scaling_factor":"0x1.8p+0","norm_topk_prob":"-1",)"
                 R"("norm_epsilon":"-0x1p+0","moe_router_enable_expert_bias":"1",)"
                 R"("moe_router_bias_update_rate":"0x1.47ae14p-7","moe_input_jitter_eps":"0x0p+0",)"
                 R"("moe_router_random_second":"0","moe_router_jitter_eps":"0x1.47ae14p-7",)"
                 R"("moe_expert_capacity_factor":"0x1.4p+0","moe_token_drop_policy":"1",)"
                 R"("moe_pad_expert_input_to_capacity":"0","moe_token_group":"-1",)"
                 R"("moe_router_load_balancing_type":"3","moe_aux_loss_coeff":"0x1.99999ap-4",)"
                 R"("moe_z_loss_coeff":"0x1.47ae14p-7"})"};
  const auto config = StoredConfig(stored).value();
  EXPECT_EQ(config.trainer.dtype, DType::kFloat16);
  EXPECT_EQ(config.model.qk_norm, QkNorm::kHeads);
  EXPECT_EQ(config.model.eos_token_ids, std::vector<int32_t>({2, 3}));
  EXPECT_EQ(config.trainer.seed, std::numeric_limits<uint64_t>::max());
  const std::vector<RunSetting> settings = SettingsOf(config, {});
  EXPECT_EQ(SettingsJson(settings, SettingKind::kNumerics), stored.numerics);
  EXPECT_EQ(SettingsJson(settings, SettingKind::kModel), stored.model);
  // An older program stored nothing of documents, which had no effect.
  const std::string with_documents = absl::StrReplaceAll(
      stored.trainer, {{R"("seed")", R"("reset_position_ids":"0","reset_attention_mask":"0",)"
                                     R"("eod_mask_loss":"0","seed")"}});
  EXPECT_EQ(SettingsJson(settings, SettingKind::kTrainer), with_documents);
}

// An older program stored neither key-value heads nor a width of heads.
TEST(RunSettings, HeadsThatWereNotStoredFollowFromTheCheckpointsOwn) {
  TrainConfig config;
  config.model.hidden_size = 96;
  config.model.num_attention_heads = 6;
  const std::vector<RunSetting> settings = SettingsOf(config, {});
  const auto older =
      absl::StrReplaceAll(SettingsJson(settings, SettingKind::kModel),
                          {{R"("num_query_groups":"6",)", ""}, {R"("kv_channels":"16",)", ""}});
  ASSERT_THAT(older, Not(HasSubstr("kv_channels")));
  const auto stored = StoredConfig({.numerics = SettingsJson(settings, SettingKind::kNumerics),
                                    .model = older,
                                    .trainer = SettingsJson(settings, SettingKind::kTrainer)})
                          .value();
  EXPECT_EQ(stored.model.num_query_groups, 6);
  EXPECT_EQ(stored.model.kv_channels, 16);
}

// The numerics of a run of this type and order, as a checkpoint has them, and as one of a program
// that knew no orders has them.
struct StoredNumerics {
  CheckpointSections now, older;
};
StoredNumerics NumericsOf(DType dtype, std::optional<BFloat16Order> order) {
  TrainConfig config;
  config.trainer.dtype = dtype;
  config.trainer.session.bfloat16_order = order;
  const std::vector<RunSetting> settings = SettingsOf(config, {});
  const CheckpointSections now = {.numerics = SettingsJson(settings, SettingKind::kNumerics),
                                  .model = SettingsJson(settings, SettingKind::kModel),
                                  .trainer = SettingsJson(settings, SettingKind::kTrainer)};
  StoredNumerics stored = {now, now};
  for (const char* const text : {"dot", "tile", "-1"}) {
    stored.older.numerics = absl::StrReplaceAll(
        stored.older.numerics, {{absl::StrCat(R"("bf16_order":")", text, "\","), ""}});
  }
  return stored;
}

std::optional<BFloat16Order> OrderIn(const CheckpointSections& sections) {
  return StoredConfig(sections).value().trainer.session.bfloat16_order;
}

TEST(RunSettings, AnOrderOfBFloat16IsStoredByNameAndDotWhereItWasNotStored) {
  const StoredNumerics tile = NumericsOf(DType::kBFloat16, BFloat16Order::kTile);
  EXPECT_THAT(tile.now.numerics, HasSubstr(R"("bf16_order":"tile")"));
  EXPECT_EQ(OrderIn(tile.now), BFloat16Order::kTile);
  EXPECT_THAT(tile.older.numerics, Not(HasSubstr("bf16_order")));
  EXPECT_EQ(OrderIn(tile.older), BFloat16Order::kDot);
  for (const DType other : {DType::kFloat32, DType::kFloat16}) {
    const StoredNumerics none = NumericsOf(other, std::nullopt);
    EXPECT_EQ(OrderIn(none.now), std::nullopt);
    EXPECT_EQ(OrderIn(none.older), std::nullopt);
  }
  CheckpointSections wrong = tile.now;
  wrong.numerics = absl::StrReplaceAll(wrong.numerics, {{R"("tile")", R"("tale")"}});
  EXPECT_EQ(StoredConfig(wrong).status().message(), "the checkpoint does not say bf16_order");
}

TEST(RunSettings, AnotherOrderOfBFloat16IsAnotherIdentity) {
  const auto differences = [](std::optional<BFloat16Order> order, const CheckpointSections& stored,
                              DType dtype) {
    TrainConfig config;
    config.trainer.dtype = dtype;
    config.trainer.session.bfloat16_order = order;
    return Differences(SettingsOf(config, {}), SettingKind::kNumerics, stored.numerics);
  };
  constexpr DType kType = DType::kBFloat16;
  const StoredNumerics dot = NumericsOf(kType, BFloat16Order::kDot);
  for (const CheckpointSections& stored : {dot.now, dot.older}) {
    EXPECT_THAT(differences(BFloat16Order::kDot, stored, kType), ::testing::IsEmpty());
    EXPECT_THAT(differences(BFloat16Order::kTile, stored, kType),
                ::testing::ElementsAre("--bf16-order is tile, dot in the checkpoint"));
  }
  const StoredNumerics none = NumericsOf(DType::kFloat32, std::nullopt);
  for (const CheckpointSections& stored : {none.now, none.older}) {
    EXPECT_THAT(differences(std::nullopt, stored, DType::kFloat32), ::testing::IsEmpty());
  }
}

TEST(RunSettings, AValueThatAnEnumerationDoesNotHaveIsMalformed) {
  const std::vector<RunSetting> settings = SettingsOf(TrainConfig(), {});
  const auto stored = [&](const char* activation) {
    return StoredConfig({.numerics = SettingsJson(settings, SettingKind::kNumerics),
                         .model = absl::StrReplaceAll(SettingsJson(settings, SettingKind::kModel),
                                                      {{R"("activation":"0")", activation}}),
                         .trainer = SettingsJson(settings, SettingKind::kTrainer)});
  };
  EXPECT_EQ(stored(R"("activation":"5")")->model.moe.activation.kind, Activation::kGeGluTanh);
  for (const char* const wrong : {"6", "-1", "261", "geglu_tanh", ""}) {
    const auto status = stored(absl::StrCat(R"("activation":")", wrong, "\"").c_str()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << wrong;
    EXPECT_EQ(status.message(), "the checkpoint does not say activation");
  }
}

// A checkpoint of a program that had a setting more.
TEST(RunSettings, AKeyThatNoSettingHasIsIgnored) {
  TrainConfig config;
  config.model.hidden_size = 96;
  const std::vector<RunSetting> settings = SettingsOf(config, {});
  CheckpointSections sections = {.numerics = SettingsJson(settings, SettingKind::kNumerics),
                                 .model = SettingsJson(settings, SettingKind::kModel),
                                 .trainer = SettingsJson(settings, SettingKind::kTrainer)};
  for (std::string* const section : {&sections.numerics, &sections.model, &sections.trainer}) {
    section->insert(1, R"("cuda_graph":"1",)");
  }
  const auto stored = StoredConfig(sections).value();
  EXPECT_EQ(stored.model.hidden_size, 96);
  EXPECT_THAT(Differences(settings, SettingKind::kModel, sections.model), ::testing::IsEmpty());
}

TEST(RunSettings, ATextIsNotGoneOnWithAsTokenIdsNorIdsAsAText) {
  TrainConfig config;
  Corpus text = {.xxh3 = 0xfedcba9876543210}, other = {.xxh3 = 15}, ids = {.xxh3 = 1};
  ids.mapped.push_back(MappedFile::Open("/proc/self/exe").value());  // any file: text is copied
  const auto section = [&](const Corpus& corpus) -> CheckpointSections {
    return {.data = SettingsJson(SettingsOf(config, corpus), SettingKind::kData)};
  };
  EXPECT_TRUE(TrainedOnText(section(text)));
  EXPECT_FALSE(TrainedOnText(section(ids)));
  EXPECT_THAT(Differences(SettingsOf(config, text), SettingKind::kData, section(other).data),
              ::testing::ElementsAre(
                  "text (--data) is fedcba9876543210, 000000000000000f in the checkpoint"));
  const auto check = [&](const Corpus& before, const Corpus& now) {
    return CheckSameTokens(section(before), config, SettingsOf(config, now));
  };
  config.model.vocab_size = 2048;
  EXPECT_TRUE(check(text, other).ok());
  EXPECT_TRUE(check(ids, ids).ok());
  EXPECT_EQ(check(ids, text).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(check(ids, text).message(),
              HasSubstr("--data, expected --tokens: the run was trained on token ids"));
  EXPECT_THAT(check(text, ids).message(), HasSubstr("--tokens, expected --data"));
  config.model.vocab_size = 256;
  EXPECT_TRUE(check(ids, text).ok());
}

}  // namespace
}  // namespace moe::lm
