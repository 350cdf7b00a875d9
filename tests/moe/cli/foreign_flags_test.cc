// Command lines for Megatron-LM and DeepSpeed: which flags are accepted, which are refused, and
// whether docs/coming_from.md agrees.
#include "moe/cli/base/foreign_flags.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/sweep/sweep_plan.h"
#include "tests/moe/cli/settings_harness.h"

namespace moe::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Load;
using testing::LoadError;
using testing::Strings;

// The flags of the Mixtral example in Megatron-Core's manual of MoE, for a small model.
Strings MixtralLine() {
  const char* const kLine =
      "--disable-bias-linear --seq-length 64 --max-position-embeddings 128 --num-layers 4 "
      "--hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --init-method-std 0.01 "
      "--attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm "
      "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights "
      "--group-query-attention --num-query-groups 2 --no-masked-softmax-fusion "
      "--no-position-embedding --num-experts 8 --expert-model-parallel-size 4 "
      "--moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
      "--moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall "
      "--tokenizer-type Llama2Tokenizer --tokenizer-model m --data-path text --split 99990,8,2 "
      "--micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 5 --lr-decay-iters 3 "
      "--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 2 "
      "--clip-grad 1.0 --bf16 --overlap-grad-reduce --overlap-param-gather "
      "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
      "--num-layers-per-virtual-pipeline-stage 8 --sequence-parallel --use-distributed-optimizer "
      "--log-interval 1 --save-interval 4 --eval-interval 2 --eval-iters 10 --save ck --load ck "
      "--tensorboard-dir tb --no-load-optim --no-load-rng --wandb-project p --wandb-exp-name n";
  return absl::StrSplit(kLine, ' ');
}

// Without these flags and, if they have any, their values.
Strings Without(Strings line, const std::set<std::string>& flags) {
  for (auto it = line.begin(); it != line.end();) {
    if (flags.count(*it) == 0) {
      ++it;
      continue;
    }
    it = line.erase(it);
    if (it != line.end() && !absl::StartsWith(*it, "--")) it = line.erase(it);
  }
  return line;
}

TEST(ForeignFlagsTest, AMegatronLineTakesOneRoundOfEdits) {
  const std::set<std::string> to_edit = {
      "--tokenizer-type", "--tokenizer-model",
      "--split",          "--num-layers-per-virtual-pipeline-stage",
      "--eval-iters",     "--load",
      "--no-load-optim",  "--no-load-rng",
      "--wandb-project",  "--wandb-exp-name"};
  const std::string message = LoadError(MixtralLine());
  for (const std::string& flag : to_edit) {
    const bool named = absl::StrContains(message, absl::StrCat("'", flag, "'")) ||
                       absl::StrContains(message, flag + " is ");
    EXPECT_TRUE(named) << flag << " in: " << message;
  }
  EXPECT_THAT(message, ::testing::Not(HasSubstr("--help lists all flags"))) << "each has a hint";

  // As the message states: ids by --tokens, --resume for --load, --eval-sequences for --eval-iters.
  Strings line = Without(MixtralLine(), to_edit);
  line = Without(line, {"--data-path"});
  line.insert(line.end(), {"--tokens", "text_document", "--vocab-size", "512", "--resume", "auto",
                           "--eval-sequences", "80"});
  Strings warnings;
  const auto settings = Load(line, {}, "", &warnings).value();
  const auto options = MakeTrainOptions(settings, {.ranks = 16}).value();
  const lm::TrainConfig& train = options.train;
  EXPECT_EQ(train.trainer.session.mesh, (MeshShape{.pipeline = 4, .expert = 4}));
  EXPECT_EQ(train.trainer.zero, ZeroStage::kOptimizer);
  EXPECT_EQ(train.trainer.dtype, DType::kBFloat16);
  EXPECT_EQ(train.model.moe.ffn_hidden_size, 48);
  EXPECT_EQ(train.model.dense_ffn_hidden_size, 48);
  EXPECT_EQ(train.model.init_std, 0.01);
  EXPECT_EQ(train.model.num_query_groups, 2);
  EXPECT_FALSE(train.model.tied_embeddings);
  EXPECT_THAT(warnings, ElementsAre(AllOf(HasSubstr("--normalization RMSNorm, "),
                                          HasSubstr("--moe-grouped-gemm, "))));
}

