// Bandwidth between every two ranks, from the rows of moe bench p2p.
#ifndef MOE_MOE_REPORT_PAIR_MAPS_H_
#define MOE_MOE_REPORT_PAIR_MAPS_H_

#include <string>

#include <absl/types/span.h>

#include "moe/report/rows.h"

namespace moe::report {

// A map per run and setting, of its largest size: GB/s from every rank to every other. Empty
// without such rows.
std::string PairMaps(absl::Span<const Run> runs);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_PAIR_MAPS_H_
