// The flight recorder, the faults of tests, and the seam that both share.
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/time/clock.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/create.h"
#include "comm/watch/process_watch.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

std::vector<std::string> LinesOf(absl::string_view text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

// The lines with `part`.
int Count(absl::string_view text, absl::string_view part) {
  int count = 0;
  for (const std::string& line : LinesOf(text)) count += absl::StrContains(line, part) ? 1 : 0;
  return count;
}

std::string TextOf(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// What is logged while it lives.
class LoggedLines {
 public:
  explicit LoggedLines(size_t awaited) : awaited_(awaited) {
    lines_ = {};
    SetLogCallback([](LogLevel, absl::string_view text) {
      const std::lock_guard<std::mutex> lock(mu_);
      lines_.emplace_back(text);
    });
  }
  ~LoggedLines() { SetLogCallback(nullptr); }

  // As many as are awaited, or what has come in ten seconds.
  std::vector<std::string> Await() const {
    for (int i = 0; i < 1000; ++i) {
      absl::SleepFor(absl::Milliseconds(10));
      const std::lock_guard<std::mutex> lock(mu_);
      if (lines_.size() >= awaited_) return lines_;
    }
    return lines_;
  }

 private:
  static std::mutex mu_;
  static std::vector<std::string> lines_;  // guarded by mu_
  const size_t awaited_;
};
std::mutex LoggedLines::mu_;
std::vector<std::string> LoggedLines::lines_;

class WatchTest : public ::testing::Test {
 protected:
  WatchTest() : folder_(absl::StrCat(::testing::TempDir(), "watch.XXXXXX")) {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
  }
  ~WatchTest() override { std::filesystem::remove_all(folder_); }
  std::string Path(int rank) const { return absl::StrCat(folder_, "/flight.rank", rank, ".jsonl"); }

  std::string folder_;
};

TEST(FlightRecorderTest, KeepsTheLastCallsInOrder) {
  FlightRecorder recorder;
  const int group = recorder.AddGroup({.name = "world", .members = {0, 1}});
  constexpr int64_t kCalls = FlightRecorder::kCapacity + 100;
  for (int64_t i = 0; i < kCalls; ++i) {
    const uint64_t ticket = recorder.Enter(group, i, {.operation = "AllReduce"});
    recorder.Set(ticket, FlightState::kStarted);
    if (i + 1 < kCalls) recorder.Set(ticket, FlightState::kCompleted);
  }
  const std::vector<std::string> lines = LinesOf(recorder.Lines());
  ASSERT_EQ(lines.size(), 1 + FlightRecorder::kCapacity);
  EXPECT_EQ(lines[0], R"({"group":"world","members":[0,1]})");
  EXPECT_THAT(lines[1], HasSubstr(R"("sequence":100,)"));
  EXPECT_THAT(lines[1], HasSubstr(R"("state":"completed")"));
  EXPECT_THAT(lines.back(), HasSubstr(absl::StrCat("\"sequence\":", kCalls - 1, ",")));
  EXPECT_THAT(lines.back(), HasSubstr(R"("state":"started")"));
  EXPECT_THAT(lines.back(), Not(HasSubstr("ended_ns")));
  EXPECT_EQ(recorder.recorded(), static_cast<uint64_t>(kCalls));
}

TEST(FlightRecorderTest, AnOverwrittenCallIsNotSet) {
  FlightRecorder recorder;
  const int group = recorder.AddGroup({.name = "world", .members = {0}});
  const uint64_t first = recorder.Enter(group, 0, {.operation = "Fence"});
  for (size_t i = 0; i < FlightRecorder::kCapacity; ++i) {
    recorder.Enter(group, 1, {.operation = "Barrier"});
  }
  recorder.Set(first, FlightState::kFailed);
  EXPECT_EQ(Count(recorder.Lines(), "failed"), 0);
}

// For ThreadSanitizer, too: a dump reads while ranks write.
TEST(FlightRecorderTest, IsReadWhileThreadsRecord) {
  FlightRecorder recorder;
  const int group = recorder.AddGroup({.name = "world", .members = {0}});
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&recorder, group] {
      for (int64_t i = 0; i < 5000; ++i) {
        const int64_t layer = i % 100;
        const Site site = {.name = "dispatch", .layer = static_cast<int32_t>(layer), .step = layer};
        const uint64_t ticket = recorder.Enter(group, layer, {.operation = "Fence", .site = site});
        recorder.Set(ticket, FlightState::kCompleted);
      }
    });
  }
  for (int i = 0; i < 5; ++i) {
    for (const std::string& line : LinesOf(recorder.Lines())) {
      // Of one call: its numbers are the same.
      const size_t at = line.find("\"sequence\":");
      if (at == std::string::npos) continue;
      const std::string number = line.substr(at + 11, line.find(',', at) - at - 11);
      EXPECT_THAT(line, HasSubstr(absl::StrCat("\"layer\":", number, ",\"step\":", number, ",")));
    }
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(LastPlacesTest, AreThoseOfTheProcessThatHasTheFile) {
  LastPlaces places;
  EXPECT_FALSE(places.Latest().has_value());
  const auto seen = LastPlaces::Open(places.file());
  ASSERT_NE(seen, nullptr);
  places.Mark({.name = "experts", .layer = 3, .step = 7});
  EXPECT_EQ(TextOf(*seen->Latest()), "experts (layer 3, step 7)");
  places.Call("AllToAllV", {.name = "combine", .layer = 3, .step = 7});
  EXPECT_EQ(TextOf(*seen->Latest()), "AllToAllV (combine, layer 3, step 7)");
  EXPECT_EQ(TextOf(*seen->Outside()), "experts (layer 3, step 7)");
  places.Call("Barrier", {});
  EXPECT_EQ(TextOf(*seen->Latest()), "Barrier");
  places.Mark({.name = "a name of more than twenty-three bytes"});
  EXPECT_EQ(TextOf(*seen->Latest()), "a name of more than twe");
  EXPECT_EQ(LastPlaces::Open(Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC))), nullptr);
  EXPECT_EQ(LastPlaces::Open(Descriptor()), nullptr);
}

