// moe/zero/weight_pager.h: what has room, what a lease reads, and which experts stay; a model's
// bits are in paging_test.
#include "moe/zero/weight_pager.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/scratch_files.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

using Parameters = std::vector<Parameter*>;
using testing::StatusIs;

// Vectors of 10 bytes, three modules of 100, 300 and 200, and eight experts of 50. Frames have 10
// bytes more.
WeightSizes Sizes() {
  return {.vector_bytes = 10,
          .modules = {{100, 110}, {300, 310}, {200, 210}},
          .expert = {50, 60},
          .experts = 8};
}

TEST(RoomForTest, ModulesComeBeforeExperts) {
  const WeightRoom all = *RoomFor(Sizes(), 10 + 600 + 8 * 50);
  EXPECT_TRUE(all.all_experts);
  const WeightRoom most = *RoomFor(Sizes(), 10 + 600 + 8 * 50 - 1);
  EXPECT_FALSE(most.all_experts);
  EXPECT_EQ(most.resident, std::vector<bool>(3, true));
  EXPECT_EQ(most.expert_frames, 6);
  EXPECT_EQ(RoomFor(Sizes(), 10 + 600 + 60)->expert_frames, 1);
  EXPECT_EQ(RoomFor(Sizes(), 10 + 600 + 60)->module_frames, 0);
}

TEST(RoomForTest, ModulesThatDoNotFitPassThroughFrames) {
  // Less than all modules beside an expert: two frames of each, and the modules that still fit.
  const WeightRoom some = *RoomFor(Sizes(), 10 + 2 * 310 + 2 * 60 + 100 + 60);
  EXPECT_EQ(some.resident, (std::vector<bool>{true, true, true}));  // those fit beside an expert
  const WeightRoom two = *RoomFor({.modules = {{100, 100}, {300, 300}, {300, 300}, {300, 300}},
                                   .expert = {50, 50},
                                   .experts = 8},
                                  2 * 300 + 2 * 50 + 100 + 50);
  EXPECT_EQ(two.resident, (std::vector<bool>{true, false, false, false}));
  EXPECT_EQ(two.module_frames, 2);
  EXPECT_EQ(two.module_frame_bytes, 300);
  EXPECT_EQ(two.expert_frames, 3);
  const WeightRoom one = *RoomFor(Sizes(), 10 + 310 + 60);
  EXPECT_EQ(one.resident, std::vector<bool>(3, false));
  EXPECT_EQ(one.module_frames, 1);
  EXPECT_EQ(one.expert_frames, 1);
  EXPECT_THAT(RoomFor(Sizes(), 10 + 310 + 60 - 1).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "--weight-memory is 379, expected at least 380 bytes"));
}

// Nothing less than LeastMemory would do: with one expert, without any, with modules of one size.
TEST(RoomForTest, TheLeastMemoryHasRoom) {
  for (const WeightSizes& sizes :
       {Sizes(), WeightSizes{.vector_bytes = 7, .modules = {{100, 110}}},
        WeightSizes{.modules = {{100, 110}, {50, 60}}},
        WeightSizes{.modules = {{100, 110}, {9, 19}}, .expert = {50, 60}, .experts = 1},
        WeightSizes{.modules = {{100, 110}, {90, 100}}, .expert = {50, 60}, .experts = 1}}) {
    const int64_t least = LeastMemory(sizes);
    EXPECT_TRUE(RoomFor(sizes, least).ok()) << least;
    EXPECT_FALSE(RoomFor(sizes, least - 1).ok()) << least;
  }
}

// Layers of a matrix and four experts of two matrices each, whose elements name their origin.
constexpr int64_t kPageRows = 3, kPageCols = 7001;  // no whole unit of a file
constexpr int kExperts = 4;

struct PagedLayers {
  std::vector<Parameters> leases;
  std::vector<Parameters> down;  // by layer: names its experts
};

