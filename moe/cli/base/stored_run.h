// The run whose checkpoint --checkpoint names.
#ifndef MOE_MOE_CLI_BASE_STORED_RUN_H_
#define MOE_MOE_CLI_BASE_STORED_RUN_H_

#include <memory>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "moe/checkpoint/reader.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/hf/hf_model.h"
#include "moe/io/tokenizer_file.h"
#include "moe/lm/evaluation.h"
#include "moe/lm/training_loop.h"

namespace moe::cli {

// `path` if it is a step folder; otherwise the newest intact checkpoint in it, or in its folder
// `checkpoints`. Newer ones that are damaged are warnings. kNotFound: none; kDataLoss: all are
// damaged.
absl::StatusOr<FoundCheckpoint> FindStored(const std::string& path);

// The error of reading `path`; if the data are damaged, with the checkpoint before it, if that can
// be read. (Results belong to the checkpoint that a command began with: no command continues with
// another by itself.)
absl::Status NamingTheOneBefore(absl::Status error, const std::string& path);

// --checkpoint, --tokenizer, --dtype, --bf16-order, --offload and --weight-memory.
void AddStoredRunSettings(Table& table);

struct StoredRun {
  std::string path;                                 // the step folder, or a public model's folder
  std::shared_ptr<const hf::HfModel> public_model;  // which `weights` reads; nullptr: a checkpoint
  lm::ModelWeights weights;
  bool of_text = false;  // trained on the bytes of a text, by its checkpoint
  // Configuration that it was trained with (lm::StoredConfig), or the public model and defaults; on
  // the requested device, with the requested type and order of bfloat16.
  lm::TrainConfig config;
  // Warnings of newer checkpoints that are damaged, of another version of the numerics, and
  // HfModel::warnings.
  std::vector<std::string> warnings;

  // What ranks compare of the run: of a checkpoint the manifest, which has hashes of everything
  // else.
  absl::StatusOr<ReadInputs> Inputs() const;
};

// The checkpoint, or the newest whole one of a run: --checkpoint is a step folder, the folder of
// them, or the one above it, in which it is called checkpoints; or a public model's folder. Opens
// it; reads no weights. Exit codes: kUsage: there is none; kBadInput: damaged.
absl::StatusOr<StoredRun> OpenStoredRun(const Settings& settings, const Launch& launch);

// tokenizer.json in a public model's folder, in that of a run's checkpoints or, for a step, in the
// one above; empty: there is none.
std::string TokenizerPathOf(const std::string& model_or_step);

// What the ids of the run's model stand for: --tokenizer FILE or, without it, TokenizerPathOf;
// nullptr: there is none, or --tokenizer none. Exit codes: kUsage: FILE is not there, or has more
// ids than the model; kBadInput: it is malformed, or of another kind (TokenTable::Parse).
absl::StatusOr<std::unique_ptr<TokenTable>> TokenizerOf(const Settings& settings,
                                                        const StoredRun& run);
// A table of FILE whose ids are all below vocab_size. Exit codes as above.
absl::StatusOr<TokenTable> OpenTokenizer(const std::string& path, int64_t vocab_size);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_STORED_RUN_H_
