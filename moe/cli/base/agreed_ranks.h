// How commands run their ranks: once these have found that they were passed the same settings and
// files.
#ifndef MOE_MOE_CLI_BASE_AGREED_RANKS_H_
#define MOE_MOE_CLI_BASE_AGREED_RANKS_H_

#include <functional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "comm/agreement.h"
#include "comm/create.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/hf/hf_model.h"
#include "moe/io/checkpoint.h"

namespace moe::cli {

// Contents of the files that a command has read, by the flags that name them.
struct ReadInputs {
  std::vector<AgreedValue> values;  // hashes
  std::vector<AgreedBytes> bytes;   // contents of mapped files

  // `what` is a text for people, "text"; `flag` is the name of the row, "data".
  void AddHash(absl::string_view what, absl::string_view flag, uint64_t xxh3);
  // Adds the hash of a small file, which is read here. Errors are those of InputError.
  absl::Status AddFile(absl::string_view what, absl::string_view flag, const std::string& path);
  // Adds tensors that stay mapped until the ranks have ended. Their order follows from the model.
  absl::Status AddTensors(absl::string_view what, absl::string_view flag,
                          absl::Span<const CheckpointTensor> tensors);
  // Adds the model's config.json and its tensors.
  absl::Status AddModel(const hf::HfModel& model, absl::string_view flag);
};

// Values on which all ranks of `command` ("bench alltoall") must agree: the program's version and
// commit, the version of the numerics, the command, and every row of its table except those of
// kPerRank. For rows of kByContent and kOneFolder the value is whether they are given. Real numbers
// are compared by value, "1e-3" as "0.001".
std::vector<AgreedValue> AgreedValuesOf(absl::string_view command, const Settings& settings);

struct AgreedRun {
  const Launch& launch;
  const Settings& settings;
  const char* command;         // name in messages: "bench"
  std::string operation = {};  // operation of a command that has several: "alltoall"
  // Called before ranks that are processes meet: returns an entry for each row of kByContent that
  // is given. Empty: the command reads no files.
  std::function<absl::StatusOr<ReadInputs>()> inputs = {};
  // Called by a rank that fails and does not return (RunOptions::report), before it reports.
  std::function<void(const absl::Status&)> on_failure = {};
  ProcessWatch* watch = nullptr;  // RunOptions::watch
};

// RunRanks, whose `body` begins once the world has as many ranks as --ranks names and ranks that
// are processes agree in AgreedValuesOf and inputs. Otherwise every rank ends with the
// kInvalidArgument of CheckWorldSize or of CheckAgreement (comm/agreement.h), exit code 2. Ranks
// that are threads share their settings and compare nothing.
absl::Status RunAgreedRanks(const AgreedRun& run, RankBody body);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_AGREED_RANKS_H_