absl::StatusOr<PagedLayers> AddLayers(ParameterStore& store, int layers) {
  PagedLayers added;
  for (int l = 0; l < layers; ++l) {
    MOE_ASSIGN_OR_RETURN(
        Parameter* const dense,
        store.Add({.name = absl::StrCat(l, ".dense"), .rows = 5, .cols = kPageCols}));
    MOE_ASSIGN_OR_RETURN(Parameter* const norm,
                         store.Add({.name = absl::StrCat(l, ".norm"), .cols = 9}));
    added.leases.push_back({dense, norm});
    for (const char* const name : {"up", "down"}) {
      std::vector<ParameterSpec> specs;
      for (int e = 0; e < kExperts; ++e) {
        specs.push_back({.name = absl::StrCat(l, ".", e, ".", name),
                         .rows = kPageRows,
                         .cols = kPageCols,
                         .holders = MeshGroup::kExpertData});
      }
      MOE_ASSIGN_OR_RETURN(const Parameters slab, store.AddSlab(specs));
      added.leases.back().insert(added.leases.back().end(), slab.begin(), slab.end());
      if (name == std::string("down")) added.down.push_back(slab);
    }
  }
  return added;
}

float ValueOf(const Parameter& parameter, int64_t i) {
  return static_cast<float>((parameter.index() * 31 + i) % 256);
}

template <typename T>
void ExpectValues(const Parameter& parameter) {
  const auto view = parameter.view<T>();
  for (int64_t i = 0; i < parameter.size(); ++i) {
    ASSERT_EQ(static_cast<float>(view.data()[i]), ValueOf(parameter, i))
        << parameter.spec().name << " " << i;
  }
}

// A pager of two layers with room for `experts` experts beside all modules, or with the least room.
template <typename T>
void WithPager(
    int experts,
    absl::FunctionRef<absl::Status(WeightPager&, const PagedLayers&, const Pass&)> body) {
  testing::RunTrainers({}, {.dtype = DTypeOf<T>::value}, [&](Trainer& trainer) -> absl::Status {
    ParameterStore& store = trainer.parameters();
    store.set_use(StoreUse::kReading);  // with masters, which go
    store.set_deferred();
    MOE_ASSIGN_OR_RETURN(const PagedLayers layers, AddLayers(store, 2));
    constexpr int64_t kEach = sizeof(T), kUnit = ScratchFile::kAlignment;
    const auto in_frame = [](int64_t rows) {
      return (rows * kPageCols * kEach + kUnit - 1) / kUnit * kUnit + kUnit;
    };
    const int64_t frame = 2 * in_frame(kPageRows) + kUnit;
    const int64_t vectors = 2 * 9 * (kEach == 4 ? 4 : 6);
    const int64_t memory = experts > 0 ? vectors + 2 * 5 * kPageCols * kEach + experts * frame
                                       : vectors + in_frame(5) + kUnit + frame;
    MOE_ASSIGN_OR_RETURN(const auto pager,
                         WeightPager::Create(layers.leases, store, trainer.context(),
                                             {::testing::TempDir(), memory}));
    for (const auto& p : store.parameters()) {
      std::vector<float> values(static_cast<size_t>(p->size()));
      for (int64_t i = 0; i < p->size(); ++i) values[static_cast<size_t>(i)] = ValueOf(*p, i);
      MOE_RETURN_IF_ERROR(store.WriteMaster(*p, values, *trainer.context().compute));
    }
    MOE_RETURN_IF_ERROR(pager->Begin());
    EXPECT_LE(pager->report().memory_bytes, memory);
    return body(*pager, layers, {.context = trainer.context()});
  });
}

