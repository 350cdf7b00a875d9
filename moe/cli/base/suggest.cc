#include "moe/cli/base/suggest.h"

#include <algorithm>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

namespace moe::cli {

int EditDistance(absl::string_view a, absl::string_view b) {
  const size_t columns = b.size() + 1;
  std::vector<int> before(columns), last(columns), row(columns);
  for (size_t j = 0; j < columns; ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j < columns; ++j) {
      const int replace = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replace, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

std::string Nearest(absl::string_view word, const std::vector<std::string>& known) {
  int best = std::max<int>(2, static_cast<int>(word.size()) / 3) + 1;
  std::string nearest;
  for (const std::string& candidate : known) {
    // A short word is near everything: no more edits than half of what was meant.
    const int limit = std::min(best, static_cast<int>(candidate.size()) / 2 + 1);
    if (const int distance = EditDistance(word, candidate); distance < limit) {
      best = distance;
      nearest = candidate;
    }
  }
  if (!nearest.empty() || word.size() < 3) return nearest;
  for (const std::string& candidate : known) {
    if (absl::StrContains(candidate, word)) return candidate;
  }
  return "";
}

std::string DidYouMean(absl::string_view word, const std::vector<std::string>& known,
                       absl::string_view prefix, absl::string_view otherwise) {
  const std::string nearest = Nearest(word, known);
  if (nearest.empty()) return std::string(otherwise);
  return absl::StrCat("; did you mean '", prefix, nearest, "'?");
}

}  // namespace moe::cli
