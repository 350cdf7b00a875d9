#include "moe/report/labels.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

namespace moe::report {

std::vector<std::string> DistinctLabels(const std::vector<std::vector<std::string>>& parts) {
  std::vector<bool> differs(parts.empty() ? 0 : parts.front().size());
  for (size_t i = 0; i < differs.size(); ++i) {
    differs[i] = std::any_of(parts.begin(), parts.end(),
                             [&](const auto& entry) { return entry[i] != parts.front()[i]; });
  }
  std::vector<std::string> labels;
  for (const auto& entry : parts) {
    std::string label;
    for (size_t i = 0; i < entry.size(); ++i) {
      if (!differs[i] || entry[i].empty()) continue;
      absl::StrAppend(&label, label.empty() ? "" : " · ", entry[i]);
    }
    const auto first = std::find_if(entry.begin(), entry.end(),
                                    [](const std::string& text) { return !text.empty(); });
    labels.push_back(label.empty() && first != entry.end() ? *first : label);
  }
  return labels;
}

}  // namespace moe::report
