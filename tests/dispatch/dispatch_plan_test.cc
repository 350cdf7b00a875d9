// dispatch/placement: contiguous blocks, as even as possible. dispatch/dispatch_plan: a routing map
// by hand, then every order against the brute-force world.
#include "dispatch/dispatch_plan.h"

#include <cstdint>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dispatch/placement.h"
#include "tests/comm/comm_env.h"
#include "tests/dispatch/dispatch_world.h"
#include "tests/moe/status_is.h"

namespace moe::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using enum absl::StatusCode;

TEST(ExpertPlacementTest, FirstRanksHoldOneMore) {
  const ExpertPlacement placement(8, 3);  // 0 1 2 | 3 4 5 | 6 7
  EXPECT_EQ(placement.FirstExpert(0), 0);
  EXPECT_EQ(placement.FirstExpert(1), 3);
  EXPECT_EQ(placement.FirstExpert(2), 6);
  EXPECT_EQ(placement.FirstExpert(3), 8);
  EXPECT_EQ(placement.LocalExperts(2), 2);
  EXPECT_EQ(placement.RankOf(5), 1);
  EXPECT_EQ(placement.RankOf(6), 2);
}

TEST(ExpertPlacementTest, EveryExpertIsOnOneRankAndCountsDifferByOneAtMost) {
  for (int32_t experts = 1; experts <= 20; ++experts) {
    for (int ranks = 1; ranks <= 23; ++ranks) {
      const ExpertPlacement placement(experts, ranks);
      ASSERT_EQ(placement.FirstExpert(0), 0);
      ASSERT_EQ(placement.FirstExpert(ranks), experts);
      for (int r = 0; r < ranks; ++r) {
        ASSERT_GE(placement.LocalExperts(r), experts / ranks);
        ASSERT_LE(placement.LocalExperts(r), (experts + ranks - 1) / ranks);
        ASSERT_LE(placement.LocalExperts(r), placement.LocalExperts(r > 0 ? r - 1 : 0));
        for (int32_t e = placement.FirstExpert(r); e < placement.FirstExpert(r + 1); ++e) {
          ASSERT_EQ(placement.RankOf(e), r) << experts << " experts, " << ranks << " ranks";
        }
      }
    }
  }
}

absl::StatusOr<DispatchPlan> Build(const World& world, const DispatchPlanOptions& options,
                                   Communicator& comm, Workspace& workspace, Stream& stream) {
  return DispatchPlan::Build({.routing = world.view(comm.rank()),
                              .micro_batch_offsets = world.routing[comm.rank()].micro_batch_offsets,
                              .placement = {world.experts, world.ranks},
                              .options = options,
                              .comm = comm},
                             workspace, stream);
}

// 3 ranks, 4 experts, top-2. Experts 0 and 1 live on rank 0, expert 2 on rank 1, expert 3 on rank
// 2.
//
//   rank 0, tokens a b c      rank 1, no tokens      rank 2, tokens p q
//     a -> 0 1                                         p -> 3 1
//     b -> 2 0                                         q -> 0 1 (1 is dropped)
//     c -> 3 2
//
// Experts read, sorted by (expert, source rank, token, choice):
//   rank 0: expert 0: a b q      expert 1: a p        a's two rows read one received row
//   rank 1: expert 2: b c
//   rank 2: expert 3: c p
World HandMadeWorld() {
  World w{.experts = 4, .num_experts = 4, .ranks = 3, .chunks = 1};
  const auto rank = [](std::vector<int64_t> offset, std::vector<int32_t> expert,
                       std::vector<uint8_t> dropped) {
    const auto slots = expert.size();
    const int64_t tokens = static_cast<int64_t>(offset.size()) - 1;
    return RankRouting{std::move(offset),
                       {0, tokens},
                       std::move(expert),
                       std::vector<float>(slots, 0.5f),
                       std::move(dropped)};
  };
  w.routing = {rank({0, 2, 4, 6}, {0, 1, 2, 0, 3, 2}, {0, 0, 0, 0, 0, 0}), rank({0}, {}, {}),
               rank({0, 2, 4}, {3, 1, 0, 1}, {0, 0, 0, 1})};
  return w;
}

