// What the contract tests of all backends share: every test runs on each number of ranks, with
// inline and with queued streams.
#ifndef MOE_TESTS_COMM_COMM_ENV_FIXTURE_H_
#define MOE_TESTS_COMM_COMM_ENV_FIXTURE_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/strings/str_cat.h>
#include <absl/time/time.h>
#include <gtest/gtest.h>

#include "tests/comm/comm_env.h"
#include "tests/sanitizers.h"

namespace moe::testing {

inline constexpr absl::Duration kPatience =
    absl::Seconds(30);  // of tests in which nobody is missing

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

#endif  // MOE_TESTS_COMM_COMM_ENV_FIXTURE_H_
