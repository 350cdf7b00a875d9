// moe generate: text from a checkpoint.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "dispatch/dispatcher.h"
#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/stored_run.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/base/train_options.h"
#include "moe/cli/base/weight_offload.h"
#include "moe/cli/generate/token_text.h"
#include "moe/hf/model_rule.h"
#include "moe/io/file.h"
#include "moe/lm/generation.h"
#include "moe/plan/model_cost.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "generate";
constexpr int64_t kBytes = 256;  // a vocabulary of this size is text bytes

constexpr char kHead[] =
    R"(usage: moe generate --checkpoint PATH --prompt TEXT [flags]
       moe generate --checkpoint PATH --prompt-tokens 1,2,3 [flags]

Goes on from a prompt with a checkpoint of moe train, token by token, and prints what it adds. The
same tokens at any number of ranks, which share one set of experts. On CPUs.

  moe generate --checkpoint run/ckpt --prompt 'Once upon'
  moe generate --checkpoint run/ckpt --prompt-file start.txt --temperature 0.8 --top-p 0.95 --seed 7
  moe generate --checkpoint model --prompt-tokens $(scripts/tokenize.py --tokenizer \
    model/tokenizer.json --prompt 'Once upon')
  moe generate --checkpoint run/ckpt --prompt-tokens 464,2068 --max-new-tokens 20 -o json
)";

constexpr char kTail[] =
    R"(
A model with a tokenizer.json prints text, as it comes and in whole characters; scripts/tokenize.py
makes the ids of a prompt. Without one a model of 256 ids writes bytes, and others print ids.
What is no UTF-8 is printed as U+FFFD, and on a terminal control characters as \x1b; a pipe or a
file gets them as they are.

How a token is chosen from logits l
  temperature 0  the largest l, the lowest id where several are
  else           with probability proportional to e^(l / temperature), among the --top-k largest
                 and, of these, the fewest that together have --top-p of their probability. The
                 random number is a function of --seed and the token's place: Philox.
What a token's router does is not limited by capacity.
The text ends with a token of eos_token_id: of a public model's generation_config.json or, where
there is none, its config.json; of the checkpoint of a run its --eos-token-id. --ignore-eos goes on.

Speed, on standard error: prompt, with packing the weights; then tokens a second, and the weights
that one token reads, times that. GB = 1e9 bytes. With --offload also what a rank keeps of them and
what was read: an expert that a token needs is a hit where it was in memory.

-o json: one object, checkpoint, step, prompt_tokens, tokens, text (unless ids are printed),
prompt_seconds, seconds, tokens_per_s, weight_bytes_per_token, bf16_order ("dot", "tile"; null
without products of bf16), offload (null without): of all ranks memory_bytes, file_bytes, experts,
experts_in_memory, expert_hits, expert_misses, hit_rate, module_reads, bytes_read, and wait_seconds
of the rank that waited longest.

Settings: flags, then the environment (MOE_NAME: capitals, _ for -, without a leading moe-), then
--config, then defaults.

Exit codes: 0 ok, 2 usage or a path that is not there, 3 a damaged checkpoint, 4 a read or write
failed, 5 out of memory, 6 logits not finite, 7 a rank failed, 8 timeout, 9 rendezvous, 10 no such
backend or device.
)";

struct GenerateOptions {
  lm::GenerationOptions generation = {.max_new_tokens = 128};
  bool ignore_eos = false;
  int tensor = 1;
  DispatcherOptions dispatcher;
};

Table GenerateSettings(GenerateOptions& options) {
  lm::Sampling& sampling = options.generation.sampling;
  Table t;
  t.Group("Model and prompt");
  AddStoredRunSettings(t);
  t.Add("--prompt TEXT", Kind::kText, "its bytes are the first tokens");
  t.Add("--prompt-file FILE", Kind::kText, "the same from a file").Roles(kByContent);
  t.Add("--prompt-tokens IDS", Kind::kText, "ids, between commas");
  t.Group("Tokens");
  t.Add("--max-new-tokens N", &options.generation.max_new_tokens, "that are added at most")
      .Least(1);
  t.Add("--ignore-eos", &options.ignore_eos, "go on behind a token that ends the text");
  t.Add("--temperature X", &sampling.temperature, "0 = the likeliest token").Least(0);
  t.Add("--top-k K", &sampling.top_k, "likeliest tokens that are drawn from; 0 = all").Least(0);
  t.Add("--top-p P", &sampling.top_p, "probability of those that are drawn from")
      .Within(1e-9, 1, "0 < P <= 1");
  t.Add("--seed N", &sampling.seed, "of what is drawn");
  t.Group("Ranks");
  AddRankSettings(t, 1);
  t.Add("--tensor-model-parallel-size, --tp N", &options.tensor,
        "ranks that share the sequence, each with its own heads and columns; at most "
        "--tensor-leaves; divides the ranks; the same tokens")
      .Least(1);
  t.Add("--tensor-leaves S", {Kind::kWord, "", {"1", "2", "4", "8", "16"}},
        "leaves of products that are balanced trees; part of what fixes the bits; default: as "
        "trained, 1 for a public model");
  AddThreadsSetting(t);
  t.Add("--dispatch NAME", {&options.dispatcher.algorithm, kDispatchWords},
        "how tokens travel to the experts of other ranks");
  AddTimeoutSetting(t);
  t.Group("Output and settings");
  t.Add("-o, --output FORM", {Kind::kWord, "text", {"text", "json"}},
        "text as it comes, or one JSON object on a line")
      .Roles(kPerRank);
  AddQuietSetting("neither warnings nor speed", t);
  AddConfigSetting("settings by name", t);
  AddHelpSettings(t);
  return t;
}

