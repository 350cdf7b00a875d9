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
#include "comm/hosts.h"
#include "comm/wait_report.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/shared_work.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/io/file.h"

namespace moe {
namespace {

constexpr Site kOpening = {.name = "folder of --save"};

// Findings of a rank, sent as they are in memory.
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
      {reinterpret_cast<uint8_t*>(cards.data()), cards.size() * sizeof(Card)}, stream, kOpening));
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

bool Sees(const std::string& path, const std::string& run, absl::Duration patience,
          FileSystem& files) {
  constexpr absl::Duration kBetweenLooks = absl::Milliseconds(50);
  const absl::Time end = absl::Now() + patience;
  for (;;) {
    SmallFile probe;
    if (!files.ReadSmall(path, probe)) return probe.text == run;
    if (absl::Now() >= end) return false;
    absl::SleepFor(kBetweenLooks);
  }
}

absl::Status WriteProbe(const std::string& path, const std::string& run, FileSystem& files) {
  int file = -1;
  std::error_code error = CreateText(path, run, files, file);
  if (!error) {
    error = files.Close(file);
    if (error) (void)files.Unlink(path);
  }
  return StatusOf(error, "write", path);
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

absl::Status RunFolder::Together(FileWork::Work work, Communicator& world, Stream& stream,
                                 absl::Status& result) const {
  return RunOnRanks({.who = DescribePlace(rank_, "Open", kOpening),
                     .deadline = options_.timeout,
                     .files = options_.files},
                    std::move(work),
                    {absl::StrCat("'", options_.folder, "'"), world, stream, kOpening}, result);
}

absl::Status RunFolder::Take(Communicator& world, Stream& stream) {
  FileWork::Work take;
  if (rank_ == 0) {
    lock_ = std::make_shared<RunLock>(options_.folder, options_.beat, *options_.files);
    run_ = lock_->run();
    take = [folder = options_.folder, lock = lock_, probe = ProbePath(0),
            between_looks = std::min(absl::Milliseconds(100), options_.beat / 4)](
               FileSystem& files) -> absl::Status {
      MOE_RETURN_IF_ERROR(MakeFolders(folder, files));
      for (;;) {
        MOE_ASSIGN_OR_RETURN(const bool taken, lock->TryTake(files));
        if (taken) return WriteProbe(probe, lock->run(), files);
        absl::SleepFor(between_looks);
      }
    };
  }
  absl::Status mine;
  MOE_RETURN_IF_ERROR(Together(std::move(take), world, stream, mine));
  if (!absl::IsInvalidArgument(mine)) mine = CannotWrite(mine);
  return AgreedStatus(mine, world, stream, kOpening);
}

absl::Status RunFolder::ShareRun(Communicator& world, Stream& stream) {
  run_.resize(16);
  MOE_RETURN_IF_ERROR(world.Broadcast<uint8_t>(
      {reinterpret_cast<uint8_t*>(run_.data()), run_.size()}, 0, stream, kOpening));
  return stream.Synchronize();
}

absl::Status RunFolder::Prove(Communicator& world, Stream& stream) {
  const auto sees = std::make_shared<bool>(true);
  FileWork::Work look;
  if (rank_ > 0) {
    // The other ranks wait for a rank that does not see the folder.
    look = [sees, patience = std::min(options_.sight, world.timeout() / 4), first = ProbePath(0),
            mine = ProbePath(rank_), run = run_](FileSystem& files) {
      *sees = Sees(first, run, patience, files);
      return *sees ? WriteProbe(mine, run, files) : absl::OkStatus();
    };
  }
  absl::Status mine, held;
  MOE_RETURN_IF_ERROR(Together(std::move(look), world, stream, mine));
  MOE_ASSIGN_OR_RETURN(const std::vector<Card> cards, GatherCards(*sees, world, stream));
  const auto end = [lock = lock_,
                    probe = *sees && mine.ok() ? ProbePath(rank_) : ""](FileSystem& files) {
    if (!probe.empty()) (void)files.Unlink(probe);
    return lock == nullptr ? absl::OkStatus() : lock->CheckHeld(files);
  };
  MOE_RETURN_IF_ERROR(Together(end, world, stream, held));
  if (!mine.ok()) {
    mine = CannotWrite(
        absl::Status(mine.code(), absl::StrCat(mine.message(), ", on host ", HostName())));
  }
  // If two runs took over one lock at the same time, the first has lost it by now.
  if (absl::IsResourceExhausted(held)) {
    mine = held;
  } else if (!held.ok()) {
    mine = absl::InvalidArgumentError(held.message());
  }
  if (const std::string blind = Blind(cards); rank_ == 0 && !blind.empty()) {
    mine = absl::InvalidArgumentError(absl::StrCat(blind, " cannot see what rank 0 on host ",
                                                   HostName(), " writes to '", options_.folder,
                                                   "', expected one folder that all ranks share"));
  }
  return AgreedStatus(mine, world, stream, kOpening);
}

// A name that no host has looked up before, so that none has cached its absence.
std::string RunFolder::ProbePath(int rank) const {
  return absl::StrCat(options_.folder, "/", kProbePrefix, run_, "-", rank);
}

absl::Status RunFolder::CheckRoom(int64_t my_bytes, int64_t count, Communicator& world,
                                  Stream& stream) {
  int64_t bytes = my_bytes;
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&bytes, 1}, ReduceOp::kSum, stream, kOpening));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  FileWork::Work look;
  if (rank_ == 0) {
    look = [folder = options_.folder, bytes, count](FileSystem& files) {
      int64_t free = 0;
      const std::error_code error = files.FreeBytes(folder, free);
      if (error) return StatusOf(error, "find out what is free in", folder);
      if (free / std::max<int64_t>(count, 1) >= bytes) return absl::OkStatus();
      return absl::UnavailableError(absl::StrCat(
          "'", folder, "' needs ", MiB(bytes, count), " for ", count,
          count == 1 ? " checkpoint" : " more checkpoints", " of ", MiB(bytes), ", free ",
          MiB(free), ": expected room for those that stay (--checkpoint-keep) and one more"));
    };
  }
  absl::Status mine;
  MOE_RETURN_IF_ERROR(Together(std::move(look), world, stream, mine));
  return AgreedStatus(CannotWrite(mine), world, stream, kOpening);
}

int64_t CheckpointsToCome(int64_t there, int64_t saves, int64_t keep) {
  return std::min(saves, std::max<int64_t>(1, keep + 1 - there));
}

}  // namespace moe
