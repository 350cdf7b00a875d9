// Every command when an allocation or the start of a thread fails, on two ranks: the n-th one, for
// each n, or all from it on. Each run is a forked process that must end by itself, within the
// deadline and 2 s: with exit code 5 and one line, or, if what it lacked was not needed, with 0 and
// the complete result.
//
// By default a selection of allocations; OUT_OF_MEMORY_STRIDE=1 takes all of them.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "moe/cli/base/command.h"
#include "tests/counting_new.h"

namespace {

std::atomic<int64_t> threads_left = std::numeric_limits<int64_t>::max();

}  // namespace

// Replaces the C library's, for all libraries of this program.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*run)(void*), void* argument) {
  static const auto real =
      reinterpret_cast<int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>(
          ::dlsym(RTLD_NEXT, "pthread_create"));
  return --threads_left < 0 ? EAGAIN : real(thread, attributes, run, argument);
}

namespace moe::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int64_t kNever = int64_t{1} << 40;
constexpr int kDeadlineSeconds = 2;  // --comm-timeout
constexpr int kWorkSeconds = 6;

struct Command {
  const char* name;
  std::string args;                     // separated by blanks
  std::vector<std::string> files = {};  // complete, or absent
  // A point of a sweep that fails is a row, and the sweep continues.
  bool goes_on = false;
  int most_code = 0;  // with enough memory: doctor's findings depend on the machine
};
std::ostream& operator<<(std::ostream& out, const Command& command) {
  return out << command.name;
}

enum class Fault { kAllocation, kLaterAllocations, kLaterThreads };

const char* Text(Fault fault) {
  return fault == Fault::kAllocation         ? "allocation "
         : fault == Fault::kLaterAllocations ? "from allocation "
                                             : "from thread ";
}

struct Outcome {
  int status = 0;  // from waitpid
  int64_t allocations = 0, threads = 0;
  double seconds = 0;
  std::string out, err;
};

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

int64_t Lines(const std::string& text) {
  return std::count(text.begin(), text.end(), '\n');
}

// Lines that every run of the command prints. Others come and go with the machine's other load:
// times that exceed what they are part of, rows that disturb each other, doctor's findings.
int64_t Results(const std::string& text) {
  constexpr const char* kOfLoad[] = {
      "# busy:",
      "# Not converged",
      "other, waiting",
      "Above 100 %: ",
      "-> wait for it, or stop",
      "note  leftovers",
      "-> with no MPI job running",
  };
  const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  return std::count_if(lines.begin(), lines.end(), [&](absl::string_view line) {
    return std::none_of(std::begin(kOfLoad), std::end(kOfLoad),
                        [&](const char* part) { return absl::StrContains(line, part); });
  });
}

// The first line with this prefix; "" if there is none.
std::string LineOf(const std::string& text, absl::string_view begin) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::StartsWith(line, begin)) return std::string(line);
  }
  return "";
}

// The distance between tested allocations.
int64_t Stride(int64_t allocations) {
  const char* const text = std::getenv("OUT_OF_MEMORY_STRIDE");
  int64_t stride = 0;
  if (text != nullptr && absl::SimpleAtoi(text, &stride) && stride > 0) return stride;
  return std::max<int64_t>(1, allocations / 23);
}

constexpr char kTimeout[] = " --comm-timeout 2 ";

std::string ModelFlags() {
  return absl::StrCat(kTimeout,
                      "--ranks 2 --ep 2 --hidden-size 8 --num-experts 4 --moe-ffn-hidden-size 8 "
                      "--threads 1 ");
}
std::string TrainFlags() {
  return ModelFlags() +
         "--data ../text --num-layers 1 --num-attention-heads 2 --seq-length 16 "
         "--micro-batch-size 1 --micro-batches 2 --eval-sequences 2 --steps 2 ";
}

