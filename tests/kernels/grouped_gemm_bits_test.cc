// Products have the bits of a loop over std::fma, whatever the shape, SIMD target or thread count.
#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/grouped_gemm/gemm_tile_amx.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/packed_weights.h"
#include "kernels/grouped_gemm/simd_targets.h"
#include "kernels/grouped_gemm/weight_gradient.h"
#include "tests/kernels/gemm_test.h"
#include "tests/sanitizers.h"

namespace moe::testing {
namespace {

using ::testing::HasSubstr;

// Among SIMD targets: the best one, with the tile unit in software.
constexpr char kChecked[] = "tiles in software";
class UseOfCheckedTiles {
 public:
  explicit UseOfCheckedTiles(bool use) { gemm::UseCheckedTiles(use); }
  ~UseOfCheckedTiles() { gemm::UseCheckedTiles(false); }
};

// Under AddressSanitizer one size of every kind: less than a tile, several and a tail.
std::vector<int64_t> Sizes() {
  if (kSanitized) return {3, 65};
  return {1, 2, 3, 5, 7, 17, 63, 64, 65, 100};
}

template <typename Kind, typename T = typename Storage<Kind>::Type>
void AddExpectedWeightGradient(const Matrix<T>& dy, const Matrix<T>& x, Matrix<float>& dw,
                               int64_t begin, int64_t end) {
  for (int64_t o = 0; o < dw.rows(); ++o) {
    for (int64_t k = 0; k < dw.cols(); ++k) {
      dw.at(o, k) = SumOfChains<Kind>(
          end - begin, dw.at(o, k),
          [&](int64_t n) { return static_cast<float>(dy.at(begin + n, o)); },
          [&](int64_t n) { return static_cast<float>(x.at(begin + n, k)); });
    }
  }
}

// Integers that a gradient is added to, not all 0. The grid is so narrow that some elements do not
// fit.
struct ExactSums {
  explicit ExactSums(int64_t size) : sum(size) {
    for (int64_t i = 0; i < size; ++i) sum[i] = i - 3;
  }
  GradAccumulator Accumulator(bool* empty = nullptr) {
    return {absl::MakeSpan(sum), kGrid, &tally, empty};
  }
  ExactSums Plus(const Matrix<float>& partial) const {
    ExactSums result = *this;
    const auto stream = MakeInlineStream();
    for (int64_t r = 0; r < partial.rows(); ++r) {
      EXPECT_OK(
          ExactAccumulate(kGrid, {partial.view().row(r), size_t(partial.cols())},
                          absl::MakeSpan(result.sum).subspan(r * partial.cols(), partial.cols()),
                          Write::kAdd, &result.tally, *stream));
    }
    return result;
  }
  bool operator==(const ExactSums& other) const { return sum == other.sum && tally == other.tally; }

  static constexpr ExactGrid kGrid = {.unit_log2 = -56, .max_terms = 3};
  std::vector<int64_t> sum;
  GridTally tally = {.non_finite = 5, .inexact = 7};
};

template <typename Kind>
class GroupedGemmBits : public ::testing::Test {
 protected:
  using T = typename Storage<Kind>::Type;
  static constexpr bool kTiles = std::is_same_v<Kind, BFloat16Tiles>;
  static constexpr GemmOptions kOptions = {.bfloat16_order =
                                               kTiles ? BFloat16Order::kTile : BFloat16Order::kDot};

  // From now on each run uses one target, with 2 threads, and the next run the next target.
  void UseOneMachineByTurns() { by_turns_ = true; }

  // Runs `op(stream)` on each SIMD target with pools of 1, 2 and 3 threads, slow ones with 2;
  // `check` follows each. Products in tiles also run on the tile unit in software. Under sanitizers
  // neither on that nor on EMU128, which runs the plain loops.
  template <class Op, class Check>
  void ForEachMachine(const Op& op, const Check& check) {
    ++runs_;
    for (const std::string& target : targets_) {
      if (by_turns_ && target != targets_[runs_ % targets_.size()]) continue;
      if (kSanitized && (target == "EMU128" || target == kChecked)) continue;
      const SimdTarget use(target == kChecked ? "" : target);
      const UseOfCheckedTiles checked(target == kChecked);
      for (ThreadPool* const pool : pools_) {
        const bool slow = kSanitized || target == "EMU128" || target == kChecked;
        if ((slow || by_turns_) && pool->threads() != 2) continue;  // and alike
        SCOPED_TRACE(::testing::Message() << target << ", " << pool->threads() << " threads");
        const auto stream = MakeInlineStream(pool);
        ASSERT_OK(op(*stream));
        check();
      }
    }
  }

