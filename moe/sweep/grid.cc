#include "moe/sweep/grid.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

namespace moe::sweep {

absl::StatusOr<std::vector<std::vector<std::string>>> CrossProduct(absl::Span<const Axis> axes) {
  int64_t count = 1;
  for (const Axis& axis : axes) {
    count *= static_cast<int64_t>(axis.values.size());
    if (count <= kMostPoints) continue;
    const std::string sizes = absl::StrJoin(axes, " x ", [](std::string* out, const Axis& a) {
      absl::StrAppend(out, a.values.size(), " of --", a.name);
    });
    return absl::InvalidArgumentError(
        absl::StrCat("the sweep has ", sizes, " points, expected at most ", kMostPoints));
  }
  std::vector<std::vector<std::string>> points(count);
  for (int64_t i = 0; i < count; ++i) {
    points[i].resize(axes.size());
    int64_t rest = i;
    for (size_t a = axes.size(); a-- > 0;) {
      const auto size = static_cast<int64_t>(axes[a].values.size());
      points[i][a] = axes[a].values[rest % size];
      rest /= size;
    }
  }
  return points;
}

}  // namespace moe::sweep