// The prompt, from one of the three flags. `of_bytes`: the ids of the model are bytes.
absl::StatusOr<std::vector<int32_t>> PromptOf(const Settings& settings, bool of_bytes) {
  const char* given = nullptr;
  for (const char* const name : {"prompt", "prompt-file", "prompt-tokens"}) {
    if (!settings.given(name)) continue;
    if (given != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", given, " and --", name, ", expected one of them"));
    }
    given = name;
  }
  if (given == nullptr) {
    return absl::InvalidArgumentError(
        "--prompt is missing, expected a text, --prompt-file or --prompt-tokens");
  }
  if (given == absl::string_view("prompt-tokens")) return NumbersOf(settings, given);
  if (!of_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", given,
                     ", expected --prompt-tokens: the ids of this model are no bytes; "
                     "scripts/tokenize.py --prompt makes them of a text"));
  }
  std::vector<int32_t> ids;
  if (given == absl::string_view("prompt")) {
    for (const char c : settings.text(given)) ids.push_back(static_cast<uint8_t>(c));
  } else {
    const auto file = MappedFile::Open(settings.text(given));
    MOE_RETURN_IF_ERROR(InputError("--prompt-file", file.status()));
    ids.assign(file->bytes().begin(), file->bytes().end());
  }
  if (!ids.empty()) return ids;
  return absl::InvalidArgumentError(
      absl::StrCat("--", given, " is empty, expected at least a byte"));
}

double TokensPerSecond(const lm::GenerationReport& report) {
  const auto tokens = static_cast<double>(report.tokens.size()) - 1;
  return report.seconds > 0 ? tokens / report.seconds : 0;
}

class GenerateRun {
 public:
  GenerateRun(const Settings& settings, const Launch& launch)
      : settings_(settings), launch_(launch) {}

