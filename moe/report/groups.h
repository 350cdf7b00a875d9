// Rows that belong together.
#ifndef MOE_MOE_REPORT_GROUPS_H_
#define MOE_MOE_REPORT_GROUPS_H_

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace moe::report {

// What rows are, as texts; DistinctLabels makes names of them.
using Key = std::vector<std::string>;

// Groups by their key, in the order of first appearance. Group has a member `key`.
template <typename Group>
class Groups {
 public:
  // Of `key`, made if it is the first. Valid until the next call. O(log n).
  Group& Of(Key key) {
    const auto [at, is_new] = index_.emplace(std::move(key), groups_.size());
    if (is_new) groups_.emplace_back().key = at->first;
    return groups_[at->second];
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

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_GROUPS_H_
