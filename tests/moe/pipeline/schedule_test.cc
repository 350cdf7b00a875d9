// Schedules as lists: simulated with the buffers of the runner's links.
#include "moe/pipeline/schedule.h"

#include <algorithm>
#include <map>
#include <ostream>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moe {

std::ostream& operator<<(std::ostream& out, const PipelineShape& shape) {
  return out << NameOf(shape.schedule, kScheduleWords) << ", " << shape.stages << " stages of "
             << shape.chunks;
}

namespace {

using ::testing::ElementsAre;

constexpr PipelineOp F(int64_t round, int32_t chunk = 0) {
  return {OpKind::kForward, chunk, round};
}
// Together with the backward behind it.
constexpr PipelineOp FWith(int64_t round, int32_t chunk = 0) {
  return {OpKind::kForward, chunk, round, true};
}
constexpr PipelineOp B(int64_t round, int32_t chunk = 0) {
  return {OpKind::kBackward, chunk, round};
}
constexpr PipelineOp W(int64_t round) {
  return {OpKind::kWeightGradient, 0, round};
}
bool HasWeightGradients(const PipelineShape& shape) {
  return shape.schedule == ScheduleKind::kZeroBubbleH1;
}

std::vector<PipelineOp> ListOf(const PipelineShape& shape, int stage, int64_t rounds,
                               bool backward = true) {
  std::vector<PipelineOp> ops;
  MakeSchedule(shape, stage, rounds, backward, ops);
  return ops;
}

std::vector<PipelineShape> Shapes() {
  std::vector<PipelineShape> shapes;
  for (int stages = 1; stages <= 8; ++stages) {
    shapes.push_back({ScheduleKind::kGPipe, stages});
    shapes.push_back({ScheduleKind::k1F1B, stages});
    shapes.push_back({ScheduleKind::kZeroBubbleH1, stages});
    shapes.push_back({ScheduleKind::k1F1BOverlap, stages});
    for (int chunks = 2; stages > 1 && chunks <= 4; ++chunks) {
      shapes.push_back({ScheduleKind::kInterleaved, stages, chunks});
      shapes.push_back({ScheduleKind::k1F1BOverlap, stages, chunks});
    }
  }
  return shapes;
}

constexpr int64_t kRounds[] = {1, 2, 3, 5, 8, 13, 32};

// Runs the lists of all stages. An operation starts when its stage is free and its rows are there;
// two that run together start and end together, and take as long as one behind the other.
// A stage asks for the next rows of a way when it begins with the ones before, and in an evaluation
// waits until its message but one has been taken.
class Simulation {
 public:
  Simulation(const PipelineShape& shape, int64_t rounds, bool backward)
      : shape_(shape), backward_(backward), free_(shape.stages), next_(shape.stages) {
    for (int s = 0; s < shape.stages; ++s) lists_.push_back(ListOf(shape, s, rounds, backward));
  }

  // Whether all operations ran, each of which takes one, and a backward with weight gradients two.
  bool Run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int s = 0; s < shape_.stages; ++s) {
        while (next_[s] < lists_[s].size() && Step(s)) moved = true;
      }
    }
    for (int s = 0; s < shape_.stages; ++s) {
      if (next_[s] < lists_[s].size()) return false;
    }
    return true;
  }
  double end() const { return *std::max_element(free_.begin(), free_.end()); }

 private:
  using Key = std::tuple<OpKind, int64_t, int>;  // round and part
  Key KeyOf(int s, const PipelineOp& op) const {
    return {op.kind, op.round, shape_.PartOf(s, op.chunk)};
  }
  bool Step(int s) {
    const size_t first = next_[s], last = first + (lists_[s][first].with_next ? 2 : 1);
    double start = free_[s], time = 0;
    for (size_t i = first; i < last; ++i) {
      const PipelineOp& op = lists_[s][i];
      if (!CanStart(s, op, start)) return false;
      const bool whole = op.kind == OpKind::kBackward && !HasWeightGradients(shape_);
      time += (whole ? 2.0 : 1.0) / shape_.chunks;
    }
    free_[s] = start + time;
    for (size_t i = first; i < last; ++i) done_[KeyOf(s, lists_[s][i])] = free_[s];
    next_[s] = last;
    return true;
  }
  // Raises `start` to when all that `op` needs is there; false: some has not ended yet.
  bool CanStart(int s, const PipelineOp& op, double& start) const {
    const int part = shape_.PartOf(s, op.chunk), last = shape_.parts() - 1;
    const bool is_forward = op.kind == OpKind::kForward;
    const auto needs = [&](const Key& key) {
      const auto found = done_.find(key);
      if (found == done_.end()) return false;
      start = std::max(start, found->second);
      return true;
    };
    if (is_forward && part > 0 && !needs({op.kind, op.round, part - 1})) return false;
    if (op.kind == OpKind::kBackward) {
      if (!needs({OpKind::kForward, op.round, part})) return false;
      if (part < last && !needs({op.kind, op.round, part + 1})) return false;
    }
    if (op.kind == OpKind::kWeightGradient && !needs({OpKind::kBackward, op.round, part})) {
      return false;
    }
    return backward_ || part == last || MessageButOneWasAskedFor(s);
  }
  // Messages sent by stage s so far, and those that the next stage has asked for: one more than it
  // has begun with.
  bool MessageButOneWasAskedFor(int s) const {
    const int to = (s + 1) % shape_.stages;
    int64_t sent = 0, asked = 1;
    for (size_t i = 0; i < next_[s]; ++i) {
      sent += shape_.PartOf(s, lists_[s][i].chunk) + 1 < shape_.parts() ? 1 : 0;
    }
    for (size_t i = 0; i < next_[to]; ++i) {
      asked += shape_.PartOf(to, lists_[to][i].chunk) > 0 ? 1 : 0;
    }
    return sent - 2 < asked;
  }

  const PipelineShape shape_;
  const bool backward_;
  std::vector<std::vector<PipelineOp>> lists_;
  std::vector<double> free_;
  std::vector<size_t> next_;
  std::map<Key, double> done_;
};

