// How commands run their ranks: once these have found that they were given the same.
#ifndef MOE_MOE_CLI_BASE_AGREED_RANKS_H_
#define MOE_MOE_CLI_BASE_AGREED_RANKS_H_

#include <functional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "comm/agreement.h"
#include "comm/create.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/hf/hf_model.h"
#include "moe/io/checkpoint.h"

namespace moe::cli {

// What a command has read of files, by the flags that name them.
struct ReadInputs {
  std::vector<AgreedValue> values;  // hashes
  std::vector<AgreedBytes> bytes;   // of mapped files

  // `what` is for people, "text"; `flag` the name of the row, "data".
  void AddHash(absl::string_view what, absl::string_view flag, uint64_t xxh3);
  // Of a small file, which is read here: its errors as InputError's.
  absl::Status AddFile(absl::string_view what, absl::string_view flag, const std::string& path);
  // Of tensors that stay mapped until the ranks have ended, in an order that follows from the
  // model.
  absl::Status AddTensors(absl::string_view what, absl::string_view flag,
                          absl::Span<const CheckpointTensor> tensors);
  // Its config.json and its tensors.
  absl::Status AddModel(const hf::HfModel& model, absl::string_view flag);
};

// What all ranks of `command` ("bench alltoall") must have alike: the program's version and commit,
// that of the numerics, the command, and every row of its table but those of kPerRank; of those of
// kByContent and kOneFolder, whether they are given. Real numbers by value, "1e-3" as "0.001".
std::vector<AgreedValue> AgreedValuesOf(absl::string_view command, const Settings& settings);

struct AgreedRun {
  const Launch& launch;
  const Settings& settings;
  const char* command;          // of messages: "bench"
  std::string operation = {};   // of commands that have several: "alltoall"
  absl::Duration timeout = {};  // --comm-timeout
  // For ranks that are processes, before they meet: an entry for each row of kByContent that is
  // given. Empty: the command reads nothing.
  std::function<absl::StatusOr<ReadInputs>()> inputs = {};
};

// RunRanks, whose `body` begins once the world has as many ranks as --ranks says, and ranks that
// are processes have AgreedValuesOf and inputs alike: else every rank ends with the
// kInvalidArgument of CheckAgreement (comm/agreement.h), exit code 2. Ranks that are threads share
// their settings, and compare nothing.
absl::Status RunAgreedRanks(const AgreedRun& run, RankBody body);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_AGREED_RANKS_H_