  // Both directions, and forward with packed weights; rows given per group.
  void CheckGroups(absl::Span<const int64_t> rows, int64_t out, int64_t in, int64_t pad,
                   const Trees& trees = {}) {
    SCOPED_TRACE(::testing::Message() << "O " << out << ", K " << in << ", " << trees.leaves
                                      << " leaves, items of " << trees.item << ", " << trees.parts
                                      << " parts, the first " << trees.first_times << " times");
    const bool packable =
        trees.leaves == 1 || !std::is_same_v<Kind, BFloat16> || trees.WholePairs(in);
    const Groups<T> groups(rows, out, in);
    const auto x = Mixed<T>(groups.total(), in, pad, 1);
    const auto dy = Mixed<T>(groups.total(), out, pad, 2);
    const Matrix<T> want_y = Expected<Kind, T>(x, groups, true, pad, trees.Of(in));
    const Matrix<T> want_dx = Expected<Kind, T>(dy, groups, false, pad, trees.Of(out));
    Matrix<T> y, dx, from_packed;
    ForEachMachine(
        [&](Stream& stream) {
          y = Unwritten<T>(groups.total(), out, pad);
          from_packed = y;
          MOE_ASSIGN_OR_RETURN(const auto packed, Packed(groups, trees.Of(in), stream));
          const absl::Status status =
              GroupedGemm<T>(x.view(), groups.offsets, packed, 7, from_packed.view(), workspace_,
                             stream, trees.Of(in));
          EXPECT_EQ(status.ok(), packable) << status;
          dx = Unwritten<T>(groups.total(), in, pad);
          MOE_RETURN_IF_ERROR(GroupedGemm<T>(x.view(), groups.offsets, groups.views(), y.view(),
                                             workspace_, stream, kOptions, trees.Of(in)));
          return GroupedGemmInputGradient<T>(dy.view(), groups.offsets, groups.views(), dx.view(),
                                             workspace_, stream, kOptions, trees.Of(out));
        },
        [&] {
          EXPECT_TRUE(SameBits(y, want_y));
          EXPECT_TRUE(!packable || SameBits(from_packed, want_y));
          EXPECT_TRUE(SameBits(dx, want_dx));
        });
  }

  static absl::StatusOr<std::vector<PackedWeights<T>>> Packed(const Groups<T>& groups,
                                                              const GemmTree& tree,
                                                              Stream& stream) {
    std::vector<PackedWeights<T>> packed;
    for (const Matrix<T>& w : groups.weight) {
      MOE_ASSIGN_OR_RETURN(
          PackedWeights<T> one,
          PackedWeights<T>::Create(w.rows(), w.cols(), kOptions.bfloat16_order, tree));
      MOE_RETURN_IF_ERROR(one.Pack(w.view(), 7, stream));
      packed.push_back(std::move(one));
    }
    return packed;
  }

  void CheckWeightGradient(int64_t rows, int64_t out, int64_t in, int64_t pad) {
    SCOPED_TRACE(::testing::Message() << "N " << rows << ", O " << out << ", K " << in);
    const auto x = Mixed<T>(rows, in, pad, 3);
    const auto dy = Mixed<T>(rows, out, pad, 4);
    const auto old = Mixed<float>(out, in, 0, 5);
    Matrix<float> want_sum = old, want(out, in, Padded(0)), sum, dw;
    ExactSums exact(out * in);
    bool empty = true;
    AddExpectedWeightGradient<Kind>(dy, x, want_sum, 0, rows);
    AddExpectedWeightGradient<Kind>(dy, x, want, 0, rows);
    const ExactSums want_exact = ExactSums(out * in).Plus(want);
    ForEachMachine(
        [&](Stream& stream) {
          sum = old;
          dw = Unwritten<float>(out, in);
          exact = ExactSums(out * in);
          empty = true;
          for (const GradAccumulator& grad :
               {GradAccumulator(absl::MakeSpan(sum.memory())),
                GradAccumulator(absl::MakeSpan(dw.memory()), &empty), exact.Accumulator()}) {
            MOE_RETURN_IF_ERROR(
                AddWeightGradient<T>(dy.view(), x.view(), grad, workspace_, stream, kOptions));
          }
          return absl::OkStatus();
        },
        [&] {
          EXPECT_TRUE(SameBits(sum, want_sum));
          EXPECT_EQ(empty, rows == 0);
          EXPECT_TRUE(rows == 0 || SameBits(dw, want));
          EXPECT_TRUE(exact == want_exact);
        });
  }