TEST(ScheduleTest, HandMadeLists) {
  EXPECT_THAT(ListOf({}, 0, 2), ElementsAre(F(0), B(0), F(1), B(1)));
  EXPECT_THAT(ListOf({}, 0, 2, false), ElementsAre(F(0), F(1)));
  const PipelineShape gpipe = {ScheduleKind::kGPipe, 2};
  EXPECT_THAT(ListOf(gpipe, 1, 2), ElementsAre(F(0), F(1), B(0), B(1)));
  const PipelineShape one = {ScheduleKind::k1F1B, 3};
  EXPECT_THAT(ListOf(one, 0, 4), ElementsAre(F(0), F(1), F(2), B(0), F(3), B(1), B(2), B(3)));
  EXPECT_THAT(ListOf(one, 1, 4), ElementsAre(F(0), F(1), B(0), F(2), B(1), F(3), B(2), B(3)));
  EXPECT_THAT(ListOf(one, 2, 2), ElementsAre(F(0), B(0), F(1), B(1)));
  EXPECT_THAT(ListOf(one, 0, 1), ElementsAre(F(0), B(0)));
  const PipelineShape zero_bubble = {ScheduleKind::kZeroBubbleH1, 2};
  EXPECT_THAT(ListOf(zero_bubble, 0, 3),
              ElementsAre(F(0), F(1), B(0), W(0), F(2), B(1), W(1), B(2), W(2)));
  EXPECT_THAT(ListOf(zero_bubble, 1, 3),
              ElementsAre(F(0), B(0), F(1), B(1), W(0), F(2), B(2), W(1), W(2)));
  // Figure 4 of arXiv:2104.04473, of two stages: the last one begins with as many forwards as
  // there are stages before its second chunk.
  const PipelineShape chunks = {ScheduleKind::kInterleaved, 2, 2};
  EXPECT_THAT(ListOf(chunks, 1, 2),
              ElementsAre(F(0), F(1), F(0, 1), B(0, 1), F(1, 1), B(1, 1), B(0), B(1)));
  const PipelineShape alone = {ScheduleKind::k1F1BOverlap, 1};
  EXPECT_THAT(ListOf(alone, 0, 3), ElementsAre(F(0), FWith(1), B(0), FWith(2), B(1), B(2)));
  EXPECT_THAT(ListOf(alone, 0, 2, false), ElementsAre(F(0), F(1)));
  const PipelineShape together = {ScheduleKind::k1F1BOverlap, 2, 2};
  EXPECT_THAT(ListOf(together, 1, 2),
              ElementsAre(F(0), F(1), F(0, 1), FWith(1, 1), B(0, 1), B(1, 1), B(0), B(1)));
}

