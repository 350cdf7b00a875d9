// Rows that ranks of a tensor group divide, and the segments of their gradients, by hand.
#include "moe/tensor/own_rows.h"

#include <cstdint>
#include <mutex>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/run/session.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using ::testing::ElementsAre;

struct Divided {
  std::vector<int64_t> offsets;
  std::vector<std::vector<int64_t>> segments;  // of each rank
};

std::vector<int64_t> ListOf(const RowOffsets& offsets) {
  return {offsets.data(), offsets.data() + offsets.size()};
}

template <typename RowsOn>
Divided Divide(int ranks, int leaves, Numerics numerics, RowsOn rows_on) {
  Divided divided;
  divided.segments.resize(static_cast<size_t>(ranks));
  std::mutex mu;
  const SessionOptions options = {
      .mesh = {.tensor = ranks, .expert = ranks}, .numerics = numerics, .tensor_leaves = leaves};
  testing::RunSessions(ranks, options, [&](Session& session) {
    const OwnRows own = rows_on(session.context());
    const std::lock_guard<std::mutex> lock(mu);
    divided.offsets = ListOf(own.offsets);
    divided.segments[own.rank] = ListOf(own.segments);
    return absl::OkStatus();
  });
  return divided;
}
Divided Divide(int ranks, int leaves, int64_t rows,
               Numerics numerics = Numerics::kLayoutInvariant) {
  return Divide(ranks, leaves, numerics,
                [rows](const Context& context) { return OwnRowsOf(context, rows); });
}

// Eight segments of 11 rows begin at 0, 1, 2, 4, 5, 6, 8 and 9.
TEST(OwnRowsTest, RanksHaveTheSegmentsOfTheirLeaves) {
  EXPECT_THAT(Divide(1, 8, 11).segments, ElementsAre(ElementsAre(0, 1, 2, 4, 5, 6, 8, 9, 11)));
  const Divided three = Divide(3, 8, 11);  // leaves [0, 3), [3, 6), [6, 8)
  EXPECT_THAT(three.offsets, ElementsAre(0, 4, 8, 11));
  EXPECT_THAT(three.segments,
              ElementsAre(ElementsAre(0, 1, 2, 4), ElementsAre(0, 1, 2, 4), ElementsAre(0, 1, 3)));
  // Fewer rows than ranks.
  const Divided few = Divide(4, 4, 2);
  EXPECT_THAT(few.offsets, ElementsAre(0, 0, 1, 1, 2));
  EXPECT_THAT(few.segments, ElementsAre(ElementsAre(0, 0), ElementsAre(0, 1), ElementsAre(0, 0),
                                        ElementsAre(0, 1)));
  EXPECT_THAT(Divide(2, 8, 0).offsets, ElementsAre(0, 0, 0));
}

TEST(OwnRowsTest, OneLeafIsOneSegmentAndSoAreFastNumerics) {
  EXPECT_THAT(Divide(1, 1, 11).segments, ElementsAre(ElementsAre(0, 11)));
  EXPECT_THAT(Divide(2, 8, 11, Numerics::kFast).segments,
              ElementsAre(ElementsAre(0, 5), ElementsAre(0, 6)));
}

// Rows 1, 4, 6, 7 and 10 of 11 are in segments 1, 3, 5, 5 and 7 of 8.
TEST(OwnRowsTest, PickedRowsHaveTheSegmentsOfAllRows) {
  const std::vector<int32_t> picked = {1, 4, 6, 7, 10};
  const Divided two = Divide(2, 8, Numerics::kLayoutInvariant, [&](const Context& context) {
    return OwnRowsAmong(context, 11, picked);
  });
  EXPECT_THAT(two.offsets, ElementsAre(0, 2, 5));
  EXPECT_THAT(two.segments, ElementsAre(ElementsAre(0, 0, 1, 1, 2), ElementsAre(0, 0, 2, 2, 3)));
}

TEST(OwnRowsTest, MicroBatchesOfACallHaveSegmentsOfTheirOwn) {
  testing::RunSessions(1, {.tensor_leaves = 2}, [&](Session& session) -> absl::Status {
    const Context& context = session.context();
    const int64_t offsets[] = {0, 5, 5, 7};
    MOE_ASSIGN_OR_RETURN(const auto segments,
                         SegmentsOf(offsets, context, *context.host_workspace));
    EXPECT_THAT(segments, ElementsAre(0, 2, 5, 5, 5, 6, 7));
    // Rows 1, 2, 3 and 6 are in segments 0, 1, 1 and 5.
    const int32_t picked[] = {1, 2, 3, 6};
    MOE_ASSIGN_OR_RETURN(const auto among,
                         SegmentsAmong(offsets, context, picked, *context.host_workspace));
    EXPECT_THAT(among, ElementsAre(0, 1, 3, 3, 3, 3, 4));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
