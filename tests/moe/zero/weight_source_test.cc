// moe/zero/weight_source.h: what a lease reads, what is gathered and when; a run's bits are in
// zero_test.
#include "moe/zero/weight_source.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using Group = std::vector<Parameter*>;

TrainerOptions InParts(DType dtype, int64_t bucket_bytes) {
  return {.dtype = dtype, .zero = ZeroStage::kWeights, .bucket_bytes = bucket_bytes};
}

// Ends a step of one round in which no parameter has a gradient; weight decay alone moves them.
absl::Status EndStep(Trainer& trainer) {
  for (const auto& p : trainer.parameters().parameters()) {
    MOE_RETURN_IF_ERROR(trainer.MarkReady(trainer.round(), *p));
  }
  return trainer.Step({.learning_rate = 0.5}).status();
}

template <typename T>
std::vector<T> ValuesOf(const Group& group) {
  std::vector<T> all;
  for (const Parameter* p : group) {
    const auto view = p->view<T>();
    all.insert(all.end(), view.data(), view.data() + p->size());
  }
  return all;
}

// A vector, a slab that buckets cut anywhere, and a matrix: leases read what they read when all
// ranks had everything, the slab in one piece, and after a step what stage 1 has.
template <typename T>
void ExpectLeasesToRead(DType dtype, int ranks, int64_t bucket_bytes) {
  SCOPED_TRACE(absl::StrCat(NameOf(dtype), ", ", ranks, " ranks, buckets of ", bucket_bytes));
  for (const ZeroStage zero : {ZeroStage::kOptimizer, ZeroStage::kWeights}) {
    static std::vector<T> moved;  // by the first stage
    if (zero == ZeroStage::kOptimizer) moved.clear();
    TrainerOptions options = InParts(dtype, bucket_bytes);
    options.zero = zero;
    std::mutex mu;
    testing::RunTrainers({.ranks = ranks}, options, [&](Trainer& trainer) -> absl::Status {
      if (zero == ZeroStage::kOptimizer) trainer.set_weights(nullptr);
      ParameterStore& store = trainer.parameters();
      MOE_ASSIGN_OR_RETURN(Parameter* const norm, store.Add({.name = "norm", .cols = 7}));
      std::vector<ParameterSpec> specs;
      for (const char* name : {"a", "b", "c", "d", "e"}) {
        specs.push_back({.name = name, .rows = 3, .cols = 5});
      }
      MOE_ASSIGN_OR_RETURN(const Group slab, store.AddSlab(specs));
      MOE_ASSIGN_OR_RETURN(Parameter* const wide, store.Add({.name = "w", .rows = 9, .cols = 512}));
      Group all = {norm};
      all.insert(all.end(), slab.begin(), slab.end());
      all.push_back(wide);
      if (zero == ZeroStage::kOptimizer) {
        for (const auto& p : store.parameters()) store.SetValues(*p, std::nullopt);
      }
      MOE_RETURN_IF_ERROR(store.Provide(all));
      const std::vector<T> before = ValuesOf<T>(all);
      MOE_RETURN_IF_ERROR(trainer.optimizer().status());
      const Pass pass = trainer.PassOf(trainer.round());
      {
        MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, all));
        EXPECT_EQ(ValuesOf<T>(all), before);
        for (size_t i = 1; i < slab.size(); ++i) {
          EXPECT_EQ(slab[i]->view<T>().data(), slab[i - 1]->view<T>().data() + 15);
        }
        EXPECT_EQ(reinterpret_cast<uintptr_t>(slab[0]->view<T>().data()) % 64, 0u);
        EXPECT_EQ(norm->vector().size(), 7u);
        EXPECT_EQ(T(norm->vector()[6]), before[6]);
      }
      MOE_RETURN_IF_ERROR(trainer.BeginRound().status());
      MOE_RETURN_IF_ERROR(EndStep(trainer));
      MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, all));
      const std::vector<T> after = ValuesOf<T>(all);
      EXPECT_NE(after, before);
      const std::lock_guard<std::mutex> lock(mu);
      if (moved.empty()) moved = after;
      EXPECT_EQ(after, moved);
      return absl::OkStatus();
    });
  }
}

TEST(GatheredWeightsTest, ALeaseReadsTheValuesOfAllParts) {
  for (const int ranks : {2, 3}) {
    for (const int64_t bucket_bytes : {1, 250, 1 << 20}) {
      ExpectLeasesToRead<float>(DType::kFloat32, ranks, bucket_bytes);
      ExpectLeasesToRead<BFloat16>(DType::kBFloat16, ranks, bucket_bytes);
    }
  }
}

// Three modules of one matrix each on two ranks, which keep half of each.
constexpr int64_t kRows = 16, kCols = 512, kHalf = kRows * kCols * 4 / 2;  // bytes

