// Rows that stand in the tables of several commands.
#ifndef MOE_MOE_CLI_COMMON_SETTINGS_H_
#define MOE_MOE_CLI_COMMON_SETTINGS_H_

#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "moe/cli/settings.h"

namespace moe::cli {

// --ranks, --backend and --device: what PlanLaunch reads.
void AddRankSettings(const std::string& group, std::vector<Setting>& table);

// --device alone, of commands that place their ranks themselves: what DeviceOf reads.
void AddDeviceSetting(const std::string& group, std::vector<Setting>& table);

// --share-device: what CheckDevices reads.
void AddShareDeviceSetting(const std::string& group, std::vector<Setting>& table);

// What --dtype says.
DType ComputeTypeOf(const Settings& settings);

// Of a rank. More is a slip, and may be more than the system starts.
inline constexpr int64_t kMostThreads = 4096;

// --threads N|auto: of each rank.
void AddThreadsSetting(const std::string& group, std::vector<Setting>& table);

// Of settings that are times, a year: clocks count nanoseconds in 64 bits.
inline constexpr int64_t kMostSeconds = 31'536'000;

// --comm-timeout.
void AddTimeoutSetting(const std::string& group, std::vector<Setting>& table);

// --output (-o) and --output-stderr (-oe): the form of the command's rows, "table" or what
// bench::TableFormOf reads.
void AddFormSettings(const std::string& group, std::vector<Setting>& table);

// --color WHEN: what StderrTerminal reads.
void AddColorSetting(const std::string& group, std::vector<Setting>& table);

// --config FILE.json: what LoadConfigFile reads. `text` is for the help.
void AddConfigSetting(const std::string& group, const std::string& text,
                      std::vector<Setting>& table);

// --print-config and --help.
void AddHelpSettings(const std::string& group, std::vector<Setting>& table);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_COMMON_SETTINGS_H_
