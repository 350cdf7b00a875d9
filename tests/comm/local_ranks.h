// Runs a test body on R ranks that are threads of this process.
#ifndef MOE_TESTS_COMM_LOCAL_RANKS_H_
#define MOE_TESTS_COMM_LOCAL_RANKS_H_

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <absl/status/status.h>
#include <absl/time/time.h>
#include <gtest/gtest.h>

#include "comm/local/local_world.h"

namespace moe::testing {

// A body that fails fails the test; ranks that wait for it end by their deadline.
inline void RunLocalRanks(int ranks,
                          const std::function<absl::Status(std::unique_ptr<Communicator>)>& body,
                          absl::Duration timeout = absl::Seconds(60)) {
  auto worlds = MakeLocalWorld({.ranks = ranks, .timeout = timeout});
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      const absl::Status status = body(std::move(worlds[r]));
      EXPECT_TRUE(status.ok()) << "rank " << r << ": " << status;
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_LOCAL_RANKS_H_
