// moe/zero/shard_cut.h: where buckets are cut, and what the reducer sums of a part.
#include "moe/zero/shard_cut.h"

#include <cstdlib>
#include <numeric>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/state/unit_grid.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using ::testing::ElementsAre;

// Units: "a" 16 rows of 256 each, "b" and "d" the whole, "c" of two halves, which have 8 leaves of
// 16 rows, a unit each.
std::vector<Parameter*> AddParameters(ParameterStore& store) {
  const auto half = [](const char* name) -> CanonicalTensor {
    return {.name = name, .rows = 128, .cols = 64, .axis = TensorAxis::kRows, .item = 16};
  };
  const ParameterSpec specs[] = {
      {.name = "a", .rows = 64, .cols = 256},
      {.name = "b", .cols = 100},
      {.name = "c", .rows = 256, .cols = 64, .parts = {half("c0"), half("c1")}},
      {.name = "d", .rows = 3, .cols = 7}};
  std::vector<Parameter*> parameters;
  for (ParameterSpec spec : specs) {
    spec.init_std = 0;  // draws no numbers
    parameters.push_back(store.Add(spec).value());
  }
  return parameters;
}

TEST(ShardCutTest, CutsAtTheNearestRowGroupByHand) {
  ParameterStore store(DType::kFloat32, 1);
  const std::vector<Parameter*> all = AddParameters(store);
  // a: 16384 elements, cut every 4096; c: 16384, cut every 1024.
  EXPECT_THAT(ShardCut(absl::MakeConstSpan(all).first(1), 2), ElementsAre(8192, 8192));
  EXPECT_THAT(ShardCut(absl::MakeConstSpan(all).first(1), 3), ElementsAre(4096, 8192, 4096));
  EXPECT_THAT(ShardCut(absl::MakeConstSpan(all).subspan(1, 1), 3), ElementsAre(0, 100, 0));
  EXPECT_THAT(ShardCut(absl::MakeConstSpan(all).subspan(2, 1), 3), ElementsAre(5120, 6144, 5120));
  // Half of 32868 is 16434, 50 elements into b: as near to its begin as to its end.
  EXPECT_THAT(ShardCut(absl::MakeConstSpan(all).first(3), 2), ElementsAre(16384, 16484));
  EXPECT_THAT(ShardCut({}, 2), ElementsAre(0, 0));
}

TEST(ShardCutTest, PartsTileTheBucketAndBeginWhereRowGroupsDo) {
  ParameterStore store(DType::kFloat32, 1);
  ParameterBucket bucket;
  bucket.parameters = AddParameters(store);
  for (const Parameter* p : bucket.parameters) {
    bucket.first.push_back(bucket.elements() + p->size());
  }
  for (int ranks = 1; ranks <= 40; ++ranks) {
    const std::vector<int64_t> counts = ShardCut(bucket.parameters, ranks);
    ASSERT_EQ(counts.size(), static_cast<size_t>(ranks));
    int64_t begin = 0;
    for (int r = 0; r < ranks; ++r) {
      EXPECT_GE(counts[r], 0);
      // Half a unit at most from where an even cut is, which is rounded down.
      EXPECT_LE(std::abs(begin * ranks - bucket.elements() * r), 2049 * ranks) << r;
      for (const ParameterPiece& piece : PiecesOf(bucket, {begin, begin + counts[r]})) {
        EXPECT_EQ(piece.range.size(), piece.bucket.size());
        int64_t first = 0;
        for (const CanonicalTensor& part : piece.parameter->parts()) {
          const int64_t at = piece.range.begin - first;
          if (at >= 0 && at < part.size()) {
            EXPECT_EQ(at % part.cols, 0);
            EXPECT_EQ(UnitGrid(part).FirstRowOfGroup(at / part.cols), at / part.cols);
          }
          first += part.size();
        }
      }
      begin += counts[r];
    }
    EXPECT_EQ(begin, bucket.elements());
  }
}

