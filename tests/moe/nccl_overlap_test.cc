// Exchanges and sums of gradients over NCCL find room beside the products of experts.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <gtest/gtest.h>

#include "moe/layer/moe_layer.h"
#include "moe/run/session.h"
#include "moe/train/gradient_reducer.h"
#include "tests/comm/nccl_ranks.h"
#include "tests/cusim/fake_streams.h"

namespace moe {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kRows = 8, kWidth = 64;
constexpr int kBlocks = 2;  // of NCCL's kernels, on devices of 4 multiprocessors

// Lets NCCL, and its communicators, know kBlocks.
class NcclOverlapTest : public ::testing::Test {
 protected:
  NcclOverlapTest() { setenv("NCCL_MAX_CTAS", std::to_string(kBlocks).c_str(), 1); }
  ~NcclOverlapTest() override { unsetenv("NCCL_MAX_CTAS"); }
};

struct Rank {
  std::unique_ptr<Session> session;
  Context context;
  std::unique_ptr<ParameterStore> store;
  std::unique_ptr<MoeLayer<BFloat16>> layer;
  std::unique_ptr<GradientReducer> reducer;

  // spare: whether products leave multiprocessors free.
  absl::Status Create(std::unique_ptr<Communicator> world, bool spare) {
    MOE_ASSIGN_OR_RETURN(session, Session::Create({.device = DeviceKind::kCuda,
                                                   .mesh = {.expert = kRanks},
                                                   .overlap_exchange = true},
                                                  std::move(world)));
    context = session->context();
    if (!spare) context.gemm.spare = nullptr;
    store = std::make_unique<ParameterStore>(DType::kBFloat16, 1, context);
    const MoeLayerConfig config = {.router = {.num_experts = 4, .top_k = 2, .hidden_size = kWidth},
                                   .ffn_hidden_size = kWidth,
                                   .overlap_degree = 2};
    MOE_ASSIGN_OR_RETURN(layer, MoeLayer<BFloat16>::Create(config, "", *store, context));
    MOE_ASSIGN_OR_RETURN(reducer, GradientReducer::Create({.max_terms = 64}, *store, context,
                                                          session->gradient_stream()));
    return reducer->Begin();
  }

  absl::Status Forward() {
    MOE_ASSIGN_OR_RETURN(
        const Buffer rows,
        Buffer::Allocate(2 * kRows * kWidth * int64_t{sizeof(BFloat16)}, *context.memory));
    const std::vector<BFloat16> ones(kRows * kWidth, BFloat16(1.0f));
    BFloat16* const x = rows.span<BFloat16>().data();
    MOE_RETURN_IF_ERROR(context.compute->Upload(
        ones.data(), x, static_cast<int64_t>(ones.size() * sizeof(BFloat16))));
    const StashHandle stash = session->stashes().Take();
    MOE_RETURN_IF_ERROR(layer->Forward({.context = context, .batch = {}, .stash = stash.get()},
                                       MatrixView<const BFloat16>(x, kRows, kWidth),
                                       {x + kRows * kWidth, kRows, kWidth}));
    return context.compute->Synchronize();
  }
};

// How often an exchange and a product were under way at the same time, in a few orders.
int64_t Overlaps(bool spare) {
  const cusim::ScopedMachine machine({.room = true});
  const int64_t before = cusim::Overlaps();
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    testing::RunNcclRanks({.ranks = kRanks, .seed = seed},
                          [&](absl::StatusOr<std::unique_ptr<Communicator>> comm, int) {
                            Rank rank;
                            ASSERT_TRUE(comm.ok()) << comm.status();
                            ASSERT_OK(rank.Create(*std::move(comm), spare));
                            EXPECT_OK(rank.Forward());
                          });
  }
  return cusim::Overlaps() - before;
}

TEST_F(NcclOverlapTest, ExchangesRunBesideProductsThatLeaveThemRoomAlone) {
  EXPECT_GT(Overlaps(true), 0);
  EXPECT_EQ(Overlaps(false), 0);
}

int PriorityOf(Stream& stream) {
  int priority = 0;
  EXPECT_OK(stream.Launch([&](void* native) {
    EXPECT_EQ(cudaStreamGetPriority(static_cast<cudaStream_t>(native), &priority), cudaSuccess);
    return absl::OkStatus();
  }));
  return priority;
}

TEST(SessionStreamsTest, WhatTravelsComesBeforeWhatComputes) {
  testing::RunNcclRanks(
      {.ranks = kRanks}, [](absl::StatusOr<std::unique_ptr<Communicator>> comm, int) {
        Rank rank;
        ASSERT_TRUE(comm.ok()) << comm.status();
        ASSERT_OK(rank.Create(*std::move(comm), true));
        const int compute = PriorityOf(*rank.context.compute);  // the lower number comes first
        EXPECT_LT(PriorityOf(*rank.context.exchange), compute);
        EXPECT_LT(PriorityOf(rank.session->gradient_stream()), compute);
        EXPECT_LT(PriorityOf(**rank.session->WeightStream()), compute);
      });
}

TEST_F(NcclOverlapTest, ProductsLeaveRoomWhileGradientsTravel) {
  testing::RunNcclRanks({.ranks = kRanks},
                        [](absl::StatusOr<std::unique_ptr<Communicator>> comm, int) {
                          Rank rank;
                          ASSERT_TRUE(comm.ok()) << comm.status();
                          ASSERT_OK(rank.Create(*std::move(comm), true));
                          const GemmOptions& products = rank.context.gemm;
                          EXPECT_EQ(products.spare_multiprocessors(), 0);
                          for (const auto& p : rank.store->parameters()) {
                            EXPECT_OK(rank.reducer->MarkReady(*p));
                          }
                          EXPECT_EQ(products.spare_multiprocessors(), kBlocks);
                          EXPECT_OK(rank.reducer->Finish());
                          EXPECT_EQ(products.spare_multiprocessors(), 0);
                          EXPECT_OK(rank.context.compute->Synchronize());
                        });
}

TEST(NcclKernelBlocksTest, AreSixteenUnlessNcclIsToldOtherwise) {
  for (const auto& [told, blocks] :
       {std::pair<const char*, int>{nullptr, 16}, {"4", 4}, {"many", 16}, {"0", 16}}) {
    if (told != nullptr) setenv("NCCL_MAX_CTAS", told, 1);
    for (const int ranks : {1, 2}) {
      testing::RunNcclRanks({.ranks = ranks},
                            [&](absl::StatusOr<std::unique_ptr<Communicator>> comm, int) {
                              ASSERT_TRUE(comm.ok()) << comm.status();
                              EXPECT_EQ((*comm)->kernel_blocks(), ranks > 1 ? blocks : 0);
                            });
    }
    unsetenv("NCCL_MAX_CTAS");
  }
}

}  // namespace
}  // namespace moe
