// What `moe train` says before and after training.
#ifndef MOE_MOE_CLI_TRAIN_TRAIN_REPORT_H_
#define MOE_MOE_CLI_TRAIN_TRAIN_REPORT_H_

#include <string>
#include <vector>

#include "moe/cli/train/comm_peak.h"
#include "moe/cli/train/train_options.h"
#include "moe/lm/trainer.h"

namespace moe::cli {

// Where the ranks run, for people: "4 ranks, threads of this process".
struct RunFacts {
  std::string backend;             // "local", "mpi"
  std::string command;             // reproduces the run
  std::vector<std::string> files;  // written
};

// Lines before training: text read, model, mesh, step.
std::string StartText(const TrainOptions& options, const lm::Corpus& corpus,
                      const std::string& backend);

// The end report as an object on one line: that of the metrics' last line, and
//   communication [{name, calls, size_bytes, moved_bytes, seconds, bench_seconds}], files, command
std::string ReportJson(const lm::TrainReport& report, const RunFacts& facts,
                       const std::vector<CommRate>& rates);

// The end report, as tables.
std::string ReportText(const TrainOptions& options, const lm::TrainReport& report,
                       const RunFacts& facts);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_TRAIN_REPORT_H_
