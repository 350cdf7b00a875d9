// The settings of a training run by name: compared between ranks, and between a run and the
// checkpoint that it resumes from.
#ifndef MOE_MOE_LM_RUN_SETTINGS_H_
#define MOE_MOE_LM_RUN_SETTINGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "moe/checkpoint/manifest.h"
#include "moe/lm/training_loop.h"
#include "moe/run/settings.h"

namespace moe::lm {

struct RunSetting {
  SettingKind kind;
  const char* name;    // a flag, "--seq-length", or a field
  std::string text;    // for people and files; real numbers in hexadecimal
  std::string before;  // SettingRow's
};

// The rows of `config` as texts, then the hash of the text, in the order in which differences are
// reported.
std::vector<RunSetting> SettingsOf(const TrainConfig& config, const Corpus& corpus);

// kInvalidArgument, naming a flag (or field) and two ranks, unless every rank has the same text and
// the same of every setting that changes results or what ranks exchange. Not compared: threads,
// packed weights; records and traces, which CheckRecords compares. Collective over `world`, as
// moe::CheckAgreement is (comm/agreement.h). `settings` are those of SettingsOf.
absl::Status CheckAgreement(const std::vector<RunSetting>& settings, Communicator& world);

// The run that wrote a checkpoint: its settings of the kinds kNumerics, kModel and kTrainer; the
// others are defaults. kDataLoss: one is missing or malformed.
absl::StatusOr<TrainConfig> StoredConfig(const CheckpointSections& sections);

// Whether the run that wrote a checkpoint read the bytes of a text; else token ids.
bool TrainedOnText(const CheckpointSections& sections);
// kInvalidArgument, naming flags: a resuming run reads the other of the two, and its vocabulary is
// not 256, whose ids may be bytes.
absl::Status CheckSameTokens(const CheckpointSections& sections, const TrainConfig& config,
                             const std::vector<RunSetting>& settings);

// "version of the numerics is 5, 4 in the checkpoint" where the program that wrote a checkpoint had
// other bits than this one; else empty. With one tensor leaf versions 3 and 4 had the same bits,
// without a norm of all heads version 4 at any number.
std::string VersionDifference(const CheckpointSections& sections);

// The settings of a kind as an object of JSON, from names without dashes to texts.
std::string SettingsJson(const std::vector<RunSetting>& settings, SettingKind kind);

// The names of a kind whose text in `json`, as SettingsJson wrote it, is another; each as
// "--seq-length is 64, 128 in the checkpoint". Of data the texts are hashes, shown as such.
std::vector<std::string> Differences(const std::vector<RunSetting>& settings, SettingKind kind,
                                     const std::string& json);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_RUN_SETTINGS_H_
