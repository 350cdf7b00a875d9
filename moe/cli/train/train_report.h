// Text that `moe train` prints before and after training, and how fast its communication was beside
// what a benchmark of the same sizes reaches.
#ifndef MOE_MOE_CLI_TRAIN_TRAIN_REPORT_H_
#define MOE_MOE_CLI_TRAIN_TRAIN_REPORT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "moe/cli/base/train_options.h"
#include "moe/lm/training_loop.h"
#include "moe/plan/memory.h"

namespace moe::cli {

// Where the ranks run, for people: "4 ranks, threads of this process".
struct RunFacts {
  std::string backend;             // "local", "mpi"
  std::string command;             // reproduces the run
  std::vector<std::string> files;  // written
};

// One rank's communication of one kind over a whole run.
struct CommRate {
  std::string name;
  int64_t calls = 0;
  int64_t size_bytes = 0;   // mean size of a call, its own part included
  int64_t moved_bytes = 0;  // bytes that left the rank, all calls
  double seconds = 0;       // in training's phases; mean over ranks
  // Seconds of as many calls in a benchmark: shortest call times calls.
  double bench_seconds = 0;
};

// Benchmarks an exchange of tokens (alltoallv, uniform, the run's dispatch) inside each
// expert-parallel group, all groups at once, and all-reduces of the mean size of the buckets of
// replicated and of expert parameters. Leaves out groups without a second rank. Takes some tens of
// milliseconds: at most 10 calls of each, fewer of large ones. Collective over `world`; blocks.
// Rank 0's result is the one that is reported; every rank returns its own.
absl::StatusOr<std::vector<CommRate>> MeasurePeak(const lm::TrainConfig& config,
                                                  const lm::TrainReport& report,
                                                  std::unique_ptr<Communicator> world);

// The rates as a table for the end report; empty without rates.
std::string PeakText(const std::vector<CommRate>& rates);

// Lines before training: text read, model, mesh, step.
std::string StartText(const TrainOptions& options, const lm::Corpus& corpus,
                      const std::string& backend);

// What a rank will use (MemoryEstimate::used_bytes), of `local_ranks` on this machine, before
// training: lines, or an object on one line with rank_bytes, state_bytes, activation_bytes,
// workspace_bytes, local_ranks and available_bytes (null: unknown).
std::string MemoryText(const plan::MemoryEstimate& estimate, int local_ranks);
std::string MemoryJson(const plan::MemoryEstimate& estimate, int local_ranks);

// The end report as an object on one line: that of the metrics' last line, and
//   communication [{name, calls, size_bytes, moved_bytes, seconds, bench_seconds}], files, command
std::string ReportJson(const lm::TrainReport& report, const RunFacts& facts,
                       const std::vector<CommRate>& rates);

// The end report, as tables.
std::string ReportText(const TrainOptions& options, const lm::TrainReport& report,
                       const RunFacts& facts);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_TRAIN_REPORT_H_
