// Names of series: what tells them apart, and no more.
#ifndef MOE_MOE_REPORT_LABELS_H_
#define MOE_MOE_REPORT_LABELS_H_

#include <string>
#include <vector>

namespace moe::report {

// One name per entry of `parts`, which all have the same number of texts: those texts that are not
// the same in all entries, in their order, joined by " · ". Where nothing differs, the first
// text that is not empty.
std::vector<std::string> DistinctLabels(const std::vector<std::vector<std::string>>& parts);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_LABELS_H_
