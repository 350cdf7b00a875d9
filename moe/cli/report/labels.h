// Groups of rows that belong together, and names that distinguish them.
#ifndef MOE_MOE_CLI_REPORT_LABELS_H_
#define MOE_MOE_CLI_REPORT_LABELS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <absl/types/span.h>

#include "moe/cli/report/page.h"
#include "moe/cli/report/rows.h"

namespace moe::report {

// The properties of a row, as texts; DistinctLabels makes names of them.
using Key = std::vector<std::string>;

// Groups by their key, in the order of first appearance. Group has a member `key`.
template <typename Group>
class Groups {
 public:
  // The group of `key`, added if it is new. Valid until the next call. O(log n).
  Group& Of(Key key) { return groups_[IndexOf(std::move(key))]; }
  // Index of the group in the result of Take.
  size_t IndexOf(Key key) {
    const auto [at, is_new] = index_.emplace(std::move(key), groups_.size());
    if (is_new) groups_.emplace_back().key = at->first;
    return at->second;
  }
  std::vector<Group> Take() && { return std::move(groups_); }

 private:
  std::vector<Group> groups_;
  std::map<Key, size_t> index_;
};

template <typename Group>
std::vector<Key> KeysOf(const std::vector<Group>& groups) {
  std::vector<Key> keys;
  for (const Group& group : groups) keys.push_back(group.key);
  return keys;
}

// One name for each entry of `parts`, which all have the same number of texts: those texts that are
// not the same in all entries, in order, joined by " · ". If nothing differs, the first text that
// is not empty.
std::vector<std::string> DistinctLabels(const std::vector<Key>& parts);

// Everything that identifies the point of a row, its settings last: rows with equal keys are of the
// same point.
Key PointKey(const SweepRow& row);

// An axis that charts lay points along.
enum class Along : uint8_t { kCapacity, kExperts };
// The same without the value of that axis.
Key SeriesKey(const SweepRow& row, Along axis);

// The `moe train` line that trains the model of a row; empty for a row that was not trained. What
// text it reads a row does not say: "--data ...", "--tokens ..." where there is a --vocab-size.
std::string TrainLine(const SweepRow& row);
// The `moe sweep` line of rows, which name their flags in `settings`: flags that differ between
// them come first and have all their values. "..." stands for the default where some rows have it.
std::string SweepLine(absl::Span<const NamedRow<SweepRow>> rows);

// One name for each key, whose last text are settings: DistinctLabels of all texts except the
// settings. Keys with the same name also get the settings that differ between them: "E 8 · seed 1",
// "E 8 · seed default".
std::vector<std::string> PointLabels(const std::vector<Key>& keys);

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_LABELS_H_
