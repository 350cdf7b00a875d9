// Searches the layouts of a training step for those that fit and are predicted fastest.
#ifndef MOE_MOE_PLAN_MESH_SEARCH_H_
#define MOE_MOE_PLAN_MESH_SEARCH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "kernels/base/choice.h"
#include "moe/lm/training_loop.h"
#include "moe/plan/layout.h"
#include "moe/plan/machine.h"
#include "moe/plan/memory.h"
#include "moe/plan/step_time.h"

namespace moe::plan {

enum class Goal : uint8_t {
  kThroughput,  // least predicted step time
  kFits,        // least memory
};
inline constexpr Choice<Goal> kGoalWords[] = {{"throughput", Goal::kThroughput},
                                              {"fits", Goal::kFits}};

struct SearchOptions {
  // Model, types, numerics, leaves of trees (TP and ETP are at most their number), sequence length.
  // Its layout, micro-batches and micro_batch_size are what is searched.
  lm::TrainConfig base;
  int ranks = 1;
  int64_t sequences = 1;  // of a step, over all ranks
  Machine machine;        // memory_bytes is the limit of a rank
  Goal goal = Goal::kThroughput;
  // Of every layout, where the step's bits are not to change; 0: what is searched.
  int64_t micro_batch_size = 0;
  // Whether a layout is one to be searched; empty: all.
  std::function<bool(const Layout&)> takes = {};
  // Workload::row_skew of an EP; empty: even.
  std::function<double(int expert)> row_skew = {};
};

struct Candidate {
  Layout layout;
  Workload work;
  StepTime time;
  MemoryEstimate memory;

  double tokens_per_s() const { return work.tokens() / time.total(); }
};

struct SearchResult {
  // The best layout of each mesh of which one fits, the best first; equal ones by their degrees.
  std::vector<Candidate> fitting;
  // Of each mesh of which none fits, the layout with the least memory, the least first.
  std::vector<Candidate> too_big;
  int64_t candidates = 0;  // layouts that were predicted
  // Layouts to be searched that cannot run, by the flag that is refused, or by the reason.
  struct Refused {
    int64_t layouts = 0;
    std::string first;  // message of the first of them
  };
  std::map<std::string, Refused> refused;
};

// Searched: PP that divides the ranks, TP and ETP of 2^n, EP of a stage's ranks, schedules 1F1B,
// zero bubble and interleaved with up to 8 chunks, micro-batches of 2^n sequences, ZeRO,
// recomputation.
// Deterministic. Cost: some microseconds a candidate. kInvalidArgument: the model is refused.
absl::StatusOr<SearchResult> SearchMeshes(const SearchOptions& options);

// Sets the fields of a layout in the configuration of a run.
void SetLayout(const Layout& layout, const Workload& work, lm::TrainConfig& config);

// What such a run does, of `ranks` ranks, and its layout.
Workload WorkloadOf(const lm::TrainConfig& config, int ranks);
Layout LayoutOf(const lm::TrainConfig& config);

// The kind of memory that takes most: "optimiser", with its bytes.
std::pair<const char*, double> MostMemory(const MemoryEstimate& memory);

// The least number of ranks, `ranks` times a power of two up to 4096, on which a layout fits.
std::optional<int> RanksThatFit(SearchOptions options);

}  // namespace moe::plan

#endif  // MOE_MOE_PLAN_MESH_SEARCH_H_
