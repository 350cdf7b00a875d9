// moe eval: the loss of a text under a checkpoint.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numbers>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/data_files.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/metrics_file.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/stored_run.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/base/train_options.h"
#include "moe/cli/base/weight_offload.h"
#include "moe/lm/evaluation.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "eval";

constexpr char kHead[] =
    R"(usage: moe eval --checkpoint PATH --data PATH [flags]
       moe eval --checkpoint PATH --tokens FILE [flags]

The loss of a text, or of token ids made elsewhere, under a checkpoint of moe train, at any number
of ranks: the same bits at any layout.

  moe eval --checkpoint run/ckpt --data book.txt
  moe eval --checkpoint run/ckpt/step-00000120 --data book.txt --split held-out --ranks 2 --ep 2
  mpirun -n 4 moe eval --checkpoint run/ckpt --tokens test.bin --ep 4 -o json
)";

constexpr char kTail[] =
    R"(
  loss        mean over tokens of -ln p(token | those before it in its sequence), nats
  bits per byte (with --tokens, per token) = loss / ln 2; with --tokens and the tokenizer.json of
              the model, of the run or of --tokenizer also per byte of the tokens' text, special
              tokens being none
  perplexity  e^loss

The text is cut into sequences of --seq-length, each predicted from its own beginning; what is left
over is not looked at. --split held-out --eval-sequences 256 are what moe train validates on.

-o json: one object, checkpoint, step, split, sequences, tokens, loss, loss_hex, bits_per_byte (or
bits_per_token), with --tokens also text_bytes and bits_per_byte (null without a tokenizer),
perplexity, bf16_order ("dot", "tile"; null without products of bf16 on CPUs),
seconds, tokens_per_s, offload (as of moe generate).

Settings: flags, then the environment (MOE_NAME: capitals, _ for -, without a leading moe-), then
--config, then defaults.

Exit codes: 0 ok, 2 usage or a path that is not there, 3 a damaged checkpoint or malformed input,
4 a read failed, 5 out of memory, 6 the loss is not finite, 7 a rank failed, 8 timeout,
9 rendezvous, 10 no such backend.
)";

constexpr Choice<lm::Tokens lm::Corpus::*> kSplits[] = {
    {"all", &lm::Corpus::all}, {"train", &lm::Corpus::train}, {"held-out", &lm::Corpus::held_out}};

struct EvalOptions {
  DataFiles data;
  lm::Tokens lm::Corpus::*split = &lm::Corpus::all;
  // Holds the layout alone; the rest is the checkpoint's.
  lm::TrainConfig layout;
  std::optional<int64_t> sequence_length, micro_batch_size, sequences;
};

Table EvalSettings(EvalOptions& options) {
  Table t;
  t.Group("Model and text");
  AddStoredRunSettings(t);
  AddDataSettings(options.data, t);
  t.Add("--split NAME", {&options.split, kSplits},
        "of the text: all of it, or the part that moe train learns from or holds out");
  t.Add("--seq-length N", &options.sequence_length,
        "bytes or tokens a sequence predicts; default: as trained")
      .Least(1);
  t.Add("--micro-batch-size N", &options.micro_batch_size,
        "sequences of a micro-batch, which matters to capacity alone; default: as trained")
      .Least(1);
  t.Add("--eval-sequences N", &options.sequences, "most sequences; default: all").Least(1);
  t.Group("Ranks");
  AddLayoutSettings(options.layout, t);
  AddTimeoutSetting(t);
  t.Group("Output and settings");
  t.Add("-o, --output FORM", {Kind::kWord, "table", {"table", "json"}},
        "lines, or one JSON object on a line")
      .Roles(kPerRank);
  AddQuietSetting("no warnings", t);
  AddConfigSetting("settings by name", t);
  AddHelpSettings(t);
  return t;
}

// Bytes of the text of the tokens that sequences predict: [1, count].
int64_t TextBytes(const lm::Tokens& tokens, int64_t count, const TokenTable& tokenizer) {
  constexpr int64_t kMost = 1 << 16;  // tokens at a time
  std::vector<int32_t> ids;
  int64_t bytes = 0;
  for (int64_t at = 1; at <= count; at += kMost) {
    ids.resize(static_cast<size_t>(std::min(kMost, count + 1 - at)));
    tokens.Copy(at, absl::MakeSpan(ids));
    for (const int32_t id : ids) bytes += static_cast<int64_t>(tokenizer.BytesOf(id).size());
  }
  return bytes;
}

struct Evaluated {
  const StoredRun& run;
  const lm::Corpus& corpus;
  const char* split;
  const lm::EvaluationReport& report;
  int64_t text_bytes = 0;  // of the tokens' text; 0: not known, or the tokens are bytes

  double bits() const { return static_cast<double>(report.loss) / std::numbers::ln2; }
  double bits_per_byte() const {
    return bits() * static_cast<double>(report.tokens) / static_cast<double>(text_bytes);
  }
  double perplexity() const { return std::exp(static_cast<double>(report.loss)); }
  double rate() const {
    return report.seconds > 0 ? static_cast<double>(report.tokens) / report.seconds : 0;
  }
};