// The same world with four rows for each expert, of which its ranks share one micro-batch: those
// that no slot fills come from the last rank alone, behind its own.
TEST(DispatchPlanTest, RanksThatShareAMicroBatchFillItUpTogether) {
  if (Env().max_ranks() < 3) GTEST_SKIP() << "needs 3 ranks";
  World world = HandMadeWorld();
  world.padded_rows = 4;
  Env().Run(3, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream& stream) {
    Workspace workspace;
    const std::vector<int32_t> none(4), last = {1, 2, 2, 2};
    const auto build = [&](const World& of, const DispatchPlanOptions& options) {
      Routing routing = of.view(comm.rank());
      routing.padding = comm.rank() == 2 ? last : none;
      return DispatchPlan::Build(
          {.routing = routing, .placement = {4, 3}, .options = options, .comm = comm}, workspace,
          stream);
    };
    const DispatchPlan plan = build(world, {}).value();
    const DispatchPlan reading = build(world, {.reads_peers = true}).value();
    if (comm.rank() == 0) {
      EXPECT_THAT(plan.expert_offsets().host(), ElementsAre(0, 4, 8));
      EXPECT_THAT(plan.segment_offsets().host(), ElementsAre(0, 2, 2, 4, 5, 5, 8));
      // a b q and an empty place | a p and two
      EXPECT_THAT(reading.expert_token(0), ElementsAre(0, 1, 1, -1, 0, 0, -1, -1));
      EXPECT_EQ(plan.return_rows(), 6);  // one for each of its slots
    }
    if (comm.rank() == 2) {
      EXPECT_THAT(plan.kept_slots(), ElementsAre(1, 1, 0, 1));
      EXPECT_EQ(plan.return_rows(), 3 + 7);
    }
    World unpadded = world;
    unpadded.padded_rows = 0;
    EXPECT_THAT(build(unpadded, {}), StatusIs(kInvalidArgument, "padding [4] with padded_rows 0"));
  });
}

TEST(DispatchPlanTest, FollowsTheMapByHand) {
  if (Env().max_ranks() < 3) GTEST_SKIP() << "needs 3 ranks";
  const World world = HandMadeWorld();
  Env().Run(3, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream& stream) {
    Workspace workspace;
    const DispatchPlan plan = Build(world, {}, comm, workspace, stream).value();
    const DispatchPlan reading =
        Build(world, {.reads_peers = true}, comm, workspace, stream).value();
    EXPECT_EQ(plan.chunks(), 1);
    EXPECT_EQ(plan.segments(), 3);  // 3 ranks, 1 micro-batch
    if (comm.rank() == 0) {
      EXPECT_THAT(plan.send_token(0), ElementsAre(0, 1, 1, 2, 2));  // a b | b c | c
      EXPECT_THAT(plan.expert_offsets().host(), ElementsAre(0, 3, 5));
      EXPECT_THAT(plan.segment_offsets().host(), ElementsAre(0, 2, 2, 3, 4, 4, 5));
      EXPECT_THAT(reading.expert_peer(0), ElementsAre(0, 0, 2, 0, 2));
      EXPECT_THAT(reading.expert_token(0), ElementsAre(0, 1, 1, 0, 0));  // a b q | a p
      // Received: a b from rank 0, p q from rank 2.
      EXPECT_THAT(plan.expert_source(0), ElementsAre(0, 1, 3, 0, 2));
      // Home rows: a0 b0 | a1 || b2 c2 || c3
      EXPECT_THAT(plan.home_row_of_slot(), ElementsAre(0, 2, 3, 1, 5, 4));
      EXPECT_THAT(reading.home_peer(0), ElementsAre(0, 0, 0, 1, 1, 2));
      EXPECT_THAT(reading.home_source(0), ElementsAre(0, 1, 3, 0, 1, 0));
      // To rank 0: a b, a; to rank 2: q, p.
      EXPECT_THAT(plan.return_order(0), ElementsAre(0, 1, 3, 2, 4));
      EXPECT_EQ(plan.PeerHomeRow(1, 2), 1);  // at rank 2: q0 p1 | p3
    }
    if (comm.rank() == 1) {
      EXPECT_EQ(plan.tokens(), 0);
      EXPECT_THAT(plan.send_token(0), IsEmpty());
      EXPECT_THAT(plan.expert_offsets().host(), ElementsAre(0, 2));
      EXPECT_THAT(plan.segment_offsets().host(), ElementsAre(0, 2, 2, 2));
      EXPECT_THAT(reading.expert_token(0), ElementsAre(1, 2));
    }
    if (comm.rank() == 2) {
      EXPECT_THAT(plan.send_token(0), ElementsAre(0, 1, 0));  // p q | p: q travels once
      EXPECT_THAT(plan.home_row_of_slot(), ElementsAre(2, 1, 0, -1));
      EXPECT_THAT(reading.expert_peer(0), ElementsAre(0, 2));
      EXPECT_THAT(reading.expert_token(0), ElementsAre(2, 0));
    }
  });
}

