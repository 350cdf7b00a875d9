#include "moe/checkpoint/shared_work.h"

#include <cstdint>
#include <memory>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <absl/time/time.h>

#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"

namespace moe {

absl::Status AwaitAllRanks(FileWork* mine, const SharedWork& shared) {
  const auto& [what, world, stream, site] = shared;
  constexpr absl::Duration kBetweenVotes = absl::Milliseconds(200),
                           kBetweenLines = absl::Minutes(1);
  const absl::Time begin = absl::Now();
  absl::Time next_line = begin + kBetweenLines;
  for (;;) {
    const bool busy = mine != nullptr && !mine->AwaitFor(kBetweenVotes);
    if (busy) MOE_RETURN_IF_ERROR(mine->Check());
    int64_t busy_ranks = busy ? 1 : 0;
    MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&busy_ranks, 1}, ReduceOp::kSum, stream, site));
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    if (busy_ranks == 0) return absl::OkStatus();
    const absl::Time now = absl::Now();
    if (world.rank() != 0 || now < next_line) continue;
    next_line = now + kBetweenLines;
    Log(LogLevel::kWarning,
        absl::StrCat(what, " is waited for since ",
                     absl::FormatDuration(absl::Trunc(now - begin, absl::Seconds(1))), ": ",
                     busy_ranks, " of ", world.size(), " ranks are busy"));
  }
}

absl::Status RunOnRanks(FileWork::Options options, FileWork::Work work, const SharedWork& shared,
                        absl::Status& result) {
  std::unique_ptr<FileWork> mine;
  result = absl::OkStatus();
  if (work) {
    auto started = FileWork::Start(std::move(options), std::move(work));
    result = started.status();
    if (started.ok()) mine = *std::move(started);
  }
  MOE_RETURN_IF_ERROR(AwaitAllRanks(mine.get(), shared));
  if (mine != nullptr) result = mine->status();
  return absl::OkStatus();
}

}  // namespace moe