// Computes the experts with rows of a layer; the order in which they came.
template <typename T>
absl::StatusOr<std::vector<int>> Compute(WeightPager& pager, const PagedLayers& layers,
                                         const Pass& pass, int layer,
                                         const std::vector<int>& with_rows) {
  std::vector<int64_t> offsets = {0};
  for (int e = 0; e < kExperts; ++e) {
    offsets.push_back(offsets.back() + std::count(with_rows.begin(), with_rows.end(), e));
  }
  const auto l = static_cast<size_t>(layer);
  MOE_ASSIGN_OR_RETURN(
      const WeightLease lease,
      WeightLease::Take({.context = pass.context, .weights = &pager}, layers.leases[l]));
  ExpectValues<T>(*layers.leases[l][0]);
  std::vector<int> order;
  MOE_RETURN_IF_ERROR(pager.ForExperts(
      pass, {.first = 0, .last = kExperts, .offsets = offsets, .weights = layers.down[l]},
      [&](int first, int last) {
        for (int e = first; e < last; ++e) {
          order.push_back(e);
          ExpectValues<T>(*layers.leases[l][2 + e]);  // up
          ExpectValues<T>(*layers.down[l][e]);
        }
        return absl::OkStatus();
      }));
  return order;
}

// Shares of two frames for each layer.
TEST(WeightPagerTest, TheExpertsThatALayerUsedLastStay) {
  using Experts = std::vector<int>;
  WithPager<BFloat16>(4, [](WeightPager& pager, const PagedLayers& layers, const Pass& pass) {
    const auto expect = [&](int layer, const Experts& rows, const Experts& order, int64_t misses) {
      const int64_t before = pager.report().misses;
      const auto got = Compute<BFloat16>(pager, layers, pass, layer, rows);
      EXPECT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(*got, order);
      EXPECT_EQ(pager.report().misses - before, misses);
    };
    expect(0, {0, 2}, {0, 2}, 2);
    expect(0, {0, 1}, {0, 1}, 1);  // beyond its share while frames are empty
    expect(1, {3}, {3}, 1);
    expect(0, {1, 2, 3}, {1, 2, 3}, 1);  // 3 takes the place of 0
    expect(1, {2, 3}, {3, 2}, 1);        // what is here first; layer 0 gives back its third
    expect(0, {2, 3}, {2, 3}, 0);
    expect(0, {0, 1, 2, 3}, {2, 3, 0, 1}, 2);
    expect(0, {}, {}, 0);
    expect(1, {2, 3}, {2, 3}, 0);
    EXPECT_EQ(pager.report().hits, 1 + 2 + 1 + 2 + 2 + 2);
    EXPECT_EQ(pager.report().module_reads, 0);
    EXPECT_EQ(pager.report().bytes_read, pager.report().misses * 2 * kPageRows * kPageCols * 2);
    return absl::OkStatus();
  });
}

// One frame of each: a module and an expert at a time.
TEST(WeightPagerTest, OneFrameIsEnough) {
  WithPager<float>(0, [](WeightPager& pager, const PagedLayers& layers, const Pass& pass) {
    for (const int layer : {0, 1, 0}) {
      const auto order = Compute<float>(pager, layers, pass, layer, {0, 1, 3});
      EXPECT_TRUE(order.ok()) << order.status();
      EXPECT_EQ(*order, (std::vector<int>{0, 1, 3}));
    }
    EXPECT_EQ(pager.report().module_reads, 3);
    EXPECT_EQ(pager.report().misses, 9);
    return absl::OkStatus();
  });
}

TEST(WeightPagerTest, AFileThatIsLostIsAnError) {
  WithPager<float>(1, [](WeightPager& pager, const PagedLayers& layers, const Pass& pass) {
    EXPECT_TRUE(Compute<float>(pager, layers, pass, 0, {0}).ok());
    testing::LoseOpenFiles("moe-weights-rank-0-");
    EXPECT_THAT(Compute<float>(pager, layers, pass, 0, {1}).status(),
                StatusIs(absl::StatusCode::kUnavailable, "moe-weights-rank-0-"));
    EXPECT_THAT(Compute<float>(pager, layers, pass, 0, {2}).status(),  // no later one hangs
                StatusIs(absl::StatusCode::kUnavailable, "moe-weights-rank-0-"));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