// Buckets of one row group each, which one rank owns whole; the debts pass the ownership on.
TEST(ShardCutTest, WhatOneBucketCannotShareTheNextOnesDo) {
  ParameterStore store(DType::kFloat32, 1);
  std::vector<Parameter*> all;
  for (int i = 0; i < 30; ++i) {
    all.push_back(store.Add({.name = absl::StrCat("p", i), .cols = 10 + i % 3}).value());
  }
  for (const int ranks : {2, 3, 7}) {
    std::vector<int64_t> debts(ranks, 0), share(ranks, 0);
    for (size_t i = 0; i < all.size(); ++i) {
      const std::vector<int64_t> counts =
          ShardCut(absl::MakeConstSpan(all).subspan(i, 1), ranks, absl::MakeSpan(debts));
      for (int r = 0; r < ranks; ++r) share[r] += counts[r];
    }
    EXPECT_EQ(std::accumulate(share.begin(), share.end(), 0), 30 * 11);
    for (const int64_t each : share) EXPECT_LE(std::abs(each * ranks - 330), 18 * ranks) << ranks;
  }
}

// Every rank's own parts after kRounds rounds, in the order of ranks: bucket by bucket the sums.
std::vector<float> SumInParts(int ranks, ZeroStage zero, Numerics numerics, int64_t bucket_bytes) {
  std::vector<std::vector<float>> parts(ranks);  // by rank, in bucket order
  std::vector<std::vector<int64_t>> counts;
  testing::RunSessions(ranks, {.numerics = numerics}, [&](Session& session) -> absl::Status {
    constexpr int kRounds = 3;
    const Context& context = session.context();
    const int rank = context.mesh->world().rank();
    ParameterStore store(DType::kFloat32, 1);
    AddParameters(store);
    MOE_ASSIGN_OR_RETURN(const auto reducer,
                         GradientReducer::Create({.bucket_bytes = bucket_bytes,
                                                  .max_terms = kRounds * ranks,
                                                  .placement = PlacementOf(zero)},
                                                 store, context, session.gradient_stream()));
    for (int step = 0; step < 2; ++step) {  // the second must not see the first
      MOE_RETURN_IF_ERROR(reducer->Begin());
      for (int round = 0; round < kRounds; ++round) {
        if (round > 0) MOE_RETURN_IF_ERROR(reducer->BeginRound());
        const bool last = round == kRounds - 1;
        // The first parameter is begun first and ends last, as tied embeddings do: its bucket is
        // open meanwhile.
        for (const auto& p : store.parameters()) {
          MOE_ASSIGN_OR_RETURN(const GradAccumulator sum, p->OpenGradient());
          MOE_RETURN_IF_ERROR(sum.Add(
              [&](absl::Span<float> out, Write write) {
                for (size_t i = 0; i < out.size(); ++i) {
                  const auto x = static_cast<float>(rank + 10 * round + static_cast<int>(i % 97));
                  out[i] = write == Write::kAdd ? out[i] + x : x;
                }
                return absl::OkStatus();
              },
              *context.workspace, *context.compute));
        }
        const auto all = store.parameters();
        for (auto p = all.rbegin(); p != all.rend(); ++p) {
          if (last || reducer->travels_each_round(**p))
            MOE_RETURN_IF_ERROR(reducer->MarkReady(**p));
        }
      }
      MOE_RETURN_IF_ERROR(reducer->Finish());
    }
    MOE_ASSIGN_OR_RETURN(const GradientNorm norm, reducer->Norm(0.5));
    EXPECT_EQ(norm.non_finite, 0);
    EXPECT_EQ(reducer->Sum(*store.parameters()[0], 1).ok(), zero == ZeroStage::kNone || ranks == 1);
    for (size_t b = 0; b < reducer->buckets().size(); ++b) {
      const ElementRange own = reducer->buckets()[b].own;
      std::vector<float> sum(static_cast<size_t>(own.size()));
      MOE_RETURN_IF_ERROR(reducer->Sums(0.5)
                              .Part(reducer->At(b, own.begin), own.size())
                              .ToFloat(absl::MakeSpan(sum), *context.compute));
      parts[rank].insert(parts[rank].end(), sum.begin(), sum.end());
      if (rank == 0) counts.push_back(reducer->buckets()[b].counts);
    }
    return absl::OkStatus();
  });
  std::vector<float> all;
  std::vector<size_t> at(ranks, 0);
  for (const std::vector<int64_t>& bucket : counts) {
    for (int r = 0; r < ranks; ++r) {
      const auto from = parts[r].begin() + static_cast<int64_t>(at[r]);
      all.insert(all.end(), from, from + bucket[r]);
      at[r] += static_cast<size_t>(bucket[r]);
    }
  }
  return all;
}

