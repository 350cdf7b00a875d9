// Ways to lay one problem out over ranks, and the table of what varies between them.
#ifndef MOE_MOE_CLI_VERIFY_AXES_H_
#define MOE_MOE_CLI_VERIFY_AXES_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "comm/create.h"
#include "dispatch/dispatcher.h"
#include "moe/cli/measure/tables.h"
#include "moe/pipeline/schedule.h"
#include "moe/recompute/recompute.h"
#include "moe/zero/state_placement.h"

namespace moe::verify {

struct Layout {
  int ranks = 1;
  int expert_parallel = 1;
  Backend transport = Backend::kLocal;
  DispatchAlgorithm dispatch = DispatchAlgorithm::kStaged;
  int overlap = 1;
  // Belongs to the problem, not to the layout; it is here because --layouts sets it, too.
  std::optional<double> capacity;
  // Of a model alone: one layer has neither stages nor an optimiser.
  int tensor = 1, expert_tensor = 1, pipeline = 1, chunks = 1;
  ScheduleKind schedule = ScheduleKind::k1F1B;
  ZeroStage zero = ZeroStage::kNone;
  std::string offload = "none";  // as ParseOffload reads it
  Recompute recompute = Recompute::kNone;

  // Ranks that stand for one host in hierarchical dispatch: EP's largest divisor below it.
  int node_size() const;
  bool operator==(const Layout&) const = default;
};
// "4 ranks ep 2 local staged overlap 1 cf none", and of a model what is not as in Layout(): "tp 2
// pp 2 schedule zb-h1 zero 2".
std::string Describe(const Layout& layout);
// "none" or the number.
std::string CapacityText(const std::optional<double>& capacity);

// A row of the table: a field of a layout, with its names, values and rules.
struct Axis {
  const char* name;                 // name in --layouts and of a column in machine-readable forms
  std::vector<std::string> values;  // values that a run takes; at first the default
  std::vector<std::string> words;   // all possible values; empty for numbers
  std::vector<std::string> all;     // values that the word "all" stands for; empty: no such word
  // Sets the field. kInvalidArgument: what was expected of the value.
  std::function<absl::Status(const std::string& value, Layout& layout)> apply;
  std::function<std::string(const Layout& layout)> text;  // may be empty
  std::function<measure::Cell(const Layout& layout)> cell;
  // Whether the field's value may follow those of the rows above; nullptr: it always may.
  bool (*valid)(const Layout& layout) = nullptr;
  bool of_model = false;  // divides a model; has one value until others are asked for
  bool named = false;     // whether the values were asked for
};
const std::vector<Axis>& Axes();
// Row `name`, which must be there.
Axis& Find(std::vector<Axis>& axes, absl::string_view name);

// All valid combinations of the rows' values, which `apply` must take; the last row varies fastest.
std::vector<Layout> AllLayouts(absl::Span<const Axis> axes);

// A part of AllLayouts in which every pair of values of two axes that occurs there occurs, too.
// Greedy: the layout with the most pairs not yet covered, the first of equals. (Pairwise testing:
// Cohen et al., "The AETG System", IEEE TSE 1997.)
std::vector<Layout> PairwiseLayouts(absl::Span<const Axis> axes);

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_AXES_H_