absl::Status AddModules(Trainer& trainer, std::vector<Group>& modules) {
  for (const char* name : {"a", "b", "c"}) {
    MOE_ASSIGN_OR_RETURN(
        Parameter* const p,
        trainer.parameters().Add({.name = name, .rows = kRows, .cols = kCols, .init_std = 1}));
    modules.push_back({p});
  }
  return trainer.optimizer().status();
}

// Leases modules one after the other; returns what has been gathered then, after each, in halves.
absl::StatusOr<std::vector<int64_t>> Lease(Trainer& trainer, const Round& round,
                                           const std::vector<Group>& modules,
                                           const std::vector<size_t>& order) {
  std::vector<int64_t> sent;
  for (const size_t m : order) {
    const Pass whole = trainer.PassOf(round);
    const Pass pass = m == 1 ? whole.WithoutStash() : whole;  // as where it is computed again
    MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, modules[m]));
    EXPECT_EQ(modules[m][0]->view<float>().rows(), kRows);
    sent.push_back(trainer.traffic(MeshGroup::kStage).bytes_sent / kHalf);
  }
  return sent;
}

TEST(GatheredWeightsTest, TheNextModuleIsGatheredWhileOneComputes) {
  testing::RunTrainers(
      {.ranks = 2}, InParts(DType::kFloat32, 1), [](Trainer& trainer) -> absl::Status {
        std::vector<Group> modules;
        MOE_RETURN_IF_ERROR(AddModules(trainer, modules));
        const std::vector<size_t> there_and_back = {0, 1, 2, 2, 1, 1, 0};
        // The order is not known yet. The second and the third module stay for the way back.
        MOE_ASSIGN_OR_RETURN(const Round first, trainer.BeginRound());
        MOE_ASSIGN_OR_RETURN(auto sent, Lease(trainer, first, modules, there_and_back));
        EXPECT_EQ(sent, (std::vector<int64_t>{1, 2, 3, 3, 3, 3, 4}));
        MOE_RETURN_IF_ERROR(EndStep(trainer));
        const int64_t before = trainer.traffic(MeshGroup::kStage).bytes_sent / kHalf;
        MOE_ASSIGN_OR_RETURN(const Round second, trainer.BeginRound());
        MOE_ASSIGN_OR_RETURN(sent, Lease(trainer, second, modules, there_and_back));
        for (int64_t& each : sent) each -= before;
        EXPECT_EQ(sent, (std::vector<int64_t>{2, 3, 3, 3, 4, 4, 4}));
        return EndStep(trainer);
      });
}

// The first of three modules is read forward alone, as an embedding is. It is gathered at the end
// of the first of two rounds, and not at the end of the step.
TEST(GatheredWeightsTest, TheFirstModuleOfTheNextRoundIsGatheredInTheOneBefore) {
  TrainerOptions options = InParts(DType::kFloat32, 1);
  options.micro_batches = 4;
  testing::RunTrainers({.ranks = 2}, options, [](Trainer& trainer) -> absl::Status {
    std::vector<Group> modules;
    MOE_RETURN_IF_ERROR(AddModules(trainer, modules));
    const std::vector<size_t> order = {0, 1, 2, 2, 1};
    const auto sent = [&] {
      return trainer.traffic(MeshGroup::kStage).bytes_sent;
    };
    for (const int step : {1, 2}) {
      for (const int r : {0, 1}) {
        MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
        const int64_t before = sent();
        MOE_ASSIGN_OR_RETURN(std::vector<int64_t> gathered, Lease(trainer, round, modules, order));
        for (int64_t& each : gathered) each -= before / kHalf;
        if (step == 2) {
          EXPECT_EQ(gathered, r == 0 ? (std::vector<int64_t>{2, 3, 3, 3, 4})
                                     : (std::vector<int64_t>{0, 1, 1, 1, 1}));
        }
        if (r == 1) break;
        for (const auto& p : trainer.parameters().parameters()) {
          MOE_RETURN_IF_ERROR(trainer.MarkReady(round, *p));
        }
      }
      MOE_RETURN_IF_ERROR(EndStep(trainer));
    }
    return absl::OkStatus();
  });
}

