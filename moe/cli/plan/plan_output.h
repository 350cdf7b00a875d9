// Tables and rows of `moe plan`.
#ifndef MOE_MOE_CLI_PLAN_PLAN_OUTPUT_H_
#define MOE_MOE_CLI_PLAN_PLAN_OUTPUT_H_

#include <optional>
#include <string>
#include <vector>

#include "moe/cli/measure/tables.h"
#include "moe/plan/mesh_search.h"

namespace moe::cli {

// What training took.
struct MeasuredStep {
  double seconds = 0;     // the shortest step behind the first
  double peak_bytes = 0;  // of the rank with the most
};

// One layout, with the line that runs it.
struct PlanRow {
  plan::Candidate candidate;
  bool fits = true;
  std::string reason;  // why it does not
  std::string command;
  std::optional<MeasuredStep> measured = {};
};

// "2x1x8": PP, TP and EP; "2x1x8 ETP 2" where ranks share experts.
std::string MeshText(const MeshShape& mesh);

// "needs 120.4 GiB of 80.0, most of it 64.0 of optimiser".
std::string TooBigText(const plan::MemoryEstimate& memory, double limit_bytes);

measure::Fields PlanFields(const PlanRow& row, double limit_bytes);

// The table of layouts; activations with buffers and room to grow. ETP where one is above 1.
std::string PlanTable(const std::vector<PlanRow>& rows);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_PLAN_PLAN_OUTPUT_H_