TEST(ForeignFlagsTest, ValuesThatSayWhatIsDoneAnywayAreTaken) {
  Strings warnings;
  ASSERT_TRUE(Load({"--hidden-dropout", "0.0", "--moe-grouped-gemm", "--recompute-modules", "moe",
                    "mlp", "--normalization=RMSNorm", "--deepspeed"},
                   {}, "", &warnings)
                  .ok());
  EXPECT_THAT(
      warnings,
      ElementsAre("not needed, as it is done anyway: --hidden-dropout 0.0, "
                  "--moe-grouped-gemm, --normalization RMSNorm, --deepspeed",
                  "not done here, as it changes memory and speed alone: --recompute-modules moe "
                  "mlp"));
}

TEST(ForeignFlagsTest, SomeAreNeedlessBesideASetting) {
  EXPECT_TRUE(Load({"--group-query-attention", "--num-query-groups", "2"}).ok());
  EXPECT_TRUE(Load({"--vocab-file", "v.json", "--tokens", "ids"}).ok());
}

TEST(ForeignFlagsTest, RenamedOnesGiveWayToTheFlagItself) {
  const auto s = Load({"--moe-ffn-hidden-size", "24", "--ffn-hidden-size", "48", "--zero-stage",
                       "1", "--expert-interval", "2"})
                     .value();
  EXPECT_EQ(s.integer("moe-ffn-hidden-size"), 24);
  EXPECT_EQ(s.integer("dense-ffn-hidden-size"), 48);
  EXPECT_EQ(s.value("dense-ffn-hidden-size").where, "--ffn-hidden-size");
  EXPECT_EQ(s.text("zero"), "1");
  EXPECT_EQ(s.integer("moe-layer-freq"), 2);
  EXPECT_EQ(Load({"--deepspeed_config", "/no/such.json"}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Load({"--deepspeed", "/no/such.json"}).status().code(), absl::StatusCode::kNotFound);
}

TEST(ForeignFlagsTest, ShorthandsSetWhatTheyMean) {
  const auto s = Load({"--router", "gpt-oss", "--swiglu", "--disable-bias-linear",
                       "--use-distributed-optimizer", "--qk-layernorm", "--async-save"})
                     .value();
  EXPECT_EQ(s.text("activation"), "swiglu");
  EXPECT_FALSE(s.on("moe-projection-biases"));
  EXPECT_EQ(s.text("zero"), "1");
  EXPECT_EQ(s.text("qk-layernorm"), "head") << "as Megatron has it, which takes no value";
  EXPECT_EQ(Load({"--qk-layernorm", "heads"})->text("qk-layernorm"), "heads");
  EXPECT_EQ(Load({"--qk-layernorm", "--seed", "1"})->text("qk-layernorm"), "head");
}

// A table row for a name that is now a setting would never be read.
TEST(ForeignFlagsTest, NoRowHasTheNameOfASetting) {
  const Settings settings(TrainSettings());
  const Strings names = settings.Names();
  std::set<std::string> all(names.begin(), names.end());
  for (const ForeignFlag& row : ForeignFlags()) {
    const std::string name = absl::StrReplaceAll(row.name, {{"_", "-"}});
    EXPECT_TRUE(all.insert(name).second) << row.name;
    EXPECT_TRUE(*row.beside == 0 || settings.Find(row.beside) != nullptr) << row.beside;
  }
}

// The text of the page.

std::string Page() {
  std::ifstream file(MOE_DOCS "/coming_from.md");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string FlagCell(const ForeignFlag& row) {
  std::string text = absl::StrCat("`--", row.name);
  const std::string values = row.values == std::string("*") ? "…" : row.values;
  if (!values.empty()) absl::StrAppend(&text, " ", absl::StrReplaceAll(values, {{"|", "\\|"}}));
  return text + "`";
}

// Marks flags as code.
std::string TextCell(const std::string& text) {
  Strings words = absl::StrSplit(text, ' ');
  for (std::string& word : words) {
    if (!absl::StartsWith(word, "--")) continue;
    const size_t end = word.find_last_not_of(",;:") + 1;
    word = absl::StrCat("`", word.substr(0, end), "`", word.substr(end));
  }
  return absl::StrJoin(words, " ");
}

// The table of one use as the page must have it: flags with the same text share a row, up to its
// length.
Strings TableOf(ForeignUse use) {
  constexpr size_t kMostBytes = 140;
  Strings lines;
  std::string flags, text;
  const auto end = [&] {
    if (!flags.empty()) lines.push_back(absl::StrCat("| ", flags, " | ", text, " |"));
    flags.clear();
  };
  for (const ForeignFlag& row : ForeignFlags()) {
    if (row.use != use) continue;
    const std::string cell = FlagCell(row);
    const std::string its_text =
        TextCell(*row.beside == 0 ? row.text : absl::StrCat("with --", row.beside, "; ", row.text));
    const size_t bytes = flags.size() + cell.size() + its_text.size();
    if (its_text != text || bytes + sizeof("| ,  |  |") > kMostBytes) end();
    text = its_text;
    absl::StrAppend(&flags, flags.empty() ? "" : ", ", cell);
  }
  end();
  return lines;
}

// Flags without a value that abbreviate another flag with one.
Strings TableOfShorthands() {
  Strings lines;
  for (const Setting& setting : TrainSettings().rows()) {
    for (const auto& [flag, value] : setting.shorthands) {
      const char* const between = setting.kind == Kind::kSwitch ? "=" : " ";
      lines.push_back(absl::StrCat("| `--", flag, "` | `--", setting.name, between, value, "` |"));
    }
    if (!setting.alone.empty()) {
      lines.push_back(
          absl::StrCat("| `--", setting.name, "` | `--", setting.name, " ", setting.alone, "` |"));
    }
  }
  return lines;
}

TEST(ComingFromTest, ThePageHasTheTables) {
  const std::string page = Page();
  const std::pair<const char*, Strings> tables[] = {
      {"Taken as another", TableOf(ForeignUse::kRenamed)},
      {"Taken as another, shorthands", TableOfShorthands()},
      {"Not needed", TableOf(ForeignUse::kNeedless)},
      {"Memory and speed", TableOf(ForeignUse::kMemory)},
      {"Refused", TableOf(ForeignUse::kRefused)}};
  size_t rows = 0;
  for (const auto& [name, lines] : tables) {
    EXPECT_THAT(page, HasSubstr(absl::StrJoin(lines, "\n"))) << name;
    rows += lines.size();
  }
  const Strings all = absl::StrSplit(page, '\n');
  const auto is_row = [](const std::string& line) {
    return absl::StartsWith(line, "| `--");
  };
  EXPECT_EQ(std::count_if(all.begin(), all.end(), is_row), rows) << "rows that no table has";
}

// Every flag that the page names exists.
TEST(ComingFromTest, EveryFlagOfThePageExists) {
  Strings names = Settings(TrainSettings()).Names();
  const Strings of_sweep = Settings(SweepSettings()).Names();
  names.insert(names.end(), of_sweep.begin(), of_sweep.end());
  const std::string page = Page();
  ASSERT_FALSE(page.empty());
  for (size_t at = page.find("--"); at != page.npos; at = page.find("--", at + 2)) {
    const size_t begin = at + 2;
    const size_t end = page.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-_", begin);
    const std::string name = page.substr(begin, end - begin);
    if (name.find_first_not_of('-') == name.npos) continue;  // part of a table's head
    const bool own = std::find(names.begin(), names.end(), name) != names.end();
    EXPECT_TRUE(own || FindForeignFlag(name) != nullptr) << name;
  }
}

TEST(ComingFromTest, ThePageHasEveryKeyOfDeepSpeed) {
  const std::string page = Page();
  for (const std::string& key : DeepSpeedKeys()) {
    const std::string shown = absl::StrReplaceAll(key, {{".0", ""}, {".1", ""}});
    EXPECT_THAT(page, HasSubstr(absl::StrCat("`", shown, "`")));
  }
}

}  // namespace
}  // namespace moe::cli