TEST(ShardCutTest, TheReducerSumsTheOwnPartAtEveryStage) {
  for (const Numerics numerics : {Numerics::kLayoutInvariant, Numerics::kFast}) {
    for (const int64_t bucket_bytes : {int64_t{1}, int64_t{1} << 20}) {
      for (const int ranks : {1, 3}) {
        // Small integers: no order of float32 sums rounds.
        const auto expected = SumInParts(ranks, ZeroStage::kNone, numerics, bucket_bytes);
        ASSERT_EQ(expected.size(), 16384u + 100 + 16384 + 21);
        // The last parameter's first element: 3 (sum of ranks) + ranks (0 + 10 + 20), halved.
        EXPECT_EQ(expected[0], 0.5f * static_cast<float>(3 * ranks * (ranks - 1) / 2 + 30 * ranks));
        for (const ZeroStage zero : {ZeroStage::kOptimizer, ZeroStage::kGradients}) {
          EXPECT_EQ(SumInParts(ranks, zero, numerics, bucket_bytes), expected)
              << ranks << " ranks, zero " << static_cast<int>(zero);
        }
      }
    }
  }
}

// Bytes an element of what N ranks share, as docs/zero.md lists them, within 2 %.
TEST(ShardCutTest, ARankKeepsAsManyBytesAsTheFormulaSays) {
  struct Case {
    DType dtype;
    ZeroStage zero;
    double bytes;  // bytes an element, with 4 ranks
  };
  for (const Case& c : {Case{DType::kFloat32, ZeroStage::kNone, 4 + 8 + 8},
                        Case{DType::kFloat32, ZeroStage::kOptimizer, 4 + 8 + 8 / 4.0},
                        Case{DType::kFloat32, ZeroStage::kGradients, 4 + (8 + 8) / 4.0},
                        Case{DType::kBFloat16, ZeroStage::kNone, 2 + 8 + 12},
                        Case{DType::kBFloat16, ZeroStage::kOptimizer, 2 + 8 + 12 / 4.0},
                        Case{DType::kBFloat16, ZeroStage::kGradients, 2 + (8 + 12) / 4.0},
                        Case{DType::kFloat32, ZeroStage::kWeights, (4 + 8 + 8) / 4.0},
                        Case{DType::kBFloat16, ZeroStage::kWeights, (2 + 8 + 12) / 4.0}}) {
    SCOPED_TRACE(absl::StrCat(NameOf(c.dtype), " ", static_cast<int>(c.zero)));
    const TrainerOptions options = {.dtype = c.dtype, .zero = c.zero, .bucket_bytes = 1 << 21};
    testing::RunTrainers({.ranks = 4}, options, [&](Trainer& trainer) -> absl::Status {
      constexpr int64_t kRows = 1000, kCols = 300, kParameters = 5;
      for (int i = 0; i < kParameters; ++i) {
        MOE_RETURN_IF_ERROR(
            trainer.parameters()
                .Add({.name = absl::StrCat("p", i), .rows = kRows, .cols = kCols, .init_std = 0})
                .status());
      }
      MOE_RETURN_IF_ERROR(trainer.optimizer().status());
      for (int64_t r = 0; r < trainer.rounds(); ++r) {
        MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
        const auto all = trainer.parameters().parameters();
        for (auto p = all.rbegin(); p != all.rend(); ++p) {
          Parameter* const leased = p->get();
          MOE_RETURN_IF_ERROR(WeightLease::Take(trainer.PassOf(round), {&leased, 1}).status());
          MOE_RETURN_IF_ERROR(trainer.MarkReady(round, **p));
        }
      }
      MOE_RETURN_IF_ERROR(trainer.Step({.learning_rate = 1e-3}).status());
      double expected = c.bytes * kParameters * kRows * kCols;
      if (c.zero >= ZeroStage::kGradients) expected += 2 * 8 * kRows * kCols;  // two buckets
      if (c.zero == ZeroStage::kWeights) {
        expected += 2.0 * static_cast<double>(SizeOf(c.dtype)) * kRows * kCols;
      }
      const Trainer::StateBytes bytes = trainer.state_bytes();
      EXPECT_NEAR(static_cast<double>(bytes.allocated) / expected, 1, 0.02);
      EXPECT_NEAR(static_cast<double>(bytes.formula) / expected, 1, 0.02);
      return absl::OkStatus();
    });
  }
}

