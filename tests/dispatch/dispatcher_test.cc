// dispatch/dispatcher: what Create accepts and gives; every algorithm moves every row to the same
// place, bit for bit.
#include "dispatch/dispatcher.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/log.h"
#include "tests/comm/comm_env.h"
#include "tests/comm/forwarding_communicator.h"
#include "tests/dispatch/dispatch_world.h"
#include "tests/sanitizers.h"

namespace moe::testing {
namespace {

using ::testing::HasSubstr;

// An element that names where it comes from, so that a misplaced row is a wrong row.
template <typename T>
T ValueOf(uint64_t seed, int rank, int64_t row, int64_t h) {
  uint64_t mixed = (seed * 1000003 + static_cast<uint64_t>(rank)) * 1000003 + uint64_t(row);
  mixed = (mixed * 1000003 + static_cast<uint64_t>(h)) * 0x9e3779b97f4a7c15u;
  return T(static_cast<float>(static_cast<int32_t>(mixed >> 40) - (1 << 23)) * 0x1p-20f);
}

// [rows, hidden] of ValueOf, with a gap between rows.
template <typename T>
struct Values {
  Values(uint64_t seed, int rank, int64_t rows, int64_t hidden)
      : data(static_cast<size_t>(rows * (hidden + 3))),
        view(data.data(), rows, hidden, hidden + 3) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < hidden; ++h) view(r, h) = ValueOf<T>(seed, rank, r, h);
    }
  }
  Values(const Values&) = delete;
  std::vector<T> data;
  MatrixView<T> view;
};

// A world and the rows of every rank's experts.
struct SolvedWorld : World {
  explicit SolvedWorld(const WorldCase& c) : World(MakeWorld(c)) {
    for (int r = 0; r < ranks; ++r) expert_rows.push_back(ExpertRows(r));
    for (int32_t e = 0; e < experts; ++e) owner.push_back(Owner(e));
  }
  std::vector<std::vector<OracleRow>> expert_rows;
  std::vector<int> owner;
};

// One rank's part in a batch: everything that the layer would hold.
template <typename T>
class Batch {
 public:
  Batch(const SolvedWorld& world, const WorldCase& c, const Dispatcher<T>& dispatcher,
        int64_t hidden, uint64_t seed, Communicator& comm, Workspace& workspace, Stream& stream)
      : world_(world),
        me_(comm.rank()),
        hidden_(hidden),
        seed_(seed),
        workspace_(workspace),
        stream_(stream),
        plan_(DispatchPlan::Build({.routing = world.view(me_),
                                   .micro_batch_offsets = world.routing[me_].micro_batch_offsets,
                                   .placement = {world.experts, world.ranks},
                                   .options = dispatcher.PlanOptions(c.overlap),
                                   .comm = comm},
                                  workspace, stream)
                  .value()),
        x_(seed, me_, plan_.tokens(), hidden),
        expert_rows_(workspace.Matrix<T>(plan_.expert_rows(), hidden).value()),
        home_rows_(workspace.Matrix<T>(plan_.return_rows(), hidden).value()) {
    Clear(expert_rows_);
    Clear(home_rows_);
  }

  const DispatchPlan& plan() const { return plan_; }
  MatrixView<const T> x() const { return x_.view; }
  MatrixView<T> expert_rows() const { return expert_rows_; }
  MatrixView<T> home_rows() const { return home_rows_; }