TEST(GatheredWeightsTest, LeasesNestAndOverlap) {
  testing::RunTrainers(
      {.ranks = 2}, InParts(DType::kFloat32, 1), [](Trainer& trainer) -> absl::Status {
        std::vector<Group> modules;
        MOE_RETURN_IF_ERROR(AddModules(trainer, modules));
        const Group both = {modules[0][0], modules[1][0]};
        const Pass pass = trainer.PassOf(trainer.round());
        const auto sent = [&] {
          return trainer.traffic(MeshGroup::kStage).bytes_sent / kHalf;
        };
        const float* inner_values = nullptr;
        {
          MOE_ASSIGN_OR_RETURN(const WeightLease outer, WeightLease::Take(pass, both));
          EXPECT_EQ(sent(), 2);
          MOE_ASSIGN_OR_RETURN(const WeightLease inner, WeightLease::Take(pass, modules[1]));
          EXPECT_EQ(sent(), 2);  // it is here
          inner_values = modules[1][0]->view<float>().data();
          EXPECT_EQ(trainer.optimizer().value()->weights()->Forget().code(),
                    absl::StatusCode::kFailedPrecondition);
        }
        // One of two is leased: it stays where it is read, and the other one is gathered with it.
        MOE_ASSIGN_OR_RETURN(const WeightLease one, WeightLease::Take(pass, modules[0]));
        const float* const where = modules[0][0]->view<float>().data();
        MOE_ASSIGN_OR_RETURN(const WeightLease two, WeightLease::Take(pass, both));
        EXPECT_EQ(modules[0][0]->view<float>().data(), where);
        EXPECT_EQ(modules[1][0]->view<float>().data(), inner_values);
        EXPECT_EQ(sent(), 3);
        // Two blocks are taken; the third module takes one more.
        MOE_ASSIGN_OR_RETURN(const WeightLease three, WeightLease::Take(pass, modules[2]));
        EXPECT_EQ(sent(), 4);
        EXPECT_EQ(modules[2][0]->view<float>().rows(), kRows);
        return absl::OkStatus();
      });
}

// The first round of an evaluation before any step makes them, a bucket at a time.
TEST(GatheredWeightsTest, NoRankHasTheWholeModelBeforeItsPart) {
  testing::RunTrainers(
      {.ranks = 2}, InParts(DType::kBFloat16, 1), [](Trainer& trainer) -> absl::Status {
        ParameterStore& store = trainer.parameters();
        MOE_ASSIGN_OR_RETURN(Parameter* const p,
                             store.Add({.name = "p", .rows = kRows, .cols = kCols}));
        ParameterStore whole(DType::kBFloat16, trainer.options().seed);
        MOE_ASSIGN_OR_RETURN(const Parameter* const same,
                             whole.Add({.name = "p", .rows = kRows, .cols = kCols}));
        EXPECT_EQ(store.bytes(), 0);
        EXPECT_EQ(p->ReadMaster(*trainer.context().compute).status().code(),
                  absl::StatusCode::kFailedPrecondition);
        MOE_RETURN_IF_ERROR(trainer.BeginEvaluation(2));
        MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
        EXPECT_EQ(store.bytes(), 0);
        MOE_ASSIGN_OR_RETURN(const WeightLease lease,
                             WeightLease::Take(trainer.PassOf(round), {&p, 1}));
        const auto got = p->view<BFloat16>(), expected = same->view<BFloat16>();
        EXPECT_TRUE(std::equal(got.data(), got.data() + p->size(), expected.data()));
        return trainer.EndStep();
      });
}

// What is read from a file before the first step is what the ranks have parts of.
TEST(GatheredWeightsTest, ValuesMayBeWrittenBeforeTheFirstStep) {
  testing::RunTrainers(
      {.ranks = 2}, InParts(DType::kFloat32, 1), [](Trainer& trainer) -> absl::Status {
        ParameterStore& store = trainer.parameters();
        MOE_ASSIGN_OR_RETURN(Parameter* const p, store.Add({.name = "p", .rows = 2, .cols = 3}));
        const std::vector<float> values = {1, 2, 3, 4, 5, 6};
        MOE_RETURN_IF_ERROR(store.WriteMaster(*p, values, *trainer.context().compute));
        MOE_RETURN_IF_ERROR(trainer.optimizer().status());
        MOE_ASSIGN_OR_RETURN(const WeightLease lease,
                             WeightLease::Take(trainer.PassOf(trainer.round()), {&p, 1}));
        EXPECT_EQ(ValuesOf<float>({p}), values);
        return absl::OkStatus();
      });
}

// After a lease has ended as well as before the first.
TEST(GatheredWeightsTest, AValueThatIsNotLeasedEndsTheProgram) {
  for (const bool leased : {false, true}) {
    EXPECT_DEATH(
        testing::RunTrainers(
            {.ranks = 2}, InParts(DType::kFloat32, 1),
            [&](Trainer& trainer) -> absl::Status {
              std::vector<Group> modules;
              MOE_RETURN_IF_ERROR(AddModules(trainer, modules));
              if (leased) {
                MOE_RETURN_IF_ERROR(Lease(trainer, trainer.round(), modules, {0, 1}).status());
              }
              modules[0][0]->view<float>();
              return absl::OkStatus();
            }),
        "invariant broken");
  }
}

}  // namespace
}  // namespace moe
