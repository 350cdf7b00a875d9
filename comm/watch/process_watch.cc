#include "comm/watch/process_watch.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>
#include <absl/time/clock.h>
#include <absl/time/time.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include "comm/hosts.h"
#include "kernels/base/caught.h"
#include "kernels/base/log.h"
#include "kernels/base/trace.h"

namespace moe {
namespace {

// Posted by the handler of SIGUSR2 and by Dump, never destroyed: both may come late.
sem_t* Wake() {
  static sem_t* const wake = [] {
    static sem_t semaphore;
    sem_init(&semaphore, 0, 0);
    return &semaphore;
  }();
  return wake;
}

std::atomic<bool> signalled = false;  // since the last answer to SIGUSR2
static_assert(std::atomic<bool>::is_always_lock_free);

void HandleSignal(int) {
  const int saved = errno;
  signalled = true;
  sem_post(Wake());
  errno = saved;
}

struct sigaction before_watch;

// As a JSON string. Text that is not ASCII, of a host's name or a path, becomes question marks.
std::string Quoted(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c < ' ' || c == 0x7f ? '?' : c;
  }
  return quoted + '"';
}

// The place's keys in a dump; empty without one.
std::string KeysOf(const std::optional<Place>& place) {
  if (!place.has_value()) return "";
  std::string keys = absl::StrCat(",\"at\":", Quoted(place->site));
  if (place->layer >= 0) absl::StrAppend(&keys, ",\"layer\":", place->layer);
  if (place->step >= 0) absl::StrAppend(&keys, ",\"step\":", place->step);
  return absl::StrCat(keys, ",\"at_ns\":", place->at_ns);
}

// The dumps of earlier runs that no dump of rank `rank` of `ranks` replaces: its own, and those of
// ranks that are no more. One that cannot be removed stays.
void RemoveOldDumps(const std::string& folder, int rank, int ranks) {
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    absl::string_view number = name;
    int of = -1;
    if (!absl::ConsumePrefix(&number, "flight.rank") || !absl::ConsumeSuffix(&number, ".jsonl") ||
        !absl::SimpleAtoi(number, &of) || (of != rank && of < ranks)) {
      continue;
    }
    std::remove(entry->path().c_str());
  }
}

}  // namespace

struct ProcessWatch::State {
  explicit State(const ProcessWatchOptions& given) : options(given) {}

  std::string DumpOf(const RankWatch& watch, absl::string_view why) const;
  std::map<int, std::shared_ptr<RankWatch>> All();
  void WriteAll(absl::string_view why);
  void PrintAll();
  void Serve();

  const ProcessWatchOptions options;
  const int64_t began_ns = absl::GetCurrentTimeNanos();
  std::mutex mu;
  std::condition_variable changed;
  std::map<int, std::shared_ptr<RankWatch>> ranks;  // guarded by mu
  std::string reason;                               // guarded by mu; of the first failure
  bool failed = false, written = false;             // guarded by mu
  bool stop = false, ended = false;                 // guarded by mu
};

std::string ProcessWatch::State::DumpOf(const RankWatch& watch, absl::string_view why) const {
  const FlightRecorder& recorder = watch.recorder();
  return absl::StrCat("{\"flight\":1,\"rank\":", watch.rank(), ",\"ranks\":", watch.ranks(),
                      ",\"host\":", Quoted(HostName()), ",\"pid\":", getpid(),
                      ",\"reason\":", Quoted(why), ",\"recorded\":", recorder.recorded(),
                      KeysOf(watch.places().Outside()), ",\"monotonic_ns\":", MonotonicNs(),
                      ",\"began_unix_ns\":", began_ns, ",\"unix_ns\":", absl::GetCurrentTimeNanos(),
                      "}\n", recorder.Lines());
}

std::map<int, std::shared_ptr<RankWatch>> ProcessWatch::State::All() {
  const std::lock_guard<std::mutex> lock(mu);
  return ranks;
}

