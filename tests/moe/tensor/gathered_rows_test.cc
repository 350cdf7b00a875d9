// GatheredRows: the order of rows that ranks gather, and whose sums come back.
#include "moe/tensor/gathered_rows.h"

#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/run/session.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using ::testing::ElementsAreArray;

constexpr int kNetworks = 3, kSources = 2, kRanks = 2;  // sources of each of the ranks

// Rows of a segment; some have none.
int RowsOfSegment(int network, int source, int micro_batch) {
  return (2 * network + source + 3 * micro_batch) % 4;
}
// Names network, source, micro-batch and number of a row.
float RowName(int network, int source, int micro_batch, int row) {
  return static_cast<float>(1000 * network + 100 * source + 10 * micro_batch + row);
}

struct Rows {
  std::vector<float> names;
  std::vector<int64_t> segments = {0};  // offsets
};
// Those of the sources first, first + step, ... of a block of kSources * kRanks.
Rows RowsOfSources(int first, int step, int micro_batches) {
  Rows rows;
  for (int l = 0; l < kNetworks; ++l) {
    for (int q = first; q < kSources * kRanks; q += step) {
      for (int b = 0; b < micro_batches; ++b) {
        for (int i = 0; i < RowsOfSegment(l, q, b); ++i) rows.names.push_back(RowName(l, q, b, i));
        rows.segments.push_back(std::ssize(rows.names));
      }
    }
  }
  return rows;
}

struct GatherCase {
  int micro_batches, together;
  std::vector<int32_t> first_network;
};

absl::Status Check(const GatherCase& c, const Context& context) {
  const TensorShare share = ShareOf(context, MeshGroup::kExpertTensor);
  const Rows mine = RowsOfSources(share.index, kRanks, c.micro_batches);
  const Rows expected = RowsOfSources(0, 1, c.micro_batches);
  MOE_ASSIGN_OR_RETURN(const GatheredRows rows,
                       GatheredRows::Create({.segments = mine.segments,
                                             .sources = kSources,
                                             .together = c.together,
                                             .first_network = c.first_network,
                                             .share = share},
                                            {.context = context}));
  std::vector<int64_t> segments;
  for (size_t s = 0; s < expected.segments.size(); s += c.together) {
    segments.push_back(expected.segments[s]);
  }
  EXPECT_THAT(rows.segments().host(), ElementsAreArray(segments));
  EXPECT_EQ(rows.rows(), std::ssize(expected.names));
  std::vector<float> all(expected.names.size()), sums(mine.names.size());
  const MatrixView<const float> own(mine.names.data(), std::ssize(mine.names), 1);
  const MatrixView<float> all_view(all.data(), rows.rows(), 1);
  const MatrixView<float> sums_view(sums.data(), own.rows(), 1);
  for (size_t chunk = 0; chunk + 1 < c.first_network.size(); ++chunk) {
    const int first = c.first_network[chunk], last = c.first_network[chunk + 1];
    MOE_RETURN_IF_ERROR(rows.Gather(context, first, last, own, all_view, {}));
    // The one node of this rank: 1 or 2 times the row.
    std::vector<float> nodes;
    const int64_t begin = rows.offsets().host()[first], end = rows.offsets().host()[last];
    for (int64_t i = begin; i < end; ++i) {
      nodes.push_back(all[i] * static_cast<float>(share.index + 1));
    }
    MOE_RETURN_IF_ERROR(rows.Sum<float>(context, first, last, {.leaves = 2, .extent = 2},
                                        {nodes.data(), end - begin, 1},
                                        rows.Own(sums_view, first, last), {}));
  }
  EXPECT_THAT(all, ElementsAreArray(expected.names));
  for (size_t i = 0; i < sums.size(); ++i) EXPECT_EQ(sums[i], 3 * mine.names[i]);
  return absl::OkStatus();
}

TEST(GatheredRowsTest, AreInTheOrderOfOneRankAndSumsGoBack) {
  for (const GatherCase& c : {GatherCase{1, 1, {0, 3}}, GatherCase{2, 1, {0, 1, 3}},
                              GatherCase{1, 2, {0, 2, 3}}, GatherCase{1, 4, {0, 3}}}) {
    SCOPED_TRACE(::testing::Message() << c.micro_batches << " micro-batches, " << c.together);
    testing::RunSessions(kRanks, {.mesh = {.expert_tensor = kRanks}, .tensor_leaves = 2},
                         [&](Session& session) { return Check(c, session.context()); });
  }
}

}  // namespace
}  // namespace moe