bool SendsRows(const DispatchPlan& plan) {
  return plan.ranks() > 1 && !plan.reads_peers();
}

// Ranks in the order in which their rows arrive: by (local rank, node) where there are nodes.
std::vector<int> SourcesOf(const DispatchPlan& plan) {
  const int step = std::max(1, plan.node_size());
  std::vector<int> sources;
  for (int local = 0; local < step; ++local) {
    for (int r = local; r < plan.ranks(); r += step) sources.push_back(r);
  }
  return sources;
}

// Tokens that `source` sends to the ranks of `node`, each once.
std::vector<int64_t> NodeTokens(const World& world, const DispatchPlan& plan, int chunk, int source,
                                int node) {
  std::set<int64_t> tokens;
  for (int r = node * plan.node_size(); r < (node + 1) * plan.node_size(); ++r) {
    const auto for_rank = world.SendTokens(chunk, source, r);
    tokens.insert(for_rank.begin(), for_rank.end());
  }
  return {tokens.begin(), tokens.end()};
}

bool Relays(const World& world, const DispatchPlan& plan) {
  return plan.ranks() > 1 && plan.node_size() > 0 && world.padded_rows == 0;
}

void ExpectRelays(const World& world, const DispatchPlan& plan) {
  if (!Relays(world, plan)) {
    EXPECT_THAT(plan.rail_sent(0), IsEmpty());
    EXPECT_THAT(plan.rail_received(0), IsEmpty());
    EXPECT_THAT(plan.relay_source(0), IsEmpty());
    return;
  }
  const int s = plan.node_size(), node = plan.rank() / s, nodes = plan.ranks() / s;
  for (int c = 0; c < plan.chunks(); ++c) {
    std::vector<OracleRow> came, relayed, want;
    std::vector<int32_t> sent, received;
    for (int m = 0; m < nodes; ++m) {
      const int source = m * s + plan.rank() % s;
      const auto tokens = NodeTokens(world, plan, c, source, node);
      for (const int64_t t : tokens) came.push_back({source, t, -1});
      received.push_back(static_cast<int32_t>(tokens.size()));
      sent.push_back(static_cast<int32_t>(NodeTokens(world, plan, c, plan.rank(), m).size()));
    }
    for (int r = node * s; r < (node + 1) * s; ++r) {
      for (int m = 0; m < nodes; ++m) {
        const int source = m * s + plan.rank() % s;
        for (const int64_t t : world.SendTokens(c, source, r)) want.push_back({source, t, -1});
      }
    }
    for (const int32_t row : plan.relay_source(c)) relayed.push_back(came.at(row));
    EXPECT_EQ(plan.rail_sent(c), absl::MakeConstSpan(sent));
    EXPECT_EQ(plan.rail_received(c), absl::MakeConstSpan(received));
    EXPECT_EQ(relayed, want);
  }
}

