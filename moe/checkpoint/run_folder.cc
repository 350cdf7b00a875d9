#include "moe/checkpoint/run_folder.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/time/clock.h>

#include "comm/agreed_status.h"
#include "comm/clock_offset.h"
#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/io/file.h"

namespace moe {
namespace {

// What a rank found out, as it lies in memory.
struct Card {
  int64_t sees = 0;
  std::array<char, 64> host = {};
};

absl::StatusOr<std::vector<Card>> GatherCards(bool sees, Communicator& world, Stream& stream) {
  Card mine = {.sees = sees ? 1 : 0};
  HostName().copy(mine.host.data(), mine.host.size() - 1);
  std::vector<Card> cards(world.size());
  MOE_RETURN_IF_ERROR(world.AllGather<uint8_t>(
      {reinterpret_cast<const uint8_t*>(&mine), sizeof(mine)},
      {reinterpret_cast<uint8_t*>(cards.data()), cards.size() * sizeof(Card)}, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return cards;
}

// "ranks 2, 3 on host b and rank 5 on host c", of the ranks that do not see the folder.
std::string Blind(absl::Span<const Card> cards) {
  std::map<std::string, std::vector<size_t>> hosts;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    if (cards[rank].sees == 0) hosts[cards[rank].host.data()].push_back(rank);
  }
  return absl::StrJoin(hosts, " and ", [](std::string* out, const auto& host) {
    absl::StrAppend(out, host.second.size() == 1 ? "rank " : "ranks ",
                    absl::StrJoin(host.second, ", "), " on host ", host.first);
  });
}

absl::Status CannotWrite(const absl::Status& status) {
  return WithFileFault(status, FileFault::kWrite);
}

std::string MiB(int64_t bytes, int64_t count = 1) {
  return absl::StrFormat("%.1f MiB",
                         static_cast<double>(bytes) * static_cast<double>(count) / 0x1p20);
}

}  // namespace

absl::StatusOr<std::unique_ptr<RunFolder>> RunFolder::Open(const RunFolderOptions& options,
                                                           Communicator& world, Stream& stream) {
  auto folder = std::unique_ptr<RunFolder>(new RunFolder(options, world.rank()));
  MOE_RETURN_IF_ERROR(folder->Take(world, stream));
  MOE_RETURN_IF_ERROR(folder->ShareRun(world, stream));
  MOE_RETURN_IF_ERROR(folder->Prove(world, stream));
  return folder;
}

// A rank that waits tells the others that it is there, so that no deadline of theirs passes.
absl::Status RunFolder::Take(Communicator& world, Stream& stream) {
  constexpr absl::Duration kBetweenLooks = absl::Milliseconds(100);
  absl::Status mine;
  int64_t waits = 0;
  do {
    if (waits > 0 && rank_ == 0) absl::SleepFor(std::min(kBetweenLooks, options_.beat / 4));
    if (rank_ == 0) {
      mine = Caught([&] {
        if (waits == 0) MOE_RETURN_IF_ERROR(MakeFolders(options_.folder, *options_.files));
        if (waits == 0) {
          lock_ = std::make_shared<RunLock>(options_.folder, options_.beat, *options_.files);
        }
        MOE_ASSIGN_OR_RETURN(const bool taken, lock_->TryTake());
        waits = taken ? 0 : 1;
        return absl::OkStatus();
      });
      if (!mine.ok()) waits = 0;
    }
    MOE_RETURN_IF_ERROR(world.Broadcast<int64_t>({&waits, 1}, 0, stream));
    MOE_RETURN_IF_ERROR(stream.Synchronize());
  } while (waits > 0);
  if (mine.ok() && rank_ == 0) {
    run_ = lock_->run();
    mine = WriteProbe();
  }
  if (!absl::IsInvalidArgument(mine)) mine = CannotWrite(mine);
  return AgreedStatus(mine, world, stream);
}

absl::Status RunFolder::ShareRun(Communicator& world, Stream& stream) {
  run_.resize(16);
  MOE_RETURN_IF_ERROR(
      world.Broadcast<uint8_t>({reinterpret_cast<uint8_t*>(run_.data()), run_.size()}, 0, stream));
  return stream.Synchronize();
}

absl::Status RunFolder::Prove(Communicator& world, Stream& stream) {
  // Others wait for a rank that does not see the folder.
  const absl::Duration patience = std::min(options_.sight, world.timeout() / 4);
  const bool sees = rank_ == 0 || Sees(patience);
  absl::Status mine;
  if (sees && rank_ > 0) mine = WriteProbe();
  MOE_ASSIGN_OR_RETURN(const std::vector<Card> cards, GatherCards(sees, world, stream));
  if (sees && mine.ok()) (void)options_.files->Unlink(ProbePath(rank_));
  if (!mine.ok()) {
    mine = CannotWrite(
        absl::Status(mine.code(), absl::StrCat(mine.message(), ", on host ", HostName())));
  }
  // Of two that took over one lock at the same time, the first has lost it by now.
  if (rank_ == 0) {
    const absl::Status held = lock_->CheckHeld();
    if (!held.ok()) mine = absl::InvalidArgumentError(held.message());
  }
  if (const std::string blind = Blind(cards); rank_ == 0 && !blind.empty()) {
    mine = absl::InvalidArgumentError(absl::StrCat(blind, " cannot see what rank 0 on host ",
                                                   HostName(), " writes to '", options_.folder,
                                                   "', expected one folder that all ranks share"));
  }
  return AgreedStatus(mine, world, stream);
}

// A name that no host has looked for before, so that none remembers that it is not there.
std::string RunFolder::ProbePath(int rank) const {
  return absl::StrCat(options_.folder, "/", kProbePrefix, run_, "-", rank);
}

bool RunFolder::Sees(absl::Duration patience) const {
  constexpr absl::Duration kBetweenLooks = absl::Milliseconds(50);
  const absl::Time end = absl::Now() + patience;
  for (;;) {
    SmallFile probe;
    if (!options_.files->ReadSmall(ProbePath(0), probe)) return probe.text == run_;
    if (absl::Now() >= end) return false;
    absl::SleepFor(kBetweenLooks);
  }
}

absl::Status RunFolder::WriteProbe() const {
  int file = -1;
  const std::string path = ProbePath(rank_);
  std::error_code error = CreateText(path, run_, *options_.files, file);
  if (!error) {
    error = options_.files->Close(file);
    if (error) (void)options_.files->Unlink(path);
  }
  return StatusOf(error, "write", path);
}

absl::Status RunFolder::CheckRoom(int64_t my_bytes, int64_t count, Communicator& world,
                                  Stream& stream) {
  int64_t bytes = my_bytes;
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&bytes, 1}, ReduceOp::kSum, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  absl::Status mine;
  if (rank_ == 0) {
    int64_t free = 0;
    const std::error_code error = options_.files->FreeBytes(options_.folder, free);
    if (error) {
      mine = StatusOf(error, "find out what is free in", options_.folder);
    } else if (free / std::max<int64_t>(count, 1) < bytes) {
      mine = absl::UnavailableError(absl::StrCat(
          "'", options_.folder, "' needs ", MiB(bytes, count), " for ", count,
          count == 1 ? " checkpoint" : " more checkpoints", " of ", MiB(bytes), ", free ",
          MiB(free), ": expected room for those that stay (--checkpoint-keep) and one more"));
    }
  }
  return AgreedStatus(CannotWrite(mine), world, stream);
}

int64_t CheckpointsToCome(int64_t there, int64_t saves, int64_t keep) {
  return std::min(saves, std::max<int64_t>(1, keep + 1 - there));
}

}  // namespace moe