class OutOfMemoryTest : public ::testing::TestWithParam<Command> {
 protected:
  static void SetUpTestSuite() {
    char name[] = "/tmp/out_of_memory_XXXXXX";
    work_ = new std::string(mkdtemp(name));
    fs::current_path(*work_);
    std::ofstream text("text");
    for (int i = 0; i < 1500; ++i) text << "the router sends token " << i * i % 97 << " away\n";
    shared_ = static_cast<int64_t*>(::mmap(nullptr, 2 * sizeof(*shared_), PROT_READ | PROT_WRITE,
                                           MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    const Outcome saved = Run({.name = "saved", .args = "train" + TrainFlags() + "-q --save save"},
                              Fault::kAllocation, kNever);
    ASSERT_EQ(saved.status, 0) << saved.err;
    fs::rename("run/save", "saved");
  }
  static void TearDownTestSuite() {
    fs::current_path("/");
    fs::remove_all(*work_);
  }

  // One run whose n-th allocation fails, or everything from the n-th on.
  static Outcome Run(const Command& command, Fault fault, int64_t n) {
    fs::remove_all("run");
    fs::create_directory("run");
    const auto begin = Clock::now();
    std::fflush(nullptr);  // otherwise the child would write it again
    const pid_t child = ::fork();
    if (child == 0) Child(command, fault, n);
    Outcome outcome;
    EXPECT_EQ(::waitpid(child, &outcome.status, 0), child);
    outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    outcome.allocations = shared_[0];
    outcome.threads = shared_[1];
    outcome.out = ReadAll("run/stdout");
    outcome.err = ReadAll("run/stderr");
    return outcome;
  }

  [[noreturn]] static void Child(const Command& command, Fault fault, int64_t n) {
    fs::current_path("run");
    const char* const names[] = {"/dev/null", "stdout", "stderr"};
    for (int stream = 0; stream < 3; ++stream) {
      const int file = ::open(names[stream], O_RDWR | O_CREAT, 0600);
      ::dup2(file, stream);
      ::close(file);
    }
    std::vector<std::string> args = absl::StrSplit("moe " + command.args, ' ', absl::SkipEmpty());
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    ::alarm(kDeadlineSeconds + 2 + kWorkSeconds);
    const int64_t before = Allocations();
    if (fault != Fault::kLaterThreads) FailAllocations(n, fault == Fault::kAllocation ? 1 : kNever);
    threads_left = fault == Fault::kLaterThreads ? n - 1 : kNever;
    const int code = RunProgram(static_cast<int>(argv.size()), argv.data());
    shared_[0] = Allocations() - before;
    shared_[1] = kNever - threads_left;
    std::exit(code);
  }

  static void Keep(const Command& command) {
    fs::remove_all("whole");
    fs::rename("run", "whole");
    for (const std::string& file : command.files) {
      ASSERT_FALSE(ReadAll("whole/" + file).empty()) << file;
    }
  }

  // Checks a run with a failed allocation: "", or what is wrong.
  static std::string Check(const Command& command, const Outcome& whole, const Outcome& run) {
    if (WIFSIGNALED(run.status)) return absl::StrCat("signal ", WTERMSIG(run.status));
    const int code = WEXITSTATUS(run.status);
    const bool is_whole = code == WEXITSTATUS(whole.status) && run.err == whole.err;
    const bool went_on =
        command.goes_on && code == 1 && absl::StrContains(run.err, " points failed, the first: ");
    if (!is_whole && !went_on && code != 5) return absl::StrCat("exit code ", code);
    if (!is_whole && (Lines(run.err) != 1 || !absl::StartsWith(run.err, "moe"))) {
      return absl::StrCat("exit code ", code, ", but not one line of the program");
    }
    const bool same = Results(run.out) == Results(whole.out) &&
                      LineOf(run.out, "weights_xxh3") == LineOf(whole.out, "weights_xxh3");
    if (is_whole && !same) {
      return absl::StrCat("another result:\n", run.out, "with enough memory:\n", whole.out);
    }
    for (const std::string& file : command.files) {
      const bool there = fs::exists("run/" + file);
      if (!there && is_whole) return absl::StrCat("no ", file);
      if (there && ReadAll("run/" + file) != ReadAll("whole/" + file)) {
        return absl::StrCat(file, " is not whole");
      }
    }
    return "";
  }

  static std::string* work_;
  static int64_t* shared_;  // [allocations, threads] of the last run, written by its child
};

std::string* OutOfMemoryTest::work_ = nullptr;
int64_t* OutOfMemoryTest::shared_ = nullptr;

TEST_P(OutOfMemoryTest, EndsWithCodeFiveAndALine) {
  const Command& command = GetParam();
  const Outcome whole = Run(command, Fault::kAllocation, kNever);
  ASSERT_TRUE(WIFEXITED(whole.status)) << whole.status;
  ASSERT_LE(WEXITSTATUS(whole.status), command.most_code) << whole.err;
  Keep(command);
  std::cout << command.name << ": " << whole.allocations << " allocations, " << whole.threads
            << " threads, " << whole.seconds * 1e3 << " ms\n";
  int wrong = 0;
  double slowest = 0;
  for (const Fault fault : {Fault::kAllocation, Fault::kLaterAllocations, Fault::kLaterThreads}) {
    // The requests of threads differ from run to run.
    const bool threads = fault == Fault::kLaterThreads;
    const int64_t end = threads ? whole.threads : whole.allocations;
    for (int64_t n = 1; n <= end; n += threads ? 1 : Stride(end)) {
      const Outcome run = Run(command, fault, n);
      const std::string problem = Check(command, whole, run);
      if (run.status != whole.status) slowest = std::max(slowest, run.seconds);
      if (problem.empty()) continue;
      ADD_FAILURE() << Text(fault) << n << " of " << end << ": " << problem << ", after "
                    << run.seconds << " s\n"
                    << run.err;
      if (++wrong == 10) return;
    }
  }
  std::cout << "slowest failure: " << slowest << " s\n";
}

std::vector<Command> Commands() {
  const std::string timeout = kTimeout, model = ModelFlags(), train = TrainFlags();
  const std::string golden = absl::StrCat(MOE_GOLDEN_DATA, "/mixtral-1");
  const std::string io = golden + "/io.safetensors";
  return {
      {"train", "train" + train + "--quiet --out out"},
      {"train_overlap", "train" + train +
                            "--quiet --moe-overlap-degree 2 --dispatch direct --trace t.json "
                            "--record-routing routing --numerics fast --threads 2"},
      {"export",
       "ckpt export ../saved/step-00000002 --format mixtral --out out",
       {"out/config.json", "out/model.safetensors"}},
      {"status", "status ../saved"},
      {"layer",
       absl::StrCat("layer --hf-config ", golden, "/config.json --weights ", golden, " --input ",
                    io, " --grad-output ", io, " --output y --grads g", timeout,
                    "--quiet --ranks 2 --ep 2 --threads 1"),
       {"y", "g"}},
      {"bench_alltoallv",
       "bench alltoallv -b 64 -e 128 -n 2 -w 1 -T 0 --ranks 2 --quiet -J r" + timeout},
      {"bench_allreduce", "bench allreduce -b 64 -e 64 -n 2 -w 1 -T 0 --ranks 2 --quiet" + timeout},
      {"bench_layer", "bench layer" + model + "--tokens 8 -n 2 -w 1 -T 0 --quiet"},
      {"sweep",
       "sweep" + model + "--tokens 8 -n 2 -w 1 -T 0 -r 1 --topk 1,2 -q -J r",
       {},
       /*goes_on=*/true},
      {"sweep_train", "sweep --measure train" + train + "-r 1 -q -J r", {}, /*goes_on=*/true},
      {"verify",
       "verify --router mixtral --layouts ranks=2 --backend local --hidden-size 5 "
       "--moe-ffn-hidden-size 3 --num-experts 4 --micro-batches 3 --micro-batch-tokens 3 "
       "--numerics fast -q" +
           timeout},
      {"report",
       absl::StrCat("report ", MOE_REPORT_DATA, "/sweep.jsonl --out page.html -q"),
       {"page.html"}},
      {"doctor", "doctor", {}, /*goes_on=*/false, /*most_code=*/1},
      {"completion", "completion bash"},
      {"help", "train --help"},
  };
}

INSTANTIATE_TEST_SUITE_P(Commands, OutOfMemoryTest, ::testing::ValuesIn(Commands()),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace moe::cli