TEST(LastPlacesTest, AreOpenedWhereNoFileCanBe) {
  LastPlaces places;
  places.Mark({.name = "experts"});
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  auto seen = LastPlaces::Open(places.file());
  const LastPlaces own;  // has no file
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_NE(seen, nullptr);
  EXPECT_EQ(TextOf(*seen->Latest()), "experts");
  EXPECT_FALSE(own.file().is_open());
}

// For ThreadSanitizer, too: what is read is one place.
TEST(LastPlacesTest, AreReadWhileThreadsWrite) {
  LastPlaces places;
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      for (int32_t i = 0; !done; ++i) {
        places.Mark({.name = i % 2 == 0 ? "even" : "odd", .layer = i % 100, .step = i % 100});
      }
    });
  }
  for (int seen = 0; seen < 1000;) {
    const auto place = places.Latest();
    if (!place.has_value()) continue;
    ++seen;
    EXPECT_EQ(place->layer, place->step);
    EXPECT_EQ(place->site, place->step % 2 == 0 ? "even" : "odd");
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

TEST_F(WatchTest, EveryCollectivePasses) {
  ProcessWatch watch({.folder = folder_});
  const auto body = [](std::unique_ptr<Communicator> world) -> absl::Status {
    const auto stream = MakeStream({}).value();
    const Site site = {.name = "test", .layer = 3, .step = 7};
    std::vector<float> four(4, 1.0f), two(2);
    const std::vector<int64_t> counts = {1, 1};
    MOE_RETURN_IF_ERROR(
        world->AllReduce<float>(absl::MakeSpan(four), ReduceOp::kSum, *stream, site));
    MOE_RETURN_IF_ERROR(world->AllToAllV<float>(absl::MakeConstSpan(four).first(2), counts,
                                                absl::MakeSpan(two), counts, *stream, site));
    MOE_RETURN_IF_ERROR(world->Fence(*stream, site));
    const SendRecvOp ops[] = {{.peer = 1 - world->rank(), .send = four.data(), .bytes = 8},
                              {.peer = 1 - world->rank(), .recv = two.data(), .bytes = 8}};
    MOE_RETURN_IF_ERROR(world->SendRecv(ops, *stream, site));
    MOE_RETURN_IF_ERROR(stream->Synchronize());
    MOE_RETURN_IF_ERROR(world->Barrier());
    MOE_ASSIGN_OR_RETURN(const auto part, world->Split(world->rank(), 0));
    MOE_RETURN_IF_ERROR(part->Barrier());
    MOE_RETURN_IF_ERROR(world->AllocatePeerBuffer(64, CpuMemory(), site).status());
    world->Mark({.name = "data", .step = 8});
    return absl::OkStatus();
  };
  ASSERT_TRUE(RunRanks({.plan = {.ranks = 2}, .watch = &watch}, body).ok());
  const FlightRecorder& recorder = watch.Of(1, 2)->recorder();
  const std::string text = recorder.Lines();
  EXPECT_EQ(recorder.recorded(), 8u);
  EXPECT_EQ(Count(text, R"("state":"completed")"), 8) << text;
  for (const char* part :
       {R"({"group":"world","members":[0,1]})", R"({"group":"world/0.1","members":[1]})",
        R"("sequence":0,"operation":"AllReduce","site":"test","layer":3,"step":7,"bytes_in":16,)"
        R"("bytes_out":16,"type":"f32")",
        R"("sequence":1,"operation":"AllToAllV")", R"("counts_hash":")",
        R"("sequence":2,"operation":"Fence")", R"("sequence":0,"operation":"SendRecv")",
        R"("sequence":3,"operation":"Barrier")", R"("sequence":4,"operation":"Split")",
        R"("sequence":5,"operation":"AllocatePeerBuffer","site":"test","layer":3,"step":7,)",
        R"({"group":"world/0.1","sequence":0,"operation":"Barrier")"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_EQ(TextOf(*watch.Of(1, 2)->places().Outside()), "data (step 8)");
  EXPECT_FALSE(std::filesystem::exists(Path(0)));
}

TEST_F(WatchTest, AFailureIsDumpedForAllRanksOfTheProcess) {
  ProcessWatch watch({.fault = {.ranks = {1}, .step = 2, .phase = "optimiser"}, .folder = folder_});
  const auto body = [](std::unique_ptr<Communicator> world) -> absl::Status {
    const auto stream = MakeInlineStream();
    for (int64_t step = 1;; ++step) {
      int32_t sum = 1;
      MOE_RETURN_IF_ERROR(world->AllReduce<int32_t>(absl::MakeSpan(&sum, 1), ReduceOp::kSum,
                                                    *stream, {.name = "loss", .step = step}));
      world->Mark({.name = "optimiser", .step = step});
    }
  };
  const absl::Status status = RunRanks({.plan = {.ranks = 2}, .watch = &watch}, body);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("in optimiser (step 2): injected fault: throw"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 on host "));
  for (const int rank : {0, 1}) {
    const std::string text = TextOf(Path(rank));
    EXPECT_THAT(text, HasSubstr(absl::StrCat("{\"flight\":1,\"rank\":", rank, ",\"ranks\":2,")));
    EXPECT_THAT(text, HasSubstr("injected fault"));
    // The other rank may have come to the next step.
    const int calls = Count(text, R"("operation":"AllReduce")");
    EXPECT_TRUE(calls == 2 || (rank == 0 && calls == 3)) << text;
  }
}

TEST_F(WatchTest, ASignalIsAnsweredWithADumpAndALineForEachRank) {
  ProcessWatch watch({.folder = folder_});
  watch.Of(0, 2)->Mark({.name = "data"});
  watch.Of(1, 2)->Enter(watch.Of(1, 2)->recorder().AddGroup({}), 0,
                        {.operation = "AllReduce", .site = {.name = "loss", .step = 5}});
  const LoggedLines logged(2);
  std::raise(SIGUSR2);
  EXPECT_THAT(logged.Await(),
              ElementsAre(MatchesRegex("rank 0 on host [^ ]+ in data for [0-9.ms]+"),
                          MatchesRegex("rank 1 on host [^ ]+ in AllReduce \\(loss, step 5\\) for "
                                       "[0-9.ms]+")));
  EXPECT_THAT(TextOf(Path(0)), HasSubstr(R"("reason":"SIGUSR2")"));
  EXPECT_THAT(TextOf(Path(0)), HasSubstr(R"("at":"data")"));
}

volatile std::sig_atomic_t signals_before = 0;

TEST(ProcessWatchTest, WithoutAFolderASignalIsAnsweredWithLines) {
  const auto before = std::signal(SIGUSR2, [](int) { signals_before = signals_before + 1; });
  {
    ProcessWatch watch({});
    watch.Of(0, 1)->Mark({.name = "data"});
    const LoggedLines logged(1);
    std::raise(SIGUSR2);
    EXPECT_THAT(logged.Await(), ElementsAre(HasSubstr(" in data for ")));
    EXPECT_EQ(signals_before, 0);
  }
  std::raise(SIGUSR2);
  EXPECT_EQ(signals_before, 1);
  std::signal(SIGUSR2, before);
}

// Each rank removes its own, and those of ranks that a smaller world lacks; other files stay.
TEST_F(WatchTest, DumpsOfEarlierRunsAreRemoved) {
  for (const int rank : {0, 1, 2, 3}) std::ofstream(Path(rank)) << "old";
  const std::string other = folder_ + "/flight.rankx.jsonl";
  std::ofstream(other) << "other";
  {
    ProcessWatch watch({.folder = folder_});
    watch.Of(1, 3);
    EXPECT_TRUE(std::filesystem::exists(Path(0)));
    EXPECT_FALSE(std::filesystem::exists(Path(1)));
    EXPECT_TRUE(std::filesystem::exists(Path(2)));
    EXPECT_FALSE(std::filesystem::exists(Path(3)));
    EXPECT_TRUE(std::filesystem::exists(other));
    watch.Dump("failed");
    watch.Of(1, 3);  // not its first call
  }
  EXPECT_THAT(TextOf(Path(1)), HasSubstr(R"("reason":"failed")"));
  EXPECT_THAT(TextOf(Path(1)), HasSubstr(R"("began_unix_ns":)"));
}

TEST_F(WatchTest, AtTheEndADumpIsWrittenWhereItIsAskedFor) {
  { ProcessWatch(ProcessWatchOptions{.folder = folder_}).Of(0, 1); }
  EXPECT_FALSE(std::filesystem::exists(Path(0)));
  { ProcessWatch(ProcessWatchOptions{.folder = folder_, .at_end = true}).Of(0, 1); }
  EXPECT_THAT(TextOf(Path(0)), HasSubstr(R"("reason":"end")"));
}

TEST(FaultTest, ComesInItsStepOrLaterToItsRankAlone) {
  const Fault fault = {.ranks = {1}, .step = 5, .phase = "dispatch"};
  RankWatch other(0, 2, fault), victim(1, 2, fault);
  for (const int64_t step : {-1, 4, 5}) other.Mark({.name = "dispatch", .step = step});
  for (const int64_t step : {-1, 4}) victim.Mark({.name = "dispatch", .step = step});
  victim.Mark({.name = "combine", .step = 5});
  EXPECT_THROW(victim.Mark({.name = "dispatch", .step = 6}), std::runtime_error);
  RankWatch caller(1, 2, fault);
  EXPECT_THROW(caller.Enter(0, 0, {.site = {.name = "dispatch", .step = 5}}), std::runtime_error);
}

TEST(FaultTest, AStoppedProcessGoesOnAndIsNotStoppedAgain) {
  const pid_t process = fork();
  if (process == 0) {
    SetLogCallback([](LogLevel, absl::string_view) {});
    RankWatch victim(0, 1, {.ranks = {0}, .phase = "data", .kind = FaultKind::kStop});
    for (int64_t step = 0; step < 2; ++step) victim.Mark({.name = "data", .step = step});
    _exit(3);
  }
  int status = 0;
  ASSERT_EQ(waitpid(process, &status, WUNTRACED), process);
  EXPECT_TRUE(WIFSTOPPED(status));
  kill(process, SIGCONT);
  ASSERT_EQ(waitpid(process, &status, WUNTRACED), process);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3);
}

TEST(FaultDeathTest, ProcessesEndByTheirKind) {
  const Site site = {.name = "data", .step = 1};
  EXPECT_EXIT(Inject(FaultKind::kExit, 0, site), ::testing::ExitedWithCode(kFaultExitCode),
              "rank 0 on host .* in data \\(step 1\\): injected fault: exit");
  EXPECT_EXIT(Inject(FaultKind::kKill, 0, site), ::testing::KilledBySignal(SIGKILL), "fault: kill");
  EXPECT_EXIT(Inject(FaultKind::kSegv, 0, site), ::testing::KilledBySignal(SIGSEGV), "fault: segv");
}

}  // namespace
}  // namespace moe
