#include "moe/train/non_finite.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "comm/extremes.h"
#include "kernels/base/finite.h"
#include "kernels/base/status_macros.h"
#include "moe/run/finite.h"

namespace moe {

absl::StatusOr<NonFiniteReport> FirstOverRanks(NonFiniteReport mine, Communicator& world,
                                               Stream& stream, const Site& site) {
  MOE_ASSIGN_OR_RETURN(const auto orders, ExtremesOverRanks({mine.order}, world, stream, site));
  const int64_t least = orders[0].least;
  if (least == FirstNonFinite::kNone) return NonFiniteReport{least, ""};
  MOE_ASSIGN_OR_RETURN(
      const auto ranks,
      ExtremesOverRanks({mine.order == least ? world.rank() : world.size()}, world, stream, site));
  const auto first = static_cast<int>(ranks[0].least);
  auto length = std::ssize(mine.text);
  MOE_RETURN_IF_ERROR(world.Broadcast<int64_t>({&length, 1}, first, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  mine.text.resize(static_cast<size_t>(length));
  const absl::Span<uint8_t> letters(reinterpret_cast<uint8_t*>(mine.text.data()), mine.text.size());
  MOE_RETURN_IF_ERROR(world.Broadcast<uint8_t>(letters, first, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return NonFiniteReport{least, std::move(mine.text)};
}

absl::Status WithWeight(const absl::Status& status, const ParameterStore& store,
                        const Context& context) {
  if (!absl::IsDataLoss(status) || OnCuda(context)) return status;
  for (const auto& parameter : store.parameters()) {
    const absl::Span<const float> weights = parameter->master();
    if (CountNonFinite(weights.data(), std::ssize(weights)) == 0) continue;
    return absl::DataLossError(absl::StrCat(status.message(), "; a weight of '",
                                            parameter->spec().name,
                                            "' on that rank is not finite either"));
  }
  return status;
}

}  // namespace moe
