// CheckTiling: a line sweeps over the rows of a tensor and knows the boxes that it crosses.
#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <map>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/checkpoint/manifest.h"

namespace moe {
namespace {

// The boxes of one state, ascending by first row, then first column.
class Sweep {
 public:
  Sweep(const ManifestTensor& tensor, std::string name) : tensor_(tensor), name_(std::move(name)) {}

  absl::Status Add(const TensorBox& box) {
    MOE_RETURN_IF_ERROR(MoveTo(box.row_begin));
    const auto after = crossed_.lower_bound(box.col_begin);
    if (after != crossed_.end() && after->second.col_begin < box.col_end) {
      return Overlap(after->second, box);
    }
    if (after != crossed_.begin() && std::prev(after)->second.col_end > box.col_begin) {
      return Overlap(std::prev(after)->second, box);
    }
    crossed_.emplace_hint(after, box.col_begin, box);
    covered_cols_ += box.col_end - box.col_begin;
    ends_.emplace(box.row_end, box.col_begin);
    return absl::OkStatus();
  }

  absl::Status Finish() { return MoveTo(tensor_.rows); }

 private:
  // Rows up to `row` have all their boxes; takes out those that end there or before.
  absl::Status MoveTo(int64_t row) {
    while (row_ < row) {
      const int64_t end = ends_.empty() ? row : std::min(row, ends_.top().first);
      if (covered_cols_ < tensor_.cols) return Gap(end);
      row_ = end;
      while (!ends_.empty() && ends_.top().first == row_) {
        const auto ended = crossed_.find(ends_.top().second);
        covered_cols_ -= ended->second.col_end - ended->second.col_begin;
        crossed_.erase(ended);
        ends_.pop();
      }
    }
    return absl::OkStatus();
  }

  absl::Status Overlap(const TensorBox& one, const TensorBox& other) const {
    return absl::DataLossError(
        absl::StrCat(name_, ": boxes ", BoxText(one), " and ", BoxText(other), " overlap"));
  }

  absl::Status Gap(int64_t row_end) const {
    TensorBox gap = {.row_begin = row_, .row_end = row_end, .col_end = tensor_.cols};
    for (const auto& [col_begin, box] : crossed_) {
      if (col_begin > gap.col_begin) {
        gap.col_end = col_begin;
        break;
      }
      gap.col_begin = box.col_end;
    }
    return absl::DataLossError(absl::StrCat(name_, ": no box has ", BoxText(gap)));
  }

  using End = std::pair<int64_t, int64_t>;  // row, first column

  const ManifestTensor& tensor_;
  const std::string name_;
  int64_t row_ = 0;
  int64_t covered_cols_ = 0;
  std::map<int64_t, TensorBox> crossed_;  // by first column
  std::priority_queue<End, std::vector<End>, std::greater<>> ends_;
};

}  // namespace

absl::Status CheckTiling(absl::string_view file, const CheckpointManifest& manifest) {
  auto box = manifest.boxes.begin();
  for (size_t t = 0; t < manifest.tensors.size(); ++t) {
    const ManifestTensor& tensor = manifest.tensors[t];
    for (size_t s = 0; s < tensor.states.size(); ++s) {
      Sweep sweep(tensor, absl::StrCat(file, ": tensor '", tensor.name, "' ", tensor.states[s]));
      for (; box != manifest.boxes.end() && static_cast<size_t>(box->tensor) == t &&
             static_cast<size_t>(box->state) == s;
           ++box) {
        MOE_RETURN_IF_ERROR(sweep.Add(box->box));
      }
      MOE_RETURN_IF_ERROR(sweep.Finish());
    }
  }
  return absl::OkStatus();
}

}  // namespace moe