  GroupedGemmBits() {
    if (kTiles) targets_.emplace_back(kChecked);
  }

  Workspace workspace_;
  ThreadPool one_{1}, two_{2}, three_{3};
  const std::vector<ThreadPool*> pools_ = {&one_, &two_, &three_};
  std::vector<std::string> targets_ = gemm::SimdTargets();
  bool by_turns_ = false;
  size_t runs_ = 0;
};

using ProductKinds = ::testing::Types<float, BFloat16, Float16, BFloat16Tiles>;
TYPED_TEST_SUITE(GroupedGemmBits, ProductKinds);

TYPED_TEST(GroupedGemmBits, HasTheBitsOfTheSpecificationForOddShapesAndEmptyGroups) {
  const std::vector<int64_t> rows = {0, 1, 2, 0, 3, 5, 7, 17, 63, 64, 65, 100, 0};
  const auto few = absl::MakeConstSpan(rows).subspan(0, 8);
  for (const int64_t out : Sizes()) {
    for (const int64_t in : Sizes()) {
      // All row counts at a few shapes, small ones everywhere.
      const bool all = out == 65 || in == 65;
      this->CheckGroups(all ? absl::MakeConstSpan(rows) : few, out, in, (out + in) % 4);
    }
  }
}

// Weights with several segments, empty ones and empty weights among them, rows before the first and
// after the last.
TYPED_TEST(GroupedGemmBits, WeightGradientsAddOnePartialPerSegment) {
  using T = typename TestFixture::T;
  const std::vector<int64_t> segments = {2,   2,   131, 400, 400,
                                         400, 400, 401, 409, 450};  // [3 x 3 + 1]
  constexpr int64_t kOut = 70, kIn = 300, kGroups = 3, kEach = 3;
  const auto dy = Mixed<T>(455, kOut, 0, 1);
  const auto x = Mixed<T>(455, kIn, 3, 2);
  std::vector<ExactSums> want(kGroups, ExactSums(kOut * kIn)), got;
  std::vector<Matrix<float>> want_float(kGroups), got_float;
  for (size_t s = 0; s + 1 < segments.size(); ++s) {
    Matrix<float> partial(kOut, kIn, Padded(0));
    AddExpectedWeightGradient<TypeParam>(dy, x, partial, segments[s], segments[s + 1]);
    if (segments[s] < segments[s + 1]) want[s / kEach] = want[s / kEach].Plus(partial);
  }
  for (int64_t g = 0; g < kGroups; ++g) {
    want_float[g] = Mixed<float>(kOut, kIn, 0, 7);
    AddExpectedWeightGradient<TypeParam>(dy, x, want_float[g], segments[g * kEach],
                                         segments[(g + 1) * kEach]);
  }
  this->ForEachMachine(
      [&](Stream& stream) {
        got.assign(kGroups, ExactSums(kOut * kIn));
        got_float.assign(kGroups, Mixed<float>(kOut, kIn, 0, 7));
        std::vector<GradAccumulator> exact, sums;
        for (int64_t g = 0; g < kGroups; ++g) {
          exact.push_back(got[g].Accumulator());
          sums.emplace_back(absl::MakeSpan(got_float[g].view().data(), kOut * kIn));
        }
        MOE_RETURN_IF_ERROR(AddWeightGradients<T>(dy.view(), x.view(), segments, exact,
                                                  this->workspace_, stream, this->kOptions));
        return AddWeightGradients<T>(dy.view(), x.view(), segments, sums, this->workspace_, stream,
                                     this->kOptions);
      },
      [&] {
        for (int64_t g = 0; g < kGroups; ++g) {
          EXPECT_TRUE(got[g] == want[g]) << g;
          EXPECT_TRUE(SameBits(got_float[g], want_float[g])) << g;
        }
      });
}

// The same as adding to zeros: for several segments, and for so many elements that writes bypass
// the cache, at unaligned positions among them. The second weight is not empty, the third has no
// rows.
TYPED_TEST(GroupedGemmBits, WeightGradientsOverwriteEmptySums) {
  using T = typename TestFixture::T;
  const auto check = [&](const std::vector<int64_t>& segments, int64_t out, int64_t in) {
    SCOPED_TRACE(::testing::Message() << "O " << out << ", K " << in);
    const auto dy = Mixed<T>(segments.back(), out, 0, 1);
    const auto x = Mixed<T>(segments.back(), in, 0, 2);
    const auto add = [&](std::vector<ExactSums>& sums, std::vector<std::vector<float>>& floats,
                         bool(&empty)[3], Stream& stream) -> absl::Status {
      std::vector<GradAccumulator> exact, plain;
      bool float_empty[3];
      std::copy_n(empty, 3, float_empty);
      for (size_t g = 0; g < 3; ++g) {
        exact.push_back(sums[g].Accumulator(&empty[g]));
        plain.emplace_back(absl::MakeSpan(floats[g]), &float_empty[g]);
      }
      MOE_RETURN_IF_ERROR(AddWeightGradients<T>(dy.view(), x.view(), segments, exact,
                                                this->workspace_, stream, this->kOptions));
      return AddWeightGradients<T>(dy.view(), x.view(), segments, plain, this->workspace_, stream,
                                   this->kOptions);
    };
    const std::vector<ExactSums> old(3, ExactSums(out * in));
    const std::vector<std::vector<float>> old_float(3, std::vector<float>(out * in, 0.25f));
    std::vector<ExactSums> want = old, got;
    std::vector<std::vector<float>> want_float = old_float, got_float;
    std::fill(want[0].sum.begin(), want[0].sum.end(), 0);
    std::fill(want_float[0].begin(), want_float[0].end(), 0.0f);
    bool none[3] = {};
    const auto stream = MakeInlineStream();
    ASSERT_OK(add(want, want_float, none, *stream));
    bool empty[3];
    this->ForEachMachine(
        [&](Stream& machine) {
          got = old, got_float = old_float;
          empty[0] = empty[2] = true, empty[1] = false;
          return add(got, got_float, empty, machine);
        },
        [&] {
          EXPECT_FALSE(empty[0]);
          EXPECT_TRUE(empty[2]);  // has no partial yet
          EXPECT_TRUE(got == want);
          EXPECT_EQ(got_float, want_float);
        });
  };
  check({0, 0, 131, 250, 250, 251, 260, 260, 260, 260}, 70, 300);
  check({0, 5, 8, 8}, 600, 650);
  check({0, 5, 8, 8}, 512, 704);
}

TYPED_TEST(GroupedGemmBits, HasTheBitsOfTheSpecificationAcrossBlocks) {
  this->CheckGroups({520, 0, 3}, 130, 17, 1);  // more rows than a block, several panels
  this->CheckGroups({7, 13}, 70, 1100, 3);     // deeper than a depth block, both ways
  this->CheckGroups({7, 13}, 1100, 70, 0);
  if (kSanitized) return;
  this->CheckGroups({70, 33}, 40, 1100, 1);  // several strips of rows of a sum that is cut
  this->CheckGroups({70, 33}, 1100, 40, 0);
  this->CheckGroups(std::vector<int64_t>(300, 1), 9, 11, 0);  // many groups
  this->CheckGroups({511, 1}, 70, 600, 0);
}

// Every depth up to 300 with one cut each, so that each target meets every number of leaves: empty
// ones, halves of pairs, items that end early.
TYPED_TEST(GroupedGemmBits, TreesHaveTheBitsOfTheSpecificationAtEveryDepth) {
  constexpr int64_t kItems[] = {1, 16, 3, 8};
  const int64_t step = kSanitized ? 37 : 1;
  this->UseOneMachineByTurns();
  for (int64_t depth = 1; depth <= 300; depth += step) {
    const Trees trees = {.leaves = 1 << depth % 5,
                         .item = kItems[depth / 5 % 4],
                         .parts = 1 + static_cast<int>(depth % 3),
                         .first_times = 1 + depth / 3 % 3};
    this->CheckGroups({1, 0, 5}, 18, depth, depth % 3, trees);
    this->CheckGroups({1, 0, 5}, depth, 18, depth % 3, trees);
  }
}

TYPED_TEST(GroupedGemmBits, TreesHaveTheBitsOfTheSpecificationAcrossPanels) {
  this->CheckGroups({33}, 65, 1100, 1, {.leaves = 2, .item = 16});  // a leaf is several panels
  this->CheckGroups({33, 5}, 1200, 65, 0, {.leaves = 8, .item = 16, .parts = 2});
  this->CheckGroups({33, 5}, 1212, 65, 0, {.leaves = 2, .item = 2, .parts = 3, .first_times = 4});
  if (kSanitized) return;
  this->CheckGroups({33, 5}, 1590, 17, 2, {.leaves = 2, .item = 1, .parts = 3});
  this->CheckGroups({530}, 65, 20, 0, {.leaves = 16, .item = 2});  // more rows than a block
}

TYPED_TEST(GroupedGemmBits, HasTheBitsOfTheSpecificationForEveryFewRows) {
  const std::vector<int64_t> rows = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13};
  this->CheckGroups(rows, 64, 131, 0);   // one whole strip on every target
  this->CheckGroups(rows, 257, 513, 3);  // strips and panels with a tail, two depth blocks
}

TYPED_TEST(GroupedGemmBits, WeightGradientHasTheBitsOfTheSpecification) {
  for (const int64_t rows : Sizes()) {
    for (const int64_t out : Sizes()) {
      for (const int64_t in : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{65}}) {
        this->CheckWeightGradient(rows, out, in, (rows + out + in) % 4);
      }
    }
  }
  this->CheckWeightGradient(0, 17, 65, 1);                        // no rows leave it unchanged
  this->CheckWeightGradient(1101, kSanitized ? 17 : 80, 130, 1);  // deeper than a depth block
  this->CheckWeightGradient(2100, kSanitized ? 17 : 80, 65, 1);   // and than stored packed rows
  this->CheckWeightGradient(5, 401, 1100, 2);  // more rows and columns than a block
  if (!kSanitized) this->CheckWeightGradient(150, 300, 300, 0);  // all, with whole tiles
}