TEST(ScheduleTest, ListsAreCompleteAndInOrder) {
  for (const PipelineShape& shape : Shapes()) {
    for (const int64_t given : kRounds) {
      const int64_t rounds = PaddedRounds(shape, given);
      ASSERT_GE(rounds, given);
      ASSERT_LT(rounds, given + shape.stages);
      for (int s = 0; s < shape.stages; ++s) {
        SCOPED_TRACE(::testing::Message() << shape << ", stage " << s << ", rounds " << rounds);
        const std::vector<PipelineOp> ops = ListOf(shape, s, rounds);
        const bool three = HasWeightGradients(shape);
        ASSERT_EQ(std::ssize(ops), (three ? 3 : 2) * rounds * shape.chunks);
        // Rounds of a chunk ascend, and each kind comes after the one before it.
        std::map<std::pair<OpKind, int>, int64_t> next;
        int64_t in_flight = 0, most = 0;
        for (size_t i = 0; i < ops.size(); ++i) {
          const PipelineOp& op = ops[i];
          if (op.with_next) {
            ASSERT_EQ(op.kind, OpKind::kForward);
            ASSERT_EQ(ops[i + 1].kind, OpKind::kBackward);
            ASSERT_LT(ops[i + 1].round, (next[{OpKind::kForward, ops[i + 1].chunk}]));
          }
          ASSERT_EQ(op.round, (next[{op.kind, op.chunk}]++));
          if (op.kind == OpKind::kBackward) {
            ASSERT_LT(op.round, (next[{OpKind::kForward, op.chunk}]));
          }
          if (op.kind == OpKind::kWeightGradient) {
            ASSERT_LT(op.round, (next[{OpKind::kBackward, op.chunk}]));
          }
          if (op.kind == OpKind::kForward) ++in_flight;
          if (op.kind == (three ? OpKind::kWeightGradient : OpKind::kBackward)) --in_flight;
          most = std::max(most, in_flight);
        }
        ASSERT_EQ(most, MostInFlight(shape, s, rounds));
      }
    }
  }
}

TEST(ScheduleTest, NeighboursSendAndReceiveInOneOrder) {
  for (const PipelineShape& shape : Shapes()) {
    if (shape.stages == 1) continue;
    const int64_t rounds = PaddedRounds(shape, 5);
    for (const OpKind kind : {OpKind::kForward, OpKind::kBackward}) {
      for (int s = 0; s < shape.stages; ++s) {
        const int to = (s + (kind == OpKind::kForward ? 1 : shape.stages - 1)) % shape.stages;
        std::vector<std::pair<int64_t, int>> sent, received;  // round and part of the receiver
        const int way = kind == OpKind::kForward ? 1 : -1;
        for (const PipelineOp& op : ListOf(shape, s, rounds)) {
          const int part = shape.PartOf(s, op.chunk) + way;
          if (op.kind == kind && part >= 0 && part < shape.parts())
            sent.push_back({op.round, part});
        }
        for (const PipelineOp& op : ListOf(shape, to, rounds)) {
          const int part = shape.PartOf(to, op.chunk), from = part - way;
          if (op.kind == kind && from >= 0 && from < shape.parts()) {
            received.push_back({op.round, part});
          }
        }
        ASSERT_EQ(sent, received) << shape << ", stage " << s;
      }
    }
  }
}

TEST(ScheduleTest, NoStageWaitsForever) {
  for (const PipelineShape& shape : Shapes()) {
    for (const int64_t given : kRounds) {
      for (const bool backward : {true, false}) {
        Simulation simulation(shape, PaddedRounds(shape, given), backward);
        ASSERT_TRUE(simulation.Run()) << shape << ", rounds " << given << " " << backward;
      }
    }
  }
}

// Idle time of the known closed forms, in passes of a whole stage: (p - 1)(F + B + W), a v-th of it
// with v chunks (arXiv:2104.04473, sections 2.1 and 2.2), (p - 1)(F + B - W) with zero bubble
// (arXiv:2401.10241, table 2).
TEST(ScheduleTest, IdleTimeIsThatOfTheClosedForms) {
  for (const PipelineShape& shape : Shapes()) {
    const int64_t rounds = 4 * shape.stages;
    Simulation simulation(shape, rounds, true);
    ASSERT_TRUE(simulation.Run());
    EXPECT_NEAR(simulation.end() - 3.0 * static_cast<double>(rounds),
                (HasWeightGradients(shape) ? 1.0 : 3.0) * (shape.stages - 1) / shape.chunks, 1e-9)
        << shape;
  }
}

TEST(ScheduleTest, ChunksFitTheSchedule) {
  EXPECT_TRUE(CheckPipeline({ScheduleKind::k1F1B, 4}).ok());
  EXPECT_TRUE(CheckPipeline({ScheduleKind::kInterleaved, 4, 2}).ok());
  EXPECT_TRUE(CheckPipeline({ScheduleKind::k1F1BOverlap, 4, 2}).ok());
  EXPECT_TRUE(CheckPipeline({ScheduleKind::k1F1BOverlap, 1, 1}).ok());
  for (const PipelineShape& bad :
       {PipelineShape{ScheduleKind::kGPipe, 4, 2}, PipelineShape{ScheduleKind::kZeroBubbleH1, 4, 2},
        PipelineShape{ScheduleKind::kInterleaved, 4, 1},
        PipelineShape{ScheduleKind::kInterleaved, 1, 2},
        PipelineShape{ScheduleKind::k1F1BOverlap, 1, 2},
        PipelineShape{ScheduleKind::k1F1B, 4, 0}}) {
    EXPECT_EQ(CheckPipeline(bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace moe
