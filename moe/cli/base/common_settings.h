// Rows that stand in the tables of several commands.
#ifndef MOE_MOE_CLI_BASE_COMMON_SETTINGS_H_
#define MOE_MOE_CLI_BASE_COMMON_SETTINGS_H_

#include <cstdint>
#include <string>

#include <absl/time/time.h>

#include "moe/cli/base/settings.h"

namespace moe::cli {

// --ranks, --backend and --device: what PlanLaunch reads.
void AddRankSettings(Table& table);

// --device alone, of commands that place their ranks themselves: what DeviceOf reads.
void AddDeviceSetting(Table& table);

// --share-device: what CheckDevices reads.
void AddShareDeviceSetting(Table& table);

// Of a rank. More is a slip, and may be more than the system starts.
inline constexpr int64_t kMostThreads = 4096;

// --threads N|auto: of each rank.
void AddThreadsSetting(Table& table);

// Of settings that are times, a year: clocks count nanoseconds in 64 bits.
inline constexpr int64_t kMostSeconds = 31'536'000;

// --comm-timeout, by default a minute.
void AddTimeoutSetting(absl::Duration& timeout, Table& table);

// --output (-o) and --output-stderr (-oe): the form of the command's rows, "table" or what
// bench::TableFormOf reads.
void AddFormSettings(Table& table);

// -q, --quiet.
void AddQuietSetting(const std::string& text, Table& table);

// --config FILE.json: what LoadConfigFile reads. `text` is for the help.
void AddConfigSetting(const std::string& text, Table& table);

// --color WHEN: what LoadFlags and LoadSettings give to SetColor.
void AddColorSetting(Table& table);

// --color, --print-config and --help.
void AddHelpSettings(Table& table);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_COMMON_SETTINGS_H_