TYPED_TEST(GroupedGemmBits, DenseProductsKeepFloat32OutputsUnrounded) {
  using T = typename TestFixture::T;
  const Groups<T> group({67}, 33, 129);
  const auto x = Mixed<T>(67, 129, 1, 6);
  const auto dy = Mixed<T>(67, 33, 1, 7);
  const GemmTree in_tree = {{8, 129, 16}}, out_tree = {{4, 11, 2}, 3};
  const Matrix<float> want_y = Expected<TypeParam, float>(x, group, true, 2);
  const Matrix<float> want_dx = Expected<TypeParam, float>(dy, group, false, 2);
  const Matrix<float> want_tree_y = Expected<TypeParam, float>(x, group, true, 2, in_tree);
  const Matrix<float> want_tree_dx = Expected<TypeParam, float>(dy, group, false, 2, out_tree);
  Matrix<float> y, dx, from_packed, tree_y, tree_dx;
  this->ForEachMachine(
      [&](Stream& stream) {
        y = Unwritten<float>(67, 33, 2);
        from_packed = y;
        dx = Unwritten<float>(67, 129, 2);
        Workspace& workspace = this->workspace_;
        const MatrixView<const T> weight = group.weight[0].view();
        MOE_ASSIGN_OR_RETURN(const auto packed, this->Packed(group, {}, stream));
        MOE_RETURN_IF_ERROR(
            (Gemm<T, float>(x.view(), packed[0], 7, from_packed.view(), workspace, stream)));
        MOE_RETURN_IF_ERROR(
            (Gemm<T, float>(x.view(), weight, y.view(), workspace, stream, this->kOptions)));
        tree_y = y, tree_dx = dx;
        MOE_ASSIGN_OR_RETURN(const auto leaves, this->Packed(group, in_tree, stream));
        MOE_RETURN_IF_ERROR(
            (Gemm<T, float>(x.view(), leaves[0], 7, tree_y.view(), workspace, stream, in_tree)));
        if (this->kTiles) {
          EXPECT_THAT(Message((Gemm<T, float>(x.view(), packed[0], 7, tree_y.view(), workspace,
                                              stream, in_tree))),
                      HasSubstr("a weight is packed for a tree of 1 leaves over 0, expected that "
                                "of the product, 8 over 129"));
        }
        MOE_RETURN_IF_ERROR((GemmInputGradient<T, float>(
            dy.view(), weight, tree_dx.view(), workspace, stream, this->kOptions, out_tree)));
        return GemmInputGradient<T, float>(dy.view(), weight, dx.view(), workspace, stream,
                                           this->kOptions);
      },
      [&] {
        EXPECT_TRUE(SameBits(tree_y, want_tree_y));
        EXPECT_TRUE(SameBits(tree_dx, want_tree_dx));
        EXPECT_TRUE(SameBits(y, want_y));
        EXPECT_TRUE(SameBits(from_packed, want_y));
        EXPECT_TRUE(SameBits(dx, want_dx));
      });
}

