#include "moe/cli/base/common_settings.h"

#include "moe/cli/base/choices.h"

namespace moe::cli {

void AddRankSettings(Table& table) {
  table
      .Add("--ranks R", {Kind::kInteger, "4"},
           "threads of this process; under mpirun its size, which R must equal if given")
      .Roles(kOfLayer | kAlwaysTold | kInRow);
  table
      .Add("--backend NAME", {Kind::kWord, "auto", {"auto", "local", "mpi", "nccl"}},
           "local: threads; mpi: processes; nccl: a GPU each, threads or under a launcher "
           "processes; auto: mpi under mpirun, nccl under torchrun, else local")
      .Roles(kPlacement | kInRow);
  AddDeviceSetting(table);
}

void AddDeviceSetting(Table& table) {
  table
      .Add("--device NAME", {Kind::kWord, "cpu", WordsOf(kDevices)},
           "cuda needs a build with CUDA and a GPU")
      .Roles(kOfLayer | kInRow);
}

void AddShareDeviceSetting(Table& table) {
  table
      .Add("--share-device", Kind::kSwitch,
           "with --device cuda: more ranks than GPUs, which take them in turn")
      .Roles(kPlacement);
}

void AddThreadsSetting(Table& table) {
  table
      .Add("--threads N|auto", {Kind::kInteger, "auto", {"auto"}},
           "of each rank; auto = cores / ranks of this machine, at least 1")
      .Most(kMostThreads)
      .Roles(kOfLayer);
}

void AddTimeoutSetting(absl::Duration& timeout, Table& table) {
  timeout = absl::Minutes(1);
  table
      .Add("--comm-timeout SECONDS", &timeout,
           "a rank that waits longer than this without progress gives up (exit 8); at start "
           "60 s at least")
      .Most(kMostSeconds)
      .Above(0)
      .Roles(kPlacement | kInRow);
}

void AddFormSettings(Table& table) {
  const std::vector<std::string> forms = {"table", "csv", "json", "jsonl", "md"};
  table.Add("-o, --output FORM", {Kind::kWord, "table", forms}, "of the rows on standard output")
      .Roles(kInRow);
  table
      .Add("--output-stderr FORM", {Kind::kWord, "", forms},
           "-oe FORM: this form on standard error, beside the other")
      .Roles(kInRow);
}

void AddQuietSetting(const std::string& text, Table& table) {
  table.Add("-q, --quiet", Kind::kSwitch, text).Roles(kOfOneRun | kInRow);
}

void AddConfigSetting(const std::string& text, Table& table) {
  table.Add("--config FILE.json", Kind::kText, text).FlagOnly().Roles(kOfOneRun);
}

void AddColorSetting(Table& table) {
  table
      .Add("--color WHEN", {Kind::kWord, "auto", {"auto", "always", "never"}},
           "of errors, verdicts and progress; auto: on a terminal, unless NO_COLOR is set")
      .Roles(kOfOneRun | kInRow);
}

void AddHelpSettings(Table& table) {
  AddColorSetting(table);
  table.Add("--print-config", Kind::kSwitch, "print every setting and where it came from, and stop")
      .FlagOnly()
      .Roles(kOfOneRun);
  table.Add("-h, --help", Kind::kSwitch, "print this and stop").FlagOnly().Roles(kOfOneRun);
}

}  // namespace moe::cli