// A slab stays, however buckets cut it: a product reads it by one address and one distance, and
// gathered values are unchanged.
template <typename T>
void ExpectSlabToStay(DType dtype) {
  for (const int64_t bucket_bytes : {1, 250, 1 << 20}) {
    const TrainerOptions options = {
        .dtype = dtype, .zero = ZeroStage::kOptimizer, .bucket_bytes = bucket_bytes};
    testing::RunTrainers({.ranks = 2}, options, [&](Trainer& trainer) -> absl::Status {
      ParameterStore& store = trainer.parameters();
      MOE_RETURN_IF_ERROR(store.Add({.name = "norm", .cols = 3}).status());
      std::vector<ParameterSpec> specs;
      for (const char* name : {"a", "b", "c", "d"}) {
        specs.push_back({.name = name, .rows = 3, .cols = 5});
      }
      MOE_ASSIGN_OR_RETURN(const std::vector<Parameter*> slab, store.AddSlab(specs));
      const auto values = [&] {
        std::vector<T> all;
        for (const Parameter* p : slab) {
          all.insert(all.end(), p->view<T>().data(), p->view<T>().data() + 15);
        }
        return all;
      };
      const std::vector<T> before = values();
      MOE_RETURN_IF_ERROR(trainer.optimizer().status());
      for (int64_t r = 0; r < trainer.rounds(); ++r) {
        MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
        for (const auto& p : store.parameters()) {
          MOE_RETURN_IF_ERROR(trainer.MarkReady(round, *p));
        }
      }
      MOE_RETURN_IF_ERROR(trainer.Step({.learning_rate = 0}).status());
      EXPECT_EQ(values(), before) << bucket_bytes;
      for (size_t i = 0; i < slab.size(); ++i) {
        EXPECT_EQ(slab[i]->view<T>().data() - slab[0]->view<T>().data(),
                  15 * static_cast<int64_t>(i));
      }
      return absl::OkStatus();
    });
  }
}

TEST(ShardCutTest, ASlabInPartsStaysASlab) {
  ExpectSlabToStay<float>(DType::kFloat32);
  ExpectSlabToStay<BFloat16>(DType::kBFloat16);
}

// Parameters that ranks hold in parts can be neither written nor read nor adopted whole.
TEST(ShardCutTest, PackedParametersRefuseToBeWhole) {
  for (const DType compute : {DType::kFloat32, DType::kBFloat16}) {
    ParameterStore store(compute, 1);
    const std::vector<Parameter*> all = AddParameters(store);
    const std::vector<float> vector(all[1]->vector().begin(), all[1]->vector().end());
    const int64_t before = store.bytes(), version = all[0]->version();
    const auto stream = MakeInlineStream();
    const auto packed = store.Pack(all, *stream).value();
    EXPECT_THAT(packed.element_bytes,
                compute == DType::kFloat32 ? ElementsAre(4, 4, 4, 4) : ElementsAre(2, 4, 2, 2));
    EXPECT_GT(all[0]->version(), version);
    EXPECT_EQ(std::vector<float>(all[1]->vector().begin(), all[1]->vector().end()), vector);
    // bfloat16: 2 of 4 + 2 bytes an element are left.
    if (compute == DType::kBFloat16) {
      EXPECT_LT(static_cast<double>(store.bytes()), 0.35 * static_cast<double>(before));
    }
    std::vector<float> values(static_cast<size_t>(all[0]->size()));
    EXPECT_TRUE(absl::IsFailedPrecondition(store.WriteMaster(*all[0], values, *stream)));
    EXPECT_TRUE(absl::IsFailedPrecondition(store.Adopt(*all[0], absl::MakeSpan(values))));
    EXPECT_TRUE(absl::IsFailedPrecondition(all[0]->ReadMaster(*stream).status()));
    EXPECT_TRUE(absl::IsFailedPrecondition(store.Pack(all, *stream).status()));
  }
}

}  // namespace
}  // namespace moe