TYPED_TEST(GroupedGemmBits, NothingToReduceWritesZeros) {
  using T = typename TestFixture::T;
  const Matrix<T> x(5, 0), w(70, 0);
  Matrix<T> y, from_packed;
  this->ForEachMachine(
      [&](Stream& stream) {
        y = Unwritten<T>(5, 70);
        MOE_RETURN_IF_ERROR(
            (Gemm<T, T>(x.view(), w.view(), y.view(), this->workspace_, stream, this->kOptions)));
        from_packed = Unwritten<T>(5, 70);
        MOE_ASSIGN_OR_RETURN(auto packed,
                             PackedWeights<T>::Create(70, 0, this->kOptions.bfloat16_order));
        MOE_RETURN_IF_ERROR(packed.Pack(w.view(), 0, stream));
        return Gemm<T, T>(x.view(), packed, 0, from_packed.view(), this->workspace_, stream);
      },
      [&] {
        EXPECT_TRUE(SameBits(from_packed, y));
        for (int64_t r = 0; r < 5; ++r) {
          for (int64_t c = 0; c < 70; ++c) ASSERT_TRUE(SameBits(y.at(r, c), T(0.0f)));
        }
      });
}

TYPED_TEST(GroupedGemmBits, KeepsSubnormalsInfinitiesAndNaNsWhereTheyBelong) {
  using T = typename TestFixture::T;
  constexpr bool kHalf = std::is_same_v<T, Float16>;
  const float huge = kHalf ? 0x1.8p15f : 0x1.8p127f;
  Matrix<T> x(4, 2), w(3, 2), y(4, 3, kNaN);
  // Their product is the smallest positive number of the output type: 2^-149, 2^-126, 2^-24.
  const float small = kHalf ? 0x1p-14f : 0x1p-75f;
  const float tiny = kHalf ? 0x1p-10f : std::is_same_v<T, float> ? 0x1p-74f : 0x1p-51f;
  const float rows[4][2] = {{small, 0}, {huge, huge}, {NAN, 1}, {1, 1}};
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t c = 0; c < 2; ++c) x.at(r, c) = T(rows[r][c]);
  }
  for (int64_t o = 0; o < 3; ++o) {
    w.at(o, 0) = T(o == 0 ? tiny : 1.0f);
    w.at(o, 1) = T(1.0f);
  }
  this->ForEachMachine(
      [&](Stream& stream) {
        return Gemm<T, T>(x.view(), w.view(), y.view(), this->workspace_, stream, this->kOptions);
      },
      [&] {
        EXPECT_EQ(y(0, 0), double{small} * tiny);
        EXPECT_GT(y(0, 0), 0);
        EXPECT_EQ(y(1, 1), INFINITY);
        for (int64_t o = 0; o < 3; ++o) EXPECT_TRUE(std::isnan(y(2, o)));
        EXPECT_EQ(y(3, 2), 2.0f);
      });
}