std::string JsonText(const Evaluated& e) {
  nlohmann::ordered_json line = nlohmann::ordered_json::object();
  line["schema"] = "moe.eval/1";
  line["checkpoint"] = e.run.path;
  line["step"] = e.run.weights.step;
  line["split"] = e.split;
  line["sequences"] = e.report.sequences;
  line["tokens"] = e.report.tokens;
  line["loss"] = e.report.loss;
  line["loss_hex"] = HexOf(e.report.loss);
  line[absl::StrCat("bits_per_", e.corpus.unit)] = e.bits();
  if (e.corpus.unit == absl::string_view("token")) {
    line["text_bytes"] = line["bits_per_byte"] = nullptr;
    if (e.text_bytes > 0) {
      line["text_bytes"] = e.text_bytes;
      line["bits_per_byte"] = e.bits_per_byte();
    }
  }
  line["perplexity"] = e.perplexity();
  line["bf16_order"] = nullptr;
  if (e.report.bfloat16_order.has_value()) {
    line["bf16_order"] = NameOf(*e.report.bfloat16_order, kBFloat16OrderWords);
  }
  line["seconds"] = e.report.seconds;
  line["tokens_per_s"] = e.rate();
  line["offload"] = JsonOf(e.report.paging);
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string TableText(const Evaluated& e) {
  const std::string per_byte =
      e.text_bytes == 0 ? "" : fmt::format(", {:.4f} per byte", e.bits_per_byte());
  return fmt::format(
      "checkpoint  {}\n"
      "text        {}, {}, {}: {} of {} {}s; {}\n"
      "loss        {:.4f} nats, {:.4f} bits per {}{}\n"
      "perplexity  {:.4f}\n"
      "throughput  {} tok/s\n"
      "{}",
      Printable(e.run.path), Counted(static_cast<int64_t>(e.corpus.files.size()), "file"),
      Counted(e.corpus.all.size(), e.corpus.unit), e.split, Counted(e.report.sequences, "sequence"),
      e.run.config.sequence_length, e.corpus.unit, TextOf(e.corpus.skipped), e.report.loss,
      e.bits(), e.corpus.unit, per_byte, e.perplexity(), WithCommas(std::llround(e.rate())),
      e.report.paging.has_value() ? "weights     " + TextOf(*e.report.paging) + "\n" : "");
}

// Bytes are the data of models that were trained on text, or have 256 ids, as in moe generate.
absl::Status CheckBytes(const DataFiles& data, const StoredRun& run) {
  const int64_t ids = run.config.model.vocab_size;
  if (data.text.empty() || run.of_text || ids == 256) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--data, expected --tokens: the ", ids, " ids of this model are no bytes"));
}

absl::Status RunEval(const Settings& settings, const Launch& launch) {
  EvalOptions options;
  MOE_RETURN_IF_ERROR(Fill(settings, EvalSettings(options)));
  MOE_ASSIGN_OR_RETURN(StoredRun run, OpenStoredRun(settings, launch));
  lm::TrainConfig& config = run.config;
  const TrainerOptions& layout = options.layout.trainer;
  config.trainer.session.mesh = layout.session.mesh;
  config.trainer.pipeline_chunks = layout.pipeline_chunks;
  config.trainer.pipeline_schedule = layout.pipeline_schedule;
  if (settings.is("expert-model-parallel-size", "auto")) {
    MeshShape& mesh = config.trainer.session.mesh;
    mesh.expert = MostExpertRanks(launch.world.ranks, mesh, config.model.moe.router.num_experts);
  }
  config.model.moe.dispatcher = options.layout.model.moe.dispatcher;
  config.sequence_length = options.sequence_length.value_or(config.sequence_length);
  config.micro_batch_size = options.micro_batch_size.value_or(config.micro_batch_size);
  config.evaluation.sequences = options.sequences.value_or(std::numeric_limits<int64_t>::max());
  MOE_RETURN_IF_ERROR(InFlags(lm::ValidateTrainConfig(config, launch.world.ranks), settings));
  MOE_RETURN_IF_ERROR(CheckDataFiles(options.data, config.model.vocab_size));
  MOE_RETURN_IF_ERROR(CheckBytes(options.data, run));
  MOE_ASSIGN_OR_RETURN(const lm::Corpus corpus,
                       ReadData(options.data, config.model.vocab_size, /*sequence_length=*/0));
  std::unique_ptr<TokenTable> tokenizer;
  if (launch.rank() == 0 && !options.data.tokens.empty()) {
    MOE_ASSIGN_OR_RETURN(tokenizer, TokenizerOf(settings, run));
  }
  if (launch.rank() == 0 && !settings.on("quiet")) PrintWarnings(kCommand, run.warnings);
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool first = world->rank() == 0;
    MOE_ASSIGN_OR_RETURN(
        const lm::EvaluationReport report,
        lm::Evaluate(config, run.weights, corpus, options.split, std::move(world)));
    if (!first) return absl::OkStatus();
    Evaluated evaluated = {
        .run = run, .corpus = corpus, .split = settings.text("split").c_str(), .report = report};
    if (tokenizer != nullptr) {
      evaluated.text_bytes = TextBytes(corpus.*options.split, report.tokens, *tokenizer);
    }
    return Print(settings.is("output", "json") ? JsonText(evaluated) : TableText(evaluated));
  };
  const auto inputs = [&]() -> absl::StatusOr<ReadInputs> {
    MOE_ASSIGN_OR_RETURN(ReadInputs read, run.Inputs());
    options.data.AddTo(corpus, read);
    return read;
  };
  return NamingTheOneBefore(
      RunAgreedRanks(
          {.launch = launch, .settings = settings, .command = kCommand, .inputs = inputs}, body),
      run.path);
}

}  // namespace

CommandHelp EvalHelp() {
  EvalOptions defaults;
  return {.head = kHead, .settings = EvalSettings(defaults).rows(), .tail = kTail};
}

ExitCode EvalCommand(const Invocation& invocation) {
  return RunWithRanks(invocation, kCommand, EvalHelp(), ComputesOn::kAnyDevice, RunEval);
}

}  // namespace moe::cli
