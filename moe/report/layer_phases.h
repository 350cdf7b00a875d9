// Time of a layer's passes by phase, from the rows of moe bench layer.
#ifndef MOE_MOE_REPORT_LAYER_PHASES_H_
#define MOE_MOE_REPORT_LAYER_PHASES_H_

#include <string>

#include <absl/types/span.h>

#include "moe/report/rows.h"

namespace moe::report {

// A bar per run, setting and pass; the last part is what the whole pass takes beyond its phases.
// Empty without such rows.
std::string LayerPhases(absl::Span<const Run> runs);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_LAYER_PHASES_H_