#if defined(__x86_64__)
// Subnormal factors, sums and old sums are zeros, in products of bfloat16 alone.
TEST(GroupedGemmSubnormals, OfBFloat16AreZeros) {
  constexpr float kSubnormal = 0x1p-130f;
  const std::vector<BFloat16> dy = {BFloat16(kSubnormal), BFloat16(0x1p-70f), BFloat16(0.0f)};
  const std::vector<BFloat16> x = {BFloat16(0x1p20f), BFloat16(-0x1p-60f), BFloat16(1.0f)};
  Workspace workspace;
  const auto stream = MakeInlineStream();
  for (const std::string& target : gemm::SimdTargets()) {
    const SimdTarget use(target);
    for (const auto& [word, order] : kBFloat16OrderWords) {
      for (size_t n = 0; n < dy.size(); ++n) {
        float dw = kSubnormal;
        ASSERT_OK(AddWeightGradient<BFloat16>({&dy[n], 1, 1}, {&x[n], 1, 1},
                                              GradAccumulator({&dw, 1}), workspace, *stream,
                                              {.bfloat16_order = order}));
        EXPECT_EQ(dw, 0.0f) << target << ' ' << word << ' ' << n;
      }
    }
  }
  volatile float half = 0.5f, least = 0x1p-126f;
  EXPECT_GT(half * least, 0.0f) << "the thread's own arithmetic keeps them";
}
#endif

}  // namespace
}  // namespace moe::testing