  absl::Status Run() {
    MOE_RETURN_IF_ERROR(Fill(settings_, GenerateSettings(options_)));
    MOE_ASSIGN_OR_RETURN(run_, OpenStoredRun(settings_, launch_));
    lm::GenerationOptions& generation = options_.generation;
    MOE_ASSIGN_OR_RETURN(auto tokenizer, TokenizerOf(settings_, run_));
    const bool of_bytes = tokenizer == nullptr && run_.config.model.vocab_size == kBytes;
    MOE_ASSIGN_OR_RETURN(generation.prompt, PromptOf(settings_, of_bytes));
    if (of_bytes) token_text_.emplace(TokenTable::OfBytes());
    if (tokenizer != nullptr) token_text_.emplace(std::move(*tokenizer));
    if (token_text_.has_value()) {
      for (const int32_t token : generation.prompt) token_text_->Take(token);
    }
    MOE_ASSIGN_OR_RETURN(generation.end_tokens, EndTokens());
    run_.config.model.moe.dispatcher = options_.dispatcher;
    SessionOptions& session = run_.config.trainer.session;
    session.mesh.tensor = options_.tensor;
    if (!settings_.empty("tensor-leaves")) {
      session.tensor_leaves = static_cast<int>(settings_.integer("tensor-leaves"));
    }
    if (launch_.rank() == 0 && !settings_.on("quiet")) {
      const int64_t length =
          static_cast<int64_t>(generation.prompt.size()) + generation.max_new_tokens;
      if (run_.public_model == nullptr && length > run_.config.sequence_length) {
        run_.warnings.push_back(absl::StrCat("prompt and new tokens are ", length,
                                             ", the model has learnt sequences of ",
                                             run_.config.sequence_length));
      }
      PrintWarnings(kCommand, run_.warnings);
    }
    generation.on_token = [&](int32_t token) -> absl::Status {
      const std::string shown = Shown(token);
      text_ += shown;
      return as_json() ? absl::OkStatus() : Print(TextFor(stdout, shown));
    };
    const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
      const bool first = world->rank() == 0;
      MOE_ASSIGN_OR_RETURN(const lm::GenerationReport report,
                           lm::Generate(run_.config, run_.weights, generation, std::move(world)));
      if (!first) return absl::OkStatus();
      const std::string rest = token_text_.has_value() ? token_text_->End() : "";
      MOE_RETURN_IF_ERROR(Print(as_json() ? JsonText(report, text_ + rest) : rest + "\n"));
      if (!settings_.on("quiet")) PrintAside(SpeedText(report));
      return absl::OkStatus();
    };
    const auto inputs = [this] {
      return Inputs();
    };
    return NamingTheOneBefore(
        RunAgreedRanks(
            {.launch = launch_, .settings = settings_, .command = kCommand, .inputs = inputs},
            body),
        run_.path);
  }

 private:
  absl::StatusOr<std::vector<int32_t>> EndTokens() const {
    if (options_.ignore_eos) return std::vector<int32_t>();
    if (run_.public_model == nullptr) return run_.config.model.eos_token_ids;
    auto tokens = hf::ReadEndTokens(run_.path);
    MOE_RETURN_IF_ERROR(InputError("--checkpoint", tokens.status()));
    return tokens;
  }

  absl::StatusOr<ReadInputs> Inputs() const {
    MOE_ASSIGN_OR_RETURN(ReadInputs inputs, run_.Inputs());
    if (!settings_.empty("prompt-file")) {
      MOE_RETURN_IF_ERROR(inputs.AddFile("prompt", "prompt-file", settings_.text("prompt-file")));
    }
    return inputs;
  }

  bool as_json() const { return settings_.is("output", "json"); }
  // The printed text of a token.
  std::string Shown(int32_t token) {
    if (token_text_.has_value()) return token_text_->Take(token);
    return absl::StrCat(text_.empty() ? "" : " ", token);
  }

  std::string JsonText(const lm::GenerationReport& report, const std::string& text) const {
    nlohmann::ordered_json line = nlohmann::ordered_json::object();
    line["schema"] = "moe.generate/1";
    line["checkpoint"] = run_.path;
    line["step"] = run_.weights.step;
    line["prompt_tokens"] = options_.generation.prompt;
    line["tokens"] = report.tokens;
    if (token_text_.has_value()) line["text"] = text;
    line["prompt_seconds"] = report.prompt_seconds;
    line["seconds"] = report.seconds;
    line["tokens_per_s"] = TokensPerSecond(report);
    line["weight_bytes_per_token"] = WeightBytes();
    line["bf16_order"] = nullptr;
    if (report.bfloat16_order.has_value()) {
      line["bf16_order"] = NameOf(*report.bfloat16_order, kBFloat16OrderWords);
    }
    line["offload"] = JsonOf(report.paging);
    return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  }

  std::string SpeedText(const lm::GenerationReport& report) const {
    const double rate = TokensPerSecond(report);
    const std::string weights = report.paging.has_value() ? TextOf(*report.paging) : "";
    return fmt::format(
        "moe generate: {}: prompt of {} in {:.2f} s; {} in {:.2f} s, {:.1f} tok/s; weights {} a "
        "token, "
        "{:.2f} GB/s\n{}",
        Printable(run_.path),
        Counted(static_cast<int64_t>(options_.generation.prompt.size()), "token"),
        report.prompt_seconds, Counted(static_cast<int64_t>(report.tokens.size()), "token"),
        report.seconds, rate, BytesText(WeightBytes()), WeightBytes() * rate / 1e9,
        weights.empty() ? "" : absl::StrCat("moe generate: weights: ", weights, "\n"));
  }

  // The bytes that one token reads: one row of the embedding, and all active weights.
  double WeightBytes() const {
    const lm::TransformerConfig& model = run_.config.model;
    const int64_t embedding =
        model.tied_embeddings ? 0 : (model.vocab_size - 1) * model.hidden_size;
    return static_cast<double>(plan::SizeOf(model).active - embedding) *
           static_cast<double>(SizeOf(run_.config.trainer.dtype));
  }

  const Settings& settings_;
  const Launch& launch_;
  GenerateOptions options_;
  StoredRun run_;
  std::optional<TokenText> token_text_;  // of the prompt and behind it; none: ids are printed
  std::string text_;                     // what was printed so far
};

}  // namespace

CommandHelp GenerateHelp() {
  GenerateOptions defaults;
  return {.head = kHead, .settings = GenerateSettings(defaults).rows(), .tail = kTail};
}

ExitCode GenerateCommand(const Invocation& invocation) {
  return RunWithRanks(invocation, kCommand, GenerateHelp(), ComputesOn::kCpu,
                      [](const Settings& settings, const Launch& launch) {
                        return GenerateRun(settings, launch).Run();
                      });
}

}  // namespace moe::cli