void ExpectExpertSide(const World& world, const DispatchPlan& plan) {
  const int me = plan.rank();
  const int32_t first = world.FirstExpert(me), local = world.FirstExpert(me + 1) - first;
  const std::vector<OracleRow> want = world.ExpertRows(me);
  const bool sends = SendsRows(plan);
  ASSERT_EQ(plan.expert_rows(), static_cast<int64_t>(want.size()));

  std::vector<int64_t> expert_offsets = {0}, segment_offsets = {0};
  for (int32_t l = 0; l < local; ++l) {
    for (int r = 0; r < world.ranks; ++r) {
      for (const auto& segment : world.Segments(first + l, r)) {
        segment_offsets.push_back(segment_offsets.back() + static_cast<int64_t>(segment.size()));
      }
    }
    expert_offsets.push_back(segment_offsets.back());
  }
  EXPECT_EQ(plan.segments(), world.ranks * world.micro_batches);
  EXPECT_EQ(plan.expert_offsets().host(), absl::MakeConstSpan(expert_offsets));
  EXPECT_EQ(plan.segment_offsets().host(), absl::MakeConstSpan(segment_offsets));

  std::vector<std::vector<OracleRow>> home_of(world.ranks);
  for (int r = 0; r < world.ranks; ++r) home_of[r] = world.HomeRows(r);
  for (int c = 0; c < plan.chunks(); ++c) {
    std::vector<OracleRow> received;
    for (const int r : SourcesOf(plan)) {
      for (const int64_t token : world.SendTokens(c, r, me)) received.push_back({r, token, -1});
    }
    const int64_t chunk_rows = plan.expert_begin(c + 1) - plan.expert_begin(c);
    ASSERT_EQ(plan.recv_begin(c + 1) - plan.recv_begin(c),
              sends ? static_cast<int64_t>(received.size()) : chunk_rows);
    const auto expect_rows = [=](absl::Span<const int32_t> rows, bool there) {
      ASSERT_EQ(static_cast<int64_t>(rows.size()), there ? chunk_rows : 0);
    };
    expect_rows(plan.expert_source(c), sends);
    expect_rows(plan.return_place(c), sends);
    expect_rows(plan.return_order(c), !plan.reads_peers());
    expect_rows(plan.expert_token(c), !sends);
    expect_rows(plan.expert_peer(c), plan.reads_peers());
    expect_rows(plan.expert_home_row(c), plan.reads_peers());
    for (int64_t n = plan.expert_begin(c); n < plan.expert_begin(c + 1); ++n) {
      const int64_t i = n - plan.expert_begin(c);
      EXPECT_EQ(world.ChunkOf(first + plan.chunk_first_expert()[c]), c);
      if (sends) {
        const OracleRow& from = received[plan.expert_source(c)[i]];
        EXPECT_EQ(from.source, want[n].source) << "expert row " << n;
        EXPECT_EQ(from.token, want[n].token) << "expert row " << n;
        EXPECT_EQ(plan.return_order(c)[plan.return_place(c)[i]], n);
      } else {
        EXPECT_EQ(plan.expert_token(c)[i], want[n].token) << "expert row " << n;
      }
      if (!plan.reads_peers()) continue;
      EXPECT_EQ(plan.expert_peer(c)[i], want[n].source) << "expert row " << n;
      const OracleRow& back = home_of[want[n].source][plan.expert_home_row(c)[i]];
      EXPECT_EQ(back.token, want[n].token) << "expert row " << n;
      EXPECT_EQ(back.slot, want[n].slot) << "expert row " << n;
    }
    if (plan.reads_peers()) continue;
    // Sorted by home; within one home in expert-row order.
    std::vector<int32_t> order;
    for (int home = 0; home < world.ranks; ++home) {
      for (int64_t n = plan.expert_begin(c); n < plan.expert_begin(c + 1); ++n) {
        if (want[n].source == home) order.push_back(static_cast<int32_t>(n));
      }
    }
    EXPECT_EQ(plan.return_order(c), absl::MakeConstSpan(order));
  }
  EXPECT_EQ(plan.expert_begin(plan.chunks()), plan.expert_rows());
}

void ExpectHomeSide(const World& world, const DispatchPlan& plan) {
  const int me = plan.rank();
  const RankRouting& mine = world.routing[me];
  for (int c = 0; c < plan.chunks(); ++c) {
    std::vector<int32_t> tokens;
    const auto add = [&](const std::vector<int64_t>& sent) {
      for (const int64_t t : sent) tokens.push_back(static_cast<int32_t>(t));
    };
    if (Relays(world, plan)) {
      for (int m = 0; m < plan.ranks() / plan.node_size(); ++m) {
        add(NodeTokens(world, plan, c, me, m));
      }
    } else if (SendsRows(plan)) {
      for (int r = 0; r < world.ranks; ++r) add(world.SendTokens(c, me, r));
    }
    EXPECT_EQ(plan.send_token(c), absl::MakeConstSpan(tokens)) << "chunk " << c;
  }
  const std::vector<OracleRow> home = world.HomeRows(me);
  ASSERT_EQ(plan.return_rows(), static_cast<int64_t>(home.size()));
  EXPECT_EQ(plan.home_begin(plan.chunks()), plan.return_rows());
  for (int64_t row = 0; row < plan.return_rows(); ++row) {
    EXPECT_EQ(plan.home_slot()[row], home[row].slot) << "home row " << row;
  }
  for (size_t s = 0; s < mine.expert.size(); ++s) {
    const int32_t row = plan.home_row_of_slot()[s];
    if (!world.Kept(me, static_cast<int64_t>(s))) {
      EXPECT_EQ(row, -1) << "slot " << s;
      continue;
    }
    ASSERT_GE(row, 0) << "slot " << s;
    EXPECT_EQ(home[row].slot, static_cast<int64_t>(s));
    const int c = world.ChunkOf(mine.expert[s]), owner = world.Owner(mine.expert[s]);
    if (!plan.reads_peers()) continue;
    const int64_t i = row - plan.home_begin(c);
    EXPECT_EQ(plan.home_peer(c)[i], owner) << "slot " << s;
    const std::vector<OracleRow> there = world.ExpertRows(owner);
    EXPECT_EQ(there[plan.home_source(c)[i]], home[row]) << "slot " << s;
  }
}

