// How a backend runs one test body on R ranks. Each backend's test binary links its own CommEnv.
#ifndef MOE_TESTS_COMM_COMM_ENV_H_
#define MOE_TESTS_COMM_COMM_ENV_H_

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/strings/str_cat.h>
#include <absl/time/time.h>
#include <gtest/gtest.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "tests/sanitizers.h"

namespace moe::testing {

enum class EnvStream : uint8_t { kInline, kQueue };

class CommEnv {
 public:
  virtual ~CommEnv() = default;
  virtual const char* name() const = 0;
  virtual int max_ranks() const = 0;
  // Whether a rank that fails or aborts wakes its peers at once. Else they time out.
  virtual bool wakes_peers() const = 0;
  // Whether a receiver learns that a message of SendRecv has another size than it expects. NCCL
  // promises nothing; its fake here waits for ever.
  virtual bool compares_sizes() const { return true; }
  // Whether a wait that progresses starts its deadline again. NCCL does not report progress.
  virtual bool sees_progress() const { return true; }
  // Runs body(world, stream) once per rank: threads for "local", this process for "mpi", where
  // ranks past `ranks` sit out. Returns when all ranks are done.
  virtual void Run(int ranks, absl::Duration timeout, EnvStream stream,
                   absl::FunctionRef<void(Communicator&, Stream&)> body) = 0;
};

CommEnv& Env();  // defined by tests/comm/comm_env_{local,mpi,nccl}.cc

inline std::unique_ptr<Stream> MakeEnvStream(EnvStream kind) {
  return kind == EnvStream::kInline ? MakeInlineStream() : MakeStream({}).value();
}

// ---- what the contract tests of all backends share: every test runs on each number of ranks, with
// inline and with queued streams

inline constexpr absl::Duration kPatience =
    absl::Seconds(30);  // deadline of tests in which no rank is missing

class CommTest : public ::testing::TestWithParam<std::tuple<int, EnvStream>> {
 protected:
  static int ranks() { return std::get<0>(GetParam()); }
  void SetUp() override {
    if (ranks() > Env().max_ranks()) {
      GTEST_SKIP() << "needs " << ranks() << " ranks, have " << Env().max_ranks();
    }
  }
  static void OnEachRank(absl::FunctionRef<void(Communicator&, Stream&)> body,
                         absl::Duration timeout = kPatience) {
    Env().Run(ranks(), timeout, std::get<1>(GetParam()), body);
  }
};

// Expects that a call, which returned `enqueued`, was enqueued, and that its stream has passed it.
inline void ExpectDone(const absl::Status& enqueued, Stream& stream) {
  EXPECT_TRUE(enqueued.ok()) << enqueued;
  const absl::Status passed = stream.Synchronize();
  EXPECT_TRUE(passed.ok()) << passed;
}

inline std::string CommTestName(const ::testing::TestParamInfo<std::tuple<int, EnvStream>>& p) {
  return absl::StrCat("R", std::get<0>(p.param),
                      std::get<1>(p.param) == EnvStream::kInline ? "Inline" : "Queue");
}

// Values name their origin, so a misplaced element says where it came from.
inline int32_t Tagged(int from, int to, int64_t i) {
  return static_cast<int32_t>(from * 10'000'000 + to * 100'000 + i);
}

// Instantiates a suite derived from CommTest. Under sanitizers fewer ranks: more add no other pair.
inline auto EveryCommTestParam() {
  return ::testing::Combine(::testing::ValuesIn(kSanitized ? std::vector<int>{1, 2, 4}
                                                           : std::vector<int>{1, 2, 3, 4, 5, 8}),
                            ::testing::Values(EnvStream::kInline, EnvStream::kQueue));
}

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_COMM_ENV_H_
