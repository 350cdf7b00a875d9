#include "moe/cli/common_settings.h"

namespace moe::cli {

void AddRankSettings(const std::string& group, std::vector<Setting>& table) {
  table.insert(table.end(),
               {{group, "ranks", "", 0, Kind::kInteger, "R", "4",
                 "threads of this process; under mpirun its size, which R must equal if given"},
                {group,
                 "backend",
                 "",
                 0,
                 Kind::kWord,
                 "NAME",
                 "auto",
                 "local: threads; mpi: processes; nccl: a GPU each, threads or under a launcher "
                 "processes; auto: mpi under mpirun, nccl under torchrun, else local",
                 {"auto", "local", "mpi", "nccl"}}});
  AddDeviceSetting(group, table);
}

void AddDeviceSetting(const std::string& group, std::vector<Setting>& table) {
  table.push_back({group,
                   "device",
                   "",
                   0,
                   Kind::kWord,
                   "NAME",
                   "cpu",
                   "cuda needs a build with CUDA and a GPU",
                   {"cpu", "cuda"}});
}

void AddShareDeviceSetting(const std::string& group, std::vector<Setting>& table) {
  table.push_back({group, "share-device", "", 0, Kind::kSwitch, "", "",
                   "with --device cuda: more ranks than GPUs, which take them in turn"});
}

DType ComputeTypeOf(const Settings& settings) {
  if (settings.is("dtype", "bf16")) return DType::kBFloat16;
  return settings.is("dtype", "f16") ? DType::kFloat16 : DType::kFloat32;
}

void AddThreadsSetting(const std::string& group, std::vector<Setting>& table) {
  table.push_back({group,
                   "threads",
                   "",
                   0,
                   Kind::kInteger,
                   "N|auto",
                   "auto",
                   "of each rank; auto = cores / ranks of this machine, at least 1",
                   {"auto"},
                   false,
                   kMostThreads});
}

void AddTimeoutSetting(const std::string& group, std::vector<Setting>& table) {
  table.push_back(
      {group,
       "comm-timeout",
       "",
       0,
       Kind::kReal,
       "SECONDS",
       "60",
       "a rank that waits longer than this without progress gives up (exit 8); at start "
       "60 s at least",
       {},
       false,
       kMostSeconds});
}

void AddFormSettings(const std::string& group, std::vector<Setting>& table) {
  const std::vector<std::string> forms = {"table", "csv", "json", "jsonl", "md"};
  table.insert(table.end(), {{group, "output", "", 'o', Kind::kWord, "FORM", "table",
                              "of the rows on standard output", forms},
                             {group, "output-stderr", "", 0, Kind::kWord, "FORM", "",
                              "-oe FORM: this form on standard error, beside the other", forms}});
}

void AddColorSetting(const std::string& group, std::vector<Setting>& table) {
  table.push_back({group,
                   "color",
                   "",
                   0,
                   Kind::kWord,
                   "WHEN",
                   "auto",
                   "auto: on a terminal, unless NO_COLOR is set",
                   {"auto", "always", "never"}});
}

void AddConfigSetting(const std::string& group, const std::string& text,
                      std::vector<Setting>& table) {
  table.push_back({group, "config", "", 0, Kind::kText, "FILE.json", "", text, {}, true});
}

void AddHelpSettings(const std::string& group, std::vector<Setting>& table) {
  table.insert(table.end(),
               {{group,
                 "print-config",
                 "",
                 0,
                 Kind::kSwitch,
                 "",
                 "",
                 "print every setting and where it came from, and stop",
                 {},
                 true},
                {group, "help", "", 'h', Kind::kSwitch, "", "", "print this and stop", {}, true}});
}

}  // namespace moe::cli