void ExpectTables(const World& world, const DispatchPlan& plan) {
  int64_t max_tokens = 0, max_return = 0, max_expert = 0;
  for (int r = 0; r < world.ranks; ++r) {
    max_tokens = std::max(max_tokens, world.routing[r].tokens());
    max_return = std::max(max_return, static_cast<int64_t>(world.HomeRows(r).size()));
    max_expert = std::max(max_expert, static_cast<int64_t>(world.ExpertRows(r).size()));
  }
  EXPECT_EQ(plan.max_tokens(), max_tokens);
  EXPECT_EQ(plan.max_return_rows(), max_return);
  EXPECT_EQ(plan.max_expert_rows(), max_expert);
  for (int source = 0; source < world.ranks; ++source) {
    for (int to = 0; to < world.ranks; ++to) {
      std::vector<int64_t> rows(plan.chunks());
      for (int32_t e = world.FirstExpert(to); e < world.FirstExpert(to + 1); ++e) {
        for (const auto& segment : world.Segments(e, source)) {
          rows[world.ChunkOf(e)] += static_cast<int64_t>(segment.size());
        }
        if (to == plan.rank()) {
          EXPECT_EQ(plan.PeerHomeRow(e - world.FirstExpert(to), source),
                    world.HomeBegin(source, e));
        }
      }
      for (int c = 0; c < plan.chunks(); ++c) {
        EXPECT_EQ(plan.ExpertRows(c, source, to), rows[c]);
        EXPECT_EQ(plan.SendRows(c, source, to),
                  SendsRows(plan) ? static_cast<int64_t>(world.SendTokens(c, source, to).size())
                                  : rows[c]);
      }
    }
  }
}

TEST(DispatchPlanTest, EqualsTheBruteForceWorld) {
  for (const auto& group : WorldCases(Env().max_ranks())) {
    Env().Run(group.first, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream& stream) {
      for (const WorldCase& c : group.second) {
        const World world = MakeWorld(c);
        std::ostringstream where;
        where << c << ", rank " << comm.rank();
        SCOPED_TRACE(where.str());
        std::vector<DispatchPlanOptions> all = {{}, {.reads_peers = true}};
        for (int s = 1; s <= c.ranks; ++s) {
          if (c.ranks % s == 0) all.push_back({.node_size = s});
        }
        for (DispatchPlanOptions options : all) {
          options.overlap_degree = c.overlap;
          Workspace workspace;
          const auto plan = Build(world, options, comm, workspace, stream).value();
          EXPECT_EQ(plan.reads_peers(), options.reads_peers);
          EXPECT_EQ(plan.node_size(), options.node_size);
          EXPECT_EQ(plan.chunks(), world.chunks);
          EXPECT_EQ(plan.tokens(), world.routing[comm.rank()].tokens());
          ExpectExpertSide(world, plan);
          ExpectHomeSide(world, plan);
          ExpectTables(world, plan);
          ExpectRelays(world, plan);
        }
      }
    });
  }
}