  DispatchCall Call(int chunk) { return {plan_, chunk, workspace_, stream_}; }
  // Enqueues all chunks.
  void Dispatch(Dispatcher<T>& dispatcher) {
    for (int c = 0; c < plan_.chunks(); ++c) {
      const absl::Status status = dispatcher.Dispatch(Call(c), x_.view, expert_rows_);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  void DispatchScaled(Dispatcher<T>& dispatcher) {
    for (int c = 0; c < plan_.chunks(); ++c) {
      const absl::Status status =
          dispatcher.DispatchScaled(Call(c), x_.view, world_.routing[me_].weight, expert_rows_);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  // Fills the rows that go home with their own values. The stream orders the writes, as the layer
  // does by letting `exchange` wait for `compute`.
  void Return(Dispatcher<T>& dispatcher) {
    const auto out = dispatcher.ReturnBuffer(plan_, hidden_, workspace_).value();
    ASSERT_EQ(out.rows(), plan_.expert_rows());
    const bool stays = plan_.ranks() == 1 && !plan_.reads_peers();
    ASSERT_EQ(dispatcher.ReturnsInPlace(plan_), stays);
    if (stays) home_rows_ = out;
    for (int c = 0; c < plan_.chunks(); ++c) {
      ASSERT_TRUE(stream_
                      .Enqueue([this, out, c] {
                        for (int64_t n = plan_.expert_begin(c); n < plan_.expert_begin(c + 1);
                             ++n) {
                          for (int64_t h = 0; h < hidden_; ++h) {
                            out(n, h) = ValueOf<T>(seed_ + 1, me_, n, h);
                          }
                        }
                        return absl::OkStatus();
                      })
                      .ok());
      const absl::Status status = dispatcher.Return(Call(c), out, home_rows_);
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  void ExpectRows(bool scaled) {
    ExpectExpertRows(scaled);
    ExpectHomeRows();
  }
  static void Clear(MatrixView<T> m) {
    if (m.rows() > 0) std::fill_n(m.data(), m.rows() * m.cols(), T(-999.0f));
  }

 private:
  void ExpectExpertRows(bool scaled) {
    const std::vector<OracleRow>& want = world_.expert_rows[me_];
    ASSERT_EQ(expert_rows_.rows(), static_cast<int64_t>(want.size()));
    for (size_t n = 0; n < want.size(); ++n) {
      const auto& [source, token, slot] = want[n];
      for (int64_t h = 0; h < hidden_; ++h) {
        T value = token < 0 ? T(0.0f) : ValueOf<T>(seed_, source, token, h);
        if (scaled && token >= 0) {
          value = T(world_.routing[source].weight[slot] * static_cast<float>(value));
        }
        ASSERT_EQ(expert_rows_(static_cast<int64_t>(n), h), value) << "expert row " << n;
      }
    }
  }
  void ExpectHomeRows() {
    const RankRouting& mine = world_.routing[me_];
    for (int64_t t = 0; t < mine.tokens(); ++t) {
      for (int64_t s = mine.slot_offset[t]; s < mine.slot_offset[t + 1]; ++s) {
        if (!world_.Kept(me_, s)) continue;
        const int owner = world_.owner[mine.expert[s]];
        const auto& there = world_.expert_rows[owner];
        const auto at = std::find(there.begin(), there.end(), OracleRow{me_, t, s}) - there.begin();
        for (int64_t h = 0; h < hidden_; ++h) {
          ASSERT_EQ(home_rows_(plan_.home_row_of_slot()[s], h), ValueOf<T>(seed_ + 1, owner, at, h))
              << "slot " << s;
        }
      }
    }
  }

  const SolvedWorld& world_;
  const int me_;
  const int64_t hidden_;
  const uint64_t seed_;
  Workspace& workspace_;
  Stream& stream_;
  const DispatchPlan plan_;
  Values<T> x_;
  MatrixView<T> expert_rows_, home_rows_;
};

// The algorithms that a group of this size can run. Node sizes 1 and R are the ends of one code
// path; groups of up to 4 try them.
std::vector<DispatcherOptions> AllOptions(int ranks) {
  std::vector<DispatcherOptions> all = {{.algorithm = DispatchAlgorithm::kStaged},
                                        {.algorithm = DispatchAlgorithm::kDirect}};
  for (int s = 1; s <= ranks; ++s) {
    if (ranks % s == 0 && (ranks <= 4 || (s > 1 && s < ranks))) {
      all.push_back({.algorithm = DispatchAlgorithm::kHierarchical, .node_size = s});
    }
  }
  return all;
}

std::string Describe(const WorldCase& c, const DispatcherOptions& options, int rank) {
  std::ostringstream out;
  out << c << ", algorithm " << static_cast<int>(options.algorithm) << ", node size "
      << options.node_size << ", rank " << rank;
  return out.str();
}

template <typename T>
class DispatcherTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::is_same_v<T, float> && Env().name() == std::string("mpi")) {
      GTEST_SKIP() << "between processes bytes travel: one storage type is enough";
    }
  }
};
// Under ThreadSanitizer one: rows of other types move through the same code.
using Types = std::conditional_t<kThreadSanitized, ::testing::Types<float>,
                                 ::testing::Types<float, BFloat16, Float16>>;
TYPED_TEST_SUITE(DispatcherTest, Types);

template <typename T>
void ExpectRowsGoWhereTheWorldSays(const SolvedWorld& world, const WorldCase& c,
                                   Dispatcher<T>& dispatcher, Communicator& comm, Stream& stream) {
  Workspace workspace;
  Batch<T> batch(world, c, dispatcher, 5, c.seed * 10, comm, workspace, stream);
  batch.Dispatch(dispatcher);
  batch.Return(dispatcher);
  ASSERT_TRUE(stream.Synchronize().ok()) << stream.Synchronize();
  batch.ExpectRows(false);

  batch.Clear(batch.expert_rows());
  batch.Clear(batch.home_rows());
  batch.DispatchScaled(dispatcher);
  batch.Return(dispatcher);
  ASSERT_TRUE(stream.Synchronize().ok()) << stream.Synchronize();
  batch.ExpectRows(true);
}

// One dispatcher of each kind takes all cases of a group, one after the other.
template <typename T>
void ExpectRowsGoWhereTheWorldsSay(const std::vector<WorldCase>& cases, EnvStream kind) {
  const int ranks = cases.front().ranks;
  const std::vector<SolvedWorld> worlds(cases.begin(), cases.end());
  Env().Run(ranks, kTimeout, kind, [&](Communicator& comm, Stream& stream) {
    for (const DispatcherOptions& options : AllOptions(ranks)) {
      const auto dispatcher = Dispatcher<T>::Create(options, comm).value();
      for (size_t i = 0; i < cases.size(); ++i) {
        SCOPED_TRACE(Describe(cases[i], options, comm.rank()));
        ExpectRowsGoWhereTheWorldSays<T>(worlds[i], cases[i], *dispatcher, comm, stream);
      }
    }
  });
}

TYPED_TEST(DispatcherTest, MovesEveryRowToItsPlaceAndBack) {
  for (const auto& [ranks, cases] : WorldCases(Env().max_ranks())) {
    ExpectRowsGoWhereTheWorldsSay<TypeParam>(cases, EnvStream::kInline);
  }
}

TYPED_TEST(DispatcherTest, MovesTheSameRowsFromAQueue) {
  for (const auto& [ranks, cases] : WorldCases(std::min(4, Env().max_ranks()))) {
    if (ranks > 2) ExpectRowsGoWhereTheWorldsSay<TypeParam>(cases, EnvStream::kQueue);
  }
}

// Calls body(dispatcher, comm, workspace, stream) with each kind of dispatcher on all ranks of `c`.
template <typename T, typename Body>
void WithEachDispatcher(const WorldCase& c, EnvStream kind, const Body& body) {
  for (const DispatcherOptions& options : AllOptions(c.ranks)) {
    Env().Run(c.ranks, kTimeout, kind, [&](Communicator& comm, Stream& stream) {
      SCOPED_TRACE(Describe(c, options, comm.rank()));
      Workspace workspace;
      const auto dispatcher = Dispatcher<T>::Create(options, comm).value();
      body(*dispatcher, comm, workspace, stream);
    });
  }
}

// Batches of many sizes follow each other without a wait, there and back one by one or all there
// before any comes back: peer memory grows while earlier batches are still in the queue, is used
// again without mixing them up, and what one call published is not overwritten by the next while
// slower ranks still read it.
TYPED_TEST(DispatcherTest, BatchesFollowEachOtherInAQueueWithoutWaiting) {
  using T = TypeParam;
  const int ranks = std::min(4, Env().max_ranks());
  std::vector<WorldCase> cases;
  std::vector<SolvedWorld> worlds;
  for (const int64_t tokens : {5, 60, 60, 60, 7, 90}) {
    cases.push_back({.name = "sequence",
                     .ranks = ranks,
                     .experts = 9,
                     .tokens = {tokens, 0, tokens / 2},
                     .overlap = 2,
                     .seed = static_cast<uint64_t>(tokens)});
    worlds.emplace_back(cases.back());
  }
  const auto follow = [&](Dispatcher<T>& dispatcher, Communicator& comm, Workspace& workspace,
                          Stream& stream) {
    for (const bool one_by_one : {true, false}) {
      std::vector<std::unique_ptr<Batch<T>>> batches;
      for (size_t i = 0; i < cases.size(); ++i) {
        batches.push_back(std::make_unique<Batch<T>>(worlds[i], cases[i], dispatcher, 40, 100 * i,
                                                     comm, workspace, stream));
      }
      for (auto& batch : batches) {
        batch->Dispatch(dispatcher);
        if (one_by_one) batch->Return(dispatcher);
      }
      for (auto& batch : batches) {
        if (!one_by_one) batch->Return(dispatcher);
      }
      ASSERT_TRUE(stream.Synchronize().ok()) << stream.Synchronize();
      for (auto& batch : batches) batch->ExpectRows(false);
    }
  };
  WithEachDispatcher<T>(cases[0], EnvStream::kQueue, follow);
}

// 4 ranks on 2 nodes, 8 experts, every token to all of them, 10 tokens a rank, H = 8: a rank has 10
// distinct tokens and 20 kept slots for every rank.
TYPED_TEST(DispatcherTest, CountsBytesByWhereTheyGo) {
  using T = TypeParam;
  if (Env().max_ranks() < 4) GTEST_SKIP() << "needs 4 ranks";
  const WorldCase c = {.name = "bytes", .ranks = 4, .experts = 8, .top_k = 8, .tokens = {10}};
  const SolvedWorld world(c);
  const int64_t row = 8 * sizeof(T), tokens = 10 * row, slots = 20 * row, weights = 20 * 4;
  const auto run_on = [&](int node_size, DispatchAlgorithm algorithm, auto expect) {
    Env().Run(4, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream& stream) {
      Workspace workspace;
      const uint64_t host = node_size == 0 ? 7 + comm.rank() / 2 : 7;
      auto dispatcher = Dispatcher<T>::Create({.algorithm = algorithm, .node_size = node_size},
                                              comm, CpuMemory(), host)
                            .value();
      if (dispatcher->algorithm() != algorithm) return;  // no peer memory here
      Batch<T> batch(world, c, *dispatcher, 8, 1, comm, workspace, stream);
      ExchangeBytes before;
      const auto step = [&](const char* what, int64_t self, int64_t same, int64_t cross) {
        const ExchangeBytes now = dispatcher->bytes();
        EXPECT_EQ(now.self - before.self, self) << what;
        EXPECT_EQ(now.same_node - before.same_node, same) << what;
        EXPECT_EQ(now.cross_node - before.cross_node, cross) << what;
        before = now;
      };
      expect(*dispatcher, batch, step);
      ASSERT_TRUE(stream.Synchronize().ok());
    });
  };
  const auto run = [&](DispatchAlgorithm algorithm, auto expect) {
    run_on(2, algorithm, expect);  // of one host, every two ranks as a node
    run_on(0, algorithm, expect);  // two ranks on each of two hosts
  };
  run(DispatchAlgorithm::kStaged, [&](auto& dispatcher, auto& batch, auto step) {
    batch.Dispatch(dispatcher);  // a token travels once to each rank, not once per expert
    step("dispatch", tokens, tokens, 2 * tokens);
    batch.DispatchScaled(dispatcher);
    step("scaled", tokens + weights, tokens + weights, 2 * (tokens + weights));
    batch.Return(dispatcher);
    step("return", slots, slots, 2 * slots);
  });
  run(DispatchAlgorithm::kDirect, [&](auto& dispatcher, auto& batch, auto step) {
    batch.Dispatch(dispatcher);
    step("dispatch", slots, slots, 2 * slots);
    batch.DispatchScaled(dispatcher);
    step("scaled", slots + weights, slots + weights, 2 * (slots + weights));
    batch.Return(dispatcher);
    step("return", slots, slots, 2 * slots);
  });
  // Along the rail 10 tokens for each node, one of which is the own; in the node 40, half of which
  // stay. Weights and rows that return make one hop.
  run(DispatchAlgorithm::kHierarchical, [&](auto& dispatcher, auto& batch, auto step) {
    batch.Dispatch(dispatcher);  // a token travels once to each node
    step("dispatch", 3 * tokens, 2 * tokens, tokens);
    batch.DispatchScaled(dispatcher);
    step("scaled", 3 * tokens + weights, 2 * tokens + weights, tokens + 2 * weights);
    batch.Return(dispatcher);
    step("return", slots, slots, 2 * slots);
  });
}

// Three ranks are on the first host and one on the second: nodes of two hops are lone ranks.
TYPED_TEST(DispatcherTest, CountsBytesByHostsOfDifferentSize) {
  using T = TypeParam;
  if (Env().max_ranks() < 4) GTEST_SKIP() << "needs 4 ranks";
  const WorldCase c = {.name = "bytes", .ranks = 4, .experts = 8, .top_k = 8, .tokens = {10}};
  const SolvedWorld world(c);
  const int64_t tokens = 10 * 8 * sizeof(T);
  for (const auto algorithm : {DispatchAlgorithm::kStaged, DispatchAlgorithm::kHierarchical}) {
    Env().Run(4, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream& stream) {
      Workspace workspace;
      auto dispatcher =
          Dispatcher<T>::Create({.algorithm = algorithm}, comm, CpuMemory(), comm.rank() / 3)
              .value();
      Batch<T> batch(world, c, *dispatcher, 8, 1, comm, workspace, stream);
      batch.Dispatch(*dispatcher);
      ASSERT_TRUE(stream.Synchronize().ok());
      const ExchangeBytes& bytes = dispatcher->bytes();
      EXPECT_EQ(bytes.same_node, comm.rank() < 3 ? 2 * tokens : 0);
      EXPECT_EQ(bytes.cross_node, comm.rank() < 3 ? tokens : 3 * tokens);
    });
  }
}

TYPED_TEST(DispatcherTest, RefusesBadArgumentsBeforeAnythingIsSent) {
  using T = TypeParam;
  const WorldCase c = {.name = "bad", .ranks = 1, .experts = 3, .tokens = {4}};
  const SolvedWorld world(c);
  const auto refuses = [&](Dispatcher<T>& dispatcher, Communicator& comm, Workspace& workspace,
                           Stream& stream) {
    Batch<T> batch(world, c, dispatcher, 6, 1, comm, workspace, stream);
    const DispatchPlan& plan = batch.plan();
    const auto x = batch.x();
    const auto rows = batch.expert_rows(), home = batch.home_rows();
    const std::vector<float> weight(plan.slots(), 1.0f);
    const auto out = dispatcher.ReturnBuffer(plan, 6, workspace).value();
    const auto code = absl::StatusCode::kInvalidArgument;
    const auto dispatch = [&](int chunk, MatrixView<const T> from, MatrixView<T> to) {
      return dispatcher.Dispatch(batch.Call(chunk), from, to).code();
    };
    EXPECT_EQ(dispatch(-1, x, rows), code);
    EXPECT_EQ(dispatch(1, x, rows), code);
    EXPECT_EQ(dispatch(0, RowRange(x, 0, 3), rows), code);
    EXPECT_EQ(dispatch(0, x, RowRange(rows, 0, 7)), code);
    EXPECT_EQ(dispatch(0, {x.data(), 4, 5, x.stride()}, rows), code);
    EXPECT_EQ(dispatcher.DispatchScaled(batch.Call(0), x, {weight.data(), 7}, rows).code(), code);
    const auto back = [&](MatrixView<const T> from, MatrixView<T> to) {
      return dispatcher.Return(batch.Call(0), from, to).code();
    };
    EXPECT_EQ(back(RowRange(MatrixView<const T>(out), 0, 7), home), code);
    EXPECT_EQ(back(out, RowRange(home, 0, 7)), code);
    EXPECT_EQ(back(out, {home.data(), 4, 6, 12}), code);
    if (dispatcher.algorithm() == DispatchAlgorithm::kDirect) {
      EXPECT_EQ(back(rows, home), code);  // not from ReturnBuffer
    }
    EXPECT_EQ(dispatcher.bytes().self, 0);
    EXPECT_TRUE(stream.Synchronize().ok());
  };
  WithEachDispatcher<T>(c, EnvStream::kInline, refuses);
}

TEST(DispatcherCreateTest, RefusesANodeSizeThatDoesNotDivideTheGroup) {
  const int ranks = std::min(4, Env().max_ranks());
  Env().Run(ranks, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream&) {
    const auto create = [&](int node_size) {
      return Dispatcher<float>::Create(
                 {.algorithm = DispatchAlgorithm::kHierarchical, .node_size = node_size}, comm)
          .status();
    };
    EXPECT_EQ(create(-1).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(create(ranks + 1).code(), absl::StatusCode::kInvalidArgument);
    if (ranks == 4) {
      EXPECT_EQ(create(3).message(),
                "Dispatcher: node size 3 for 4 ranks, expected a divisor of them: 2 or 4");
    }
  });
}

TEST(DispatcherCreateTest, RefusesNodesWithRanksOfTwoHosts) {
  if (Env().max_ranks() < 4) GTEST_SKIP() << "needs 4 ranks";
  Env().Run(4, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream&) {
    const auto created =
        Dispatcher<float>::Create({.node_size = 4}, comm, CpuMemory(), comm.rank() / 2);
    EXPECT_EQ(created.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(created.status().message(),
              "Dispatcher: nodes of 4 ranks: ranks 1 and 2 of a group of 4 are on different hosts, "
              "expected nodes of 2");
  });
}

std::string* logged = nullptr;

TEST(DispatcherCreateTest, DirectWithoutPeerMemoryRunsStagedAndSaysSoOnce) {
  std::string log;
  logged = &log;
  SetLogCallback(
      [](LogLevel, absl::string_view message) { logged->append(message.data(), message.size()); });
  Env().Run(1, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream&) {
    ForwardingCommunicator plain(comm);  // everything but peer memory
    const auto dispatcher =
        Dispatcher<float>::Create({.algorithm = DispatchAlgorithm::kDirect}, plain).value();
    EXPECT_EQ(dispatcher->algorithm(), DispatchAlgorithm::kStaged);
    if (comm.rank() != 0) return;
    EXPECT_THAT(log, HasSubstr("running staged"));
    const std::string once = log;
    ASSERT_TRUE(Dispatcher<float>::Create({.algorithm = DispatchAlgorithm::kDirect}, plain).ok());
    EXPECT_EQ(log, once);
  });
  SetLogCallback(nullptr);
}

}  // namespace
}  // namespace moe::testing