void ProcessWatch::State::WriteAll(absl::string_view why) {
  for (const auto& [rank, watch] : All()) {
    const std::string path = absl::StrCat(options.folder, "/flight.rank", rank, ".jsonl");
    const std::string unfinished = path + ".tmp";
    const std::string text = DumpOf(*watch, why);
    std::FILE* const file = std::fopen(unfinished.c_str(), "wbe");
    if (file == nullptr) continue;
    const bool whole = std::fwrite(text.data(), 1, text.size(), file) == text.size();
    if (std::fclose(file) == 0 && whole) {
      std::rename(unfinished.c_str(), path.c_str());
    } else {
      std::remove(unfinished.c_str());
    }
  }
}

void ProcessWatch::State::PrintAll() {
  for (const auto& [rank, watch] : All()) {
    const std::optional<Place> place = watch->places().Latest();
    if (!place.has_value()) continue;
    const absl::Duration since = absl::Nanoseconds(MonotonicNs() - place->at_ns);
    Log(LogLevel::kInfo,
        absl::StrCat("rank ", rank, " on host ", HostName(), " in ", TextOf(*place), " for ",
                     absl::FormatDuration(absl::Trunc(since, absl::Milliseconds(1)))));
  }
}

void ProcessWatch::State::Serve() {
  while (true) {
    while (sem_wait(Wake()) != 0) {
    }
    const bool print = signalled.exchange(false);
    std::string why;
    {
      const std::lock_guard<std::mutex> lock(mu);
      if (stop) break;
      why = failed ? reason : "SIGUSR2";
    }
    Caught([&] {
      if (!options.folder.empty()) WriteAll(why);
      if (print) PrintAll();
      return absl::OkStatus();
    }).IgnoreError();
    const std::lock_guard<std::mutex> lock(mu);
    if (failed) written = true;
    changed.notify_all();
  }
  const std::lock_guard<std::mutex> lock(mu);
  ended = true;
  changed.notify_all();
}

ProcessWatch::ProcessWatch(const ProcessWatchOptions& options)
    : state_(std::make_shared<State>(options)) {
  Wake();  // exists before the handler does
  std::thread([state = state_] { state->Serve(); }).detach();
  struct sigaction action = {};
  action.sa_handler = HandleSignal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGUSR2, &action, &before_watch);
}

ProcessWatch::~ProcessWatch() {
  if (state_->options.at_end) Dump("end");
  sigaction(SIGUSR2, &before_watch, nullptr);
  std::unique_lock<std::mutex> lock(state_->mu);
  state_->stop = true;
  sem_post(Wake());
  state_->changed.wait_for(lock, absl::ToChronoNanoseconds(kLongestDump),
                           [this] { return state_->ended; });
}

std::shared_ptr<RankWatch> ProcessWatch::Of(int rank, int ranks) {
  {
    const std::lock_guard<std::mutex> lock(state_->mu);
    const auto known = state_->ranks.find(rank);
    if (known != state_->ranks.end()) return known->second;
  }
  // Not under the lock: a disk that hangs must not hold up Dump.
  if (!state_->options.folder.empty()) RemoveOldDumps(state_->options.folder, rank, ranks);
  const std::lock_guard<std::mutex> lock(state_->mu);
  std::shared_ptr<RankWatch>& watch = state_->ranks[rank];
  if (watch == nullptr) watch = std::make_shared<RankWatch>(rank, ranks, state_->options.fault);
  return watch;
}

void ProcessWatch::Dump(absl::string_view reason) noexcept {
  if (state_->options.folder.empty()) return;
  std::unique_lock<std::mutex> lock(state_->mu);
  if (!state_->failed) {
    state_->failed = true;
    Caught([&] {
      state_->reason = std::string(reason);
      return absl::OkStatus();
    }).IgnoreError();
    sem_post(Wake());
  }
  state_->changed.wait_for(lock, absl::ToChronoNanoseconds(kLongestDump),
                           [this] { return state_->written; });
}

}  // namespace moe
