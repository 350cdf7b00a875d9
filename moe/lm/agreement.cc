#include "moe/lm/agreement.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include <absl/strings/str_cat.h>

#include "comm/extremes.h"
#include "kernels/base/status_macros.h"

namespace moe::lm {

absl::Status CheckAgreement(const std::vector<RunSetting>& settings, Communicator& world) {
  const auto stream = MakeInlineStream();
  std::vector<int64_t> values;
  for (const RunSetting& setting : settings) values.push_back(setting.value);
  MOE_ASSIGN_OR_RETURN(const auto extremes, ExtremesOverRanks(values, world, *stream));
  for (size_t i = 0; i < extremes.size(); ++i) {
    if (extremes[i].same()) continue;
    // The first rank of either value; all ranks are at the same i.
    const int64_t rank = world.rank(), none = std::numeric_limits<int64_t>::max();
    const int64_t has[] = {values[i] == extremes[i].least ? rank : none,
                           values[i] == extremes[i].most ? rank : none};
    MOE_ASSIGN_OR_RETURN(const auto ranks, ExtremesOverRanks(has, world, *stream));
    return absl::InvalidArgumentError(absl::StrCat(
        "ranks ", std::min(ranks[0].least, ranks[1].least), " and ",
        std::max(ranks[0].least, ranks[1].least), " were given a different ", settings[i].name,
        ", expected the same on all: as a flag, or in the environment of every host"));
  }
  return absl::OkStatus();
}

}  // namespace moe::lm