TEST(DispatchPlanTest, OneRankKeepsFourIntegersASlot) {
  const World world = MakeWorld({.ranks = 1, .experts = 8, .top_k = 4, .tokens = {4096}});
  Env().Run(1, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream& stream) {
    Workspace workspace;
    const auto plan = Build(world, {}, comm, workspace, stream).value();
    const int64_t tables = int64_t{16} << 10;  // bytes of the tables of experts and chunks
    EXPECT_LE(workspace.used_bytes(), 4 * 4 * plan.slots() + tables);
  });
}

// Refused by one rank alone: no other rank takes part, so a test that sent anything would time out.
TEST(DispatchPlanTest, RefusesABadRoutingBeforeAnythingIsSent) {
  const int ranks = std::min(2, Env().max_ranks());
  const World good = MakeWorld({.ranks = ranks, .experts = 4, .tokens = {5}});
  Env().Run(ranks, absl::Seconds(2), EnvStream::kInline, [&](Communicator& comm, Stream& stream) {
    if (comm.rank() != 0) return;
    const auto refused = [&](const World& world, const DispatchPlanOptions& options,
                             const char* message, std::vector<int64_t> micro_batches = {0, 5}) {
      Workspace workspace;
      EXPECT_THAT(DispatchPlan::Build({.routing = world.view(0),
                                       .micro_batch_offsets = micro_batches,
                                       .placement = {4, world.ranks},
                                       .options = options,
                                       .comm = comm},
                                      workspace, stream),
                  StatusIs(kInvalidArgument, message));
    };
    World bad = good;
    bad.routing[0].expert[3] = 4;
    refused(bad, {}, "slot 3 names expert 4, expected 0 .. 3");
    bad.routing[0].expert[3] = -1;
    refused(bad, {}, "slot 3 names expert -1");
    bad = good;
    bad.experts = bad.num_experts = 5;
    refused(bad, {}, "placement of 4 experts");
    bad = good;
    bad.ranks = ranks + 1;
    refused(bad, {}, "placement of 4 experts on");
    bad = good;
    bad.routing[0].slot_offset[2] = 100;
    refused(bad, {}, "slot_offset");
    bad = good;
    bad.routing[0].dropped.pop_back();
    refused(bad, {}, "dropped [9], expected [10]");
    bad = good;
    bad.padded_rows = 1;
    refused(bad, {}, "(padded_rows)");
    bad.padded_rows = -1;
    refused(bad, {}, "padded_rows -1");
    refused(good, {.overlap_degree = 0}, "overlap degree 0");
    refused(good, {.node_size = -1}, "node size -1, expected 0 or a divisor");
    refused(good, {.node_size = 3}, "node size 3, expected 0 or a divisor");
    refused(good, {}, "micro_batch_offsets", {0, 4});
    refused(good, {}, "micro_batch_offsets", {0, 4, 3, 5});
  });
}

TEST(DispatchPlanTest, RanksThatDisagreeAreRefusedOnAllOfThem) {
  const int ranks = std::min(3, Env().max_ranks());
  if (ranks < 2) GTEST_SKIP() << "needs 2 ranks";
  const World world = MakeWorld({.ranks = ranks, .experts = 4, .tokens = {2}});
  Env().Run(ranks, kTimeout, EnvStream::kInline, [&](Communicator& comm, Stream& stream) {
    Workspace workspace;
    World mine = world;
    const auto refused = [&](const DispatchPlanOptions& options, const char* message) {
      EXPECT_THAT(Build(mine, options, comm, workspace, stream),
                  StatusIs(kInvalidArgument, message));
    };
    const bool other = comm.rank() == 1;
    mine.padded_rows = other ? 9 : 8;
    refused({}, "padded_rows 9 on rank 1, expected 8 as on rank 0");
    mine.padded_rows = 0;
    refused({.overlap_degree = other ? 2 : 1},
            "overlap degree 2 on rank 1, expected 1 as on rank 0");
    refused({.node_size = other ? 1 : 0}, "node size 1 on rank 1, expected 0 as on rank 0");
    // Numbers of micro-batches that fit the first message, and larger ones.
    for (const auto& [few, many] : {std::pair(1, 2), std::pair(1, 9), std::pair(8, 9)}) {
      mine.routing[comm.rank()].micro_batch_offsets.assign(1 + (other ? many : few), 2);
      mine.routing[comm.rank()].micro_batch_offsets.front() = 0;
      refused({}, absl::StrCat("micro-batches ", many, " on rank 1, expected ", few).c_str());
    }
  });
}

}  // namespace
}  // namespace moe::testing
