// Settings of `moe train`, and the options that it makes of them.
#ifndef MOE_MOE_CLI_BASE_TRAIN_OPTIONS_H_
#define MOE_MOE_CLI_BASE_TRAIN_OPTIONS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/mesh/mesh_shape.h"
#include "comm/watch/fault.h"
#include "moe/cli/base/data_files.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/hf/model_rule.h"
#include "moe/lm/training_loop.h"

namespace moe::cli {

struct TrainOptions {
  lm::TrainConfig train;
  DataFiles data;
  std::string init_from;        // empty: random weights
  hf::Upcycling upcycling;      // with experts: init_from is dense
  std::string tokenizer;        // empty: that of init_from, if it has one
  std::string out;              // empty: no files
  std::string tensorboard_dir;  // empty: no event file
  std::string metrics_file;     // empty: no text for Prometheus
  std::string trace;            // empty: no time line
  std::string record_routing;   // empty: routing is not recorded
  std::string flight_dir;       // empty: dumps of the flight recorder go to the folder of --save
  Fault fault;                  // without ranks: none
  int64_t log_interval = 10;    // steps between progress lines
  int ranks = 1;
};

// EP of --ep auto among `ranks` ranks: the largest of at most `experts` for which mesh.tensor
// divides EP times mesh.expert_tensor, and that the ranks of a stage; the smallest that the first
// allows if there is none.
int MostExpertRanks(int ranks, const MeshShape& mesh, int experts);

// Rows of ranks, experts over ranks, threads and how tokens travel, for training and evaluation.
void AddLayoutSettings(lm::TrainConfig& train, Table& table);

// The rows of `moe train`. Those that set fields set `options`.
Table TrainSettings(TrainOptions& options);
Table TrainSettings();

// Names and values of the settings of moe train that make a public model (moe/hf/model_rule.h).
std::vector<std::pair<const char*, std::string>> SettingsOf(const lm::TransformerConfig& model);

// Flags over environment over --config over router presets over defaults. Errors: kInvalidArgument
// or kNotFound.
absl::StatusOr<Settings> LoadTrainSettings(absl::Span<const std::string> args,
                                           absl::Span<const std::string> environment,
                                           std::vector<std::string>& warnings);

// --upcycle, --upcycle-noise and what they are of; without experts if they are not given.
hf::Upcycling UpcyclingOf(const Settings& settings);

// Finds every error that can be found without reading the text: kInvalidArgument with flag, value
// and nearest valid choice.
absl::StatusOr<TrainOptions> MakeTrainOptions(const Settings& settings, const World& world);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_TRAIN_OPTIONS_H_
