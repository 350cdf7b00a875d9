#include "kernels/grouped_gemm/grouped_gemm.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <future>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/grouped_gemm/simd_targets.h"

namespace moe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kSizes[] = {1, 2, 3, 5, 7, 17, 63, 64, 65, 100};

template <typename T>
auto Bits(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<uint32_t>(value);
  } else {
    return value.bits;
  }
}

// A matrix with `pad` NaNs after each row: read by mistake they spread, and their bits show whether
// an output was written past its end.
template <typename T>
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, int64_t pad = 0)
      : rows_(rows),
        cols_(cols),
        stride_(cols + pad),
        data_(static_cast<size_t>(rows * stride_), T(std::numeric_limits<float>::quiet_NaN())) {}

  // Mixed signs and magnitudes over 2^-8 .. 2^8, so that sums in another order differ in bits.
  static Matrix Random(int64_t rows, int64_t cols, int64_t pad, uint32_t seed) {
    Matrix m(rows, cols, pad);
    std::minstd_rand engine(seed * 7919 + 1);
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> exponent(-8, 8);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) m(r, c) = T(std::ldexp(normal(engine), exponent(engine)));
    }
    return m;
  }

  T& operator()(int64_t r, int64_t c) { return data_[static_cast<size_t>(r * stride_ + c)]; }
  float at(int64_t r, int64_t c) const {
    return static_cast<float>(data_[static_cast<size_t>(r * stride_ + c)]);
  }
  MatrixView<T> view() { return {data_.data(), rows_, cols_, stride_}; }
  MatrixView<const T> cview() const { return {data_.data(), rows_, cols_, stride_}; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

  // The number of elements, padding included, whose bits differ.
  int64_t Differences(const Matrix& other) const {
    int64_t count = 0;
    for (size_t i = 0; i < data_.size(); ++i) count += Bits(data_[i]) != Bits(other.data_[i]);
    return count;
  }

 private:
  int64_t rows_, cols_, stride_;
  std::vector<T> data_;
};

// Rows per group and their matrices, for either direction.
template <typename T>
struct Groups {
  std::vector<int64_t> offsets = {0};
  std::vector<Matrix<T>> weight;

  Groups(absl::Span<const int64_t> rows, int64_t out, int64_t in) {
    for (const int64_t r : rows) {
      offsets.push_back(offsets.back() + r);
      const auto seed = static_cast<uint32_t>(offsets.size());
      weight.push_back(Matrix<T>::Random(out, in, seed % 3, 1000 + seed));
    }
  }
  int64_t total() const { return offsets.back(); }
  std::vector<MatrixView<const T>> views() const {
    std::vector<MatrixView<const T>> v;
    for (const Matrix<T>& w : weight) v.push_back(w.cview());
    return v;
  }
};

// The specification, written out: element by element, std::fma in ascending order.
template <typename T, typename TOut>
Matrix<TOut> Expected(const Matrix<T>& x, const Groups<T>& groups, bool transposed, int64_t pad) {
  const int64_t cols = transposed ? groups.weight[0].rows() : groups.weight[0].cols();
  Matrix<TOut> y(x.rows(), cols, pad);
  for (size_t g = 0; g < groups.weight.size(); ++g) {
    const Matrix<T>& w = groups.weight[g];
    for (int64_t n = groups.offsets[g]; n < groups.offsets[g + 1]; ++n) {
      for (int64_t c = 0; c < cols; ++c) {
        float sum = 0;
        for (int64_t k = 0; k < x.cols(); ++k) {
          sum = std::fma(x.at(n, k), transposed ? w.at(c, k) : w.at(k, c), sum);
        }
        y(n, c) = TOut(sum);
      }
    }
  }
  return y;
}

template <typename T>
void AddExpectedWeightGradient(const Matrix<T>& dy, const Matrix<T>& x, Matrix<float>& dw) {
  for (int64_t o = 0; o < dw.rows(); ++o) {
    for (int64_t k = 0; k < dw.cols(); ++k) {
      for (int64_t n = 0; n < x.rows(); ++n) {
        dw(o, k) = std::fma(dy.at(n, o), x.at(n, k), dw(o, k));
      }
    }
  }
}

template <typename T>
class GroupedGemmTest : public ::testing::Test {
 protected:
  ~GroupedGemmTest() override { gemm::UseSimdTarget(""); }

  // Runs `op(stream)` on each SIMD target with pools of 1, 2 and 3 threads; `check` follows each.
  template <class Op, class Check>
  void ForEachMachine(const Op& op, const Check& check) {
    for (const std::string& target : targets_) {
      gemm::UseSimdTarget(target);
      for (ThreadPool* const pool : pools_) {
        if (target == "EMU128" && pool->threads() != 2) continue;  // slow, and alike
        SCOPED_TRACE(testing::Message() << target << ", " << pool->threads() << " threads");
        const auto stream = MakeInlineStream(pool);
        const absl::Status status = op(*stream);
        ASSERT_TRUE(status.ok()) << status;
        check();
      }
    }
  }

  // Both directions, rows given per group.
  void CheckGroups(absl::Span<const int64_t> rows, int64_t out, int64_t in, int64_t pad) {
    SCOPED_TRACE(testing::Message() << "O " << out << ", K " << in);
    const Groups<T> groups(rows, out, in);
    const auto x = Matrix<T>::Random(groups.total(), in, pad, 1);
    const auto dy = Matrix<T>::Random(groups.total(), out, pad, 2);
    const Matrix<T> want_y = Expected<T, T>(x, groups, true, pad);
    const Matrix<T> want_dx = Expected<T, T>(dy, groups, false, pad);
    Matrix<T> y(0, 0), dx(0, 0);
    ForEachMachine(
        [&](Stream& stream) {
          y = Matrix<T>(groups.total(), out, pad);
          dx = Matrix<T>(groups.total(), in, pad);
          MOE_RETURN_IF_ERROR(GroupedGemm<T>(x.cview(), groups.offsets, groups.views(), y.view(),
                                             workspace_, stream));
          return GroupedGemmInputGradient<T>(dy.cview(), groups.offsets, groups.views(), dx.view(),
                                             workspace_, stream);
        },
        [&] {
          EXPECT_EQ(y.Differences(want_y), 0);
          EXPECT_EQ(dx.Differences(want_dx), 0);
        });
  }

  void CheckWeightGradient(int64_t rows, int64_t out, int64_t in, int64_t pad) {
    SCOPED_TRACE(testing::Message() << "N " << rows << ", O " << out << ", K " << in);
    const auto x = Matrix<T>::Random(rows, in, pad, 3);
    const auto dy = Matrix<T>::Random(rows, out, pad, 4);
    const auto old = Matrix<float>::Random(out, in, pad, 5);
    Matrix<float> want_sum = old, want(out, in, pad), sum(0, 0), dw(0, 0);
    for (int64_t o = 0; o < out; ++o) std::fill_n(&want(o, 0), in, 0.0f);
    AddExpectedWeightGradient(dy, x, want_sum);
    AddExpectedWeightGradient(dy, x, want);
    ForEachMachine(
        [&](Stream& stream) {
          sum = old;
          dw = Matrix<float>(out, in, pad);
          MOE_RETURN_IF_ERROR(GemmWeightGradient<T>(dy.cview(), x.cview(), sum.view(), Write::kAdd,
                                                    workspace_, stream));
          return GemmWeightGradient<T>(dy.cview(), x.cview(), dw.view(), Write::kOverwrite,
                                       workspace_, stream);
        },
        [&] {
          EXPECT_EQ(sum.Differences(want_sum), 0);
          EXPECT_EQ(dw.Differences(want), 0);
        });
  }

  Workspace workspace_;
  ThreadPool one_{1}, two_{2}, three_{3};
  const std::vector<ThreadPool*> pools_ = {&one_, &two_, &three_};
  const std::vector<std::string> targets_ = gemm::SimdTargets();
};

using Storage = ::testing::Types<float, BFloat16>;
TYPED_TEST_SUITE(GroupedGemmTest, Storage);

TEST(GroupedGemm, MultipliesEachGroupByItsOwnWeight) {
  const std::vector<float> x = {1, 2, 3, 4, 5, 6};  // [3, 2]
  const std::vector<float> w0 = {1, 0, 0, 1};       // [2, 2]
  const std::vector<float> w1 = {0, 10, 100, 1000};
  const MatrixView<const float> weight[] = {{w0.data(), 2, 2}, {w1.data(), 2, 2}};
  std::vector<float> y(6, -1), dx(6, -1);
  Workspace workspace;
  const auto stream = MakeInlineStream();
  ASSERT_TRUE(
      GroupedGemm<float>({x.data(), 3, 2}, {0, 1, 3}, weight, {y.data(), 3, 2}, workspace, *stream)
          .ok());
  EXPECT_THAT(y, ElementsAre(1, 2, 40, 4300, 60, 6500));
  ASSERT_TRUE(GroupedGemmInputGradient<float>({x.data(), 3, 2}, {0, 1, 3}, weight,
                                              {dx.data(), 3, 2}, workspace, *stream)
                  .ok());
  EXPECT_THAT(dx, ElementsAre(1, 2, 400, 4030, 600, 6050));
}

TEST(GemmWeightGradient, SumsOverRowsAndAddsWhenAsked) {
  const std::vector<float> dy = {1, 2};                   // [2, 1]
  const std::vector<float> x = {1, 10, 100, 2, 20, 200};  // [2, 3]
  std::vector<float> dw = {7, 7, 7};                      // [1, 3]
  Workspace workspace;
  const auto stream = MakeInlineStream();
  ASSERT_TRUE(GemmWeightGradient<float>({dy.data(), 2, 1}, {x.data(), 2, 3}, {dw.data(), 1, 3},
                                        Write::kAdd, workspace, *stream)
                  .ok());
  EXPECT_THAT(dw, ElementsAre(12, 57, 507));
  ASSERT_TRUE(GemmWeightGradient<float>({dy.data(), 2, 1}, {x.data(), 2, 3}, {dw.data(), 1, 3},
                                        Write::kOverwrite, workspace, *stream)
                  .ok());
  EXPECT_THAT(dw, ElementsAre(5, 50, 500));
}

TEST(Gemm, RoundsOnceAfterTheWholeSum) {
  // 256 + 1 + 1 is 258 in one rounding; a bfloat16 sum would stay at 256.
  std::vector<BFloat16> x(3, BFloat16(1.0f));
  const std::vector<BFloat16> w = {BFloat16(256.0f), BFloat16(1.0f), BFloat16(1.0f)};
  BFloat16 narrow;
  float wide = 0;
  Workspace workspace;
  const auto stream = MakeInlineStream();
  ASSERT_TRUE((Gemm<BFloat16, BFloat16>({x.data(), 1, 3}, {w.data(), 1, 3}, {&narrow, 1, 1},
                                        workspace, *stream))
                  .ok());
  EXPECT_EQ(static_cast<float>(narrow), 258.0f);
  x[2] = BFloat16(0.25f);
  ASSERT_TRUE(
      (Gemm<BFloat16, float>({x.data(), 1, 3}, {w.data(), 1, 3}, {&wide, 1, 1}, workspace, *stream))
          .ok());
  EXPECT_EQ(wide, 257.25f);
}

TYPED_TEST(GroupedGemmTest, HasTheBitsOfTheSpecificationForOddShapesAndEmptyGroups) {
  const std::vector<int64_t> rows = {0, 1, 2, 0, 3, 5, 7, 17, 63, 64, 65, 100, 0};
  const auto few = absl::MakeConstSpan(rows).subspan(0, 8);
  for (const int64_t out : kSizes) {
    for (const int64_t in : kSizes) {
      // All row counts at a few shapes, small ones everywhere.
      const bool all = out == 65 || in == 65;
      this->CheckGroups(all ? absl::MakeConstSpan(rows) : few, out, in, (out + in) % 4);
    }
  }
}

TYPED_TEST(GroupedGemmTest, HasTheBitsOfTheSpecificationAcrossBlocks) {
  this->CheckGroups({520, 0, 3}, 130, 17, 1);  // more rows than a block, several panels
  this->CheckGroups({7, 13}, 70, 1100, 3);     // deeper than a depth block, both ways
  this->CheckGroups({7, 13}, 1100, 70, 0);
  this->CheckGroups(std::vector<int64_t>(300, 1), 9, 11, 0);  // many groups
}

TYPED_TEST(GroupedGemmTest, WeightGradientHasTheBitsOfTheSpecification) {
  for (const int64_t rows : kSizes) {
    for (const int64_t out : kSizes) {
      for (const int64_t in : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{65}}) {
        this->CheckWeightGradient(rows, out, in, (rows + out + in) % 4);
      }
    }
  }
  this->CheckWeightGradient(1100, 70, 65, 1);  // deeper than a depth block
  this->CheckWeightGradient(5, 401, 323, 2);   // more rows and columns than a block
}

TYPED_TEST(GroupedGemmTest, WeightGradientOfNoRowsIsZeroOrUnchanged) {
  this->CheckWeightGradient(0, 17, 65, 1);
}

TYPED_TEST(GroupedGemmTest, DenseProductsKeepFloat32OutputsUnrounded) {
  using T = TypeParam;
  const Groups<T> group({67}, 33, 129);
  const auto x = Matrix<T>::Random(67, 129, 1, 6);
  const auto dy = Matrix<T>::Random(67, 33, 1, 7);
  const Matrix<float> want_y = Expected<T, float>(x, group, true, 2);
  const Matrix<float> want_dx = Expected<T, float>(dy, group, false, 2);
  Matrix<float> y(0, 0), dx(0, 0);
  this->ForEachMachine(
      [&](Stream& stream) {
        y = Matrix<float>(67, 33, 2);
        dx = Matrix<float>(67, 129, 2);
        MOE_RETURN_IF_ERROR((Gemm<T, float>(x.cview(), group.weight[0].cview(), y.view(),
                                            this->workspace_, stream)));
        return GemmInputGradient<T, float>(dy.cview(), group.weight[0].cview(), dx.view(),
                                           this->workspace_, stream);
      },
      [&] {
        EXPECT_EQ(y.Differences(want_y), 0);
        EXPECT_EQ(dx.Differences(want_dx), 0);
      });
}

TYPED_TEST(GroupedGemmTest, NothingToReduceWritesZeros) {
  using T = TypeParam;
  Matrix<T> x(5, 0), w(70, 0), y(5, 70);
  this->ForEachMachine(
      [&](Stream& stream) {
        y = Matrix<T>(5, 70);
        return Gemm<T, T>(x.cview(), w.cview(), y.view(), this->workspace_, stream);
      },
      [&] {
        for (int64_t r = 0; r < 5; ++r) {
          for (int64_t c = 0; c < 70; ++c) ASSERT_EQ(Bits(y(r, c)), 0u);
        }
      });
}

TYPED_TEST(GroupedGemmTest, KeepsSubnormalsInfinitiesAndNaNsWhereTheyBelong) {
  using T = TypeParam;
  const float huge = 0x1.8p127f;
  Matrix<T> x(4, 2), w(3, 2), y(4, 3);
  const float rows[4][2] = {{0x1p-75f, 0}, {huge, huge}, {NAN, 1}, {1, 1}};
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t c = 0; c < 2; ++c) x(r, c) = T(rows[r][c]);
  }
  const float tiny = std::is_same_v<T, float> ? 0x1p-74f : 0x1p-58f;  // products 2^-149, 2^-133
  for (int64_t o = 0; o < 3; ++o) {
    w(o, 0) = T(o == 0 ? tiny : 1.0f);
    w(o, 1) = T(1.0f);
  }
  this->ForEachMachine(
      [&](Stream& stream) {
        return Gemm<T, T>(x.cview(), w.cview(), y.view(), this->workspace_, stream);
      },
      [&] {
        EXPECT_EQ(y.at(0, 0), 0x1p-75f * tiny);
        EXPECT_GT(y.at(0, 0), 0.0f);
        EXPECT_EQ(y.at(1, 1), INFINITY);
        for (int64_t o = 0; o < 3; ++o) EXPECT_TRUE(std::isnan(y.at(2, o)));
        EXPECT_EQ(y.at(3, 2), 2.0f);
      });
}

TEST(GroupedGemm, NoGroupsAndNoRowsSucceed) {
  Workspace workspace;
  const auto stream = MakeInlineStream();
  EXPECT_TRUE(
      GroupedGemm<float>({nullptr, 0, 3}, {0}, {}, {nullptr, 0, 2}, workspace, *stream).ok());
  const std::vector<float> w(6, 1.0f);
  const MatrixView<const float> weight[] = {{w.data(), 2, 3}, {w.data(), 2, 3}};
  EXPECT_TRUE(
      GroupedGemm<float>({nullptr, 0, 3}, {0, 0, 0}, weight, {nullptr, 0, 2}, workspace, *stream)
          .ok());
}

TEST(GroupedGemm, GivesTheWorkspaceBackAndStopsAllocating) {
  const Groups<BFloat16> groups({70, 80}, 65, 33);
  const auto x = Matrix<BFloat16>::Random(150, 33, 0, 8);
  Matrix<BFloat16> y(150, 65);
  Workspace workspace;
  ThreadPool pool(2);
  const auto stream = MakeInlineStream(&pool);
  int64_t allocations = 0;
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(GroupedGemm<BFloat16>(x.cview(), groups.offsets, groups.views(), y.view(),
                                      workspace, *stream)
                    .ok());
    EXPECT_EQ(workspace.used_bytes(), 0);
    if (round == 1) allocations = workspace.allocations();
  }
  EXPECT_EQ(workspace.allocations(), allocations);
}

TEST(GroupedGemm, ReadsOffsetsAndWeightViewsBeforeItReturns) {
  Groups<float> groups({2, 3}, 4, 5);
  const auto x = Matrix<float>::Random(5, 5, 0, 9);
  const Matrix<float> want = Expected<float, float>(x, groups, true, 0);
  Matrix<float> y(5, 4);
  Workspace workspace;
  auto stream = MakeStream({});
  ASSERT_TRUE(stream.ok());
  std::promise<void> gate;
  ASSERT_TRUE((*stream)
                  ->Enqueue([opened = gate.get_future()]() mutable {
                    opened.wait();
                    return absl::OkStatus();
                  })
                  .ok());
  std::vector<MatrixView<const float>> views = groups.views();
  const absl::Status status =
      GroupedGemm<float>(x.cview(), groups.offsets, views, y.view(), workspace, **stream);
  std::fill(views.begin(), views.end(), MatrixView<const float>());
  std::fill(groups.offsets.begin(), groups.offsets.end(), -1);
  EXPECT_GT(workspace.used_bytes(), 0) << "the queued task still needs it";
  gate.set_value();
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE((*stream)->Synchronize().ok());
  EXPECT_EQ(y.Differences(want), 0);
}

class FakeCudaStream final : public Stream {
 public:
  Device device() const override { return {DeviceKind::kCuda, 0}; }
  absl::Status Enqueue(absl::AnyInvocable<absl::Status()>) override { return absl::OkStatus(); }
  absl::StatusOr<Event> Record() override { return Event(); }
  absl::Status WaitFor(const Event&) override { return absl::OkStatus(); }
  absl::Status Synchronize() override { return absl::OkStatus(); }
};

class GroupedGemmErrors : public ::testing::Test {
 protected:
  absl::Status Forward(MatrixView<const float> x, std::vector<int64_t> offsets,
                       MatrixView<float> y) {
    const MatrixView<const float> weight[] = {{w_.data(), 2, 3}, {w_.data(), 2, 3}};
    return GroupedGemm<float>(x, offsets, weight, y, workspace_, *stream_);
  }
  static void Expect(const absl::Status& status, const std::string& text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }

  std::vector<float> w_ = std::vector<float>(64, 1.0f), x_ = w_, y_ = w_;
  Workspace workspace_;
  std::unique_ptr<Stream> stream_ = MakeInlineStream();
};

TEST_F(GroupedGemmErrors, NameTheArgumentAndTheExpectedShape) {
  Expect(Forward({x_.data(), 4, 3}, {0, 1, 4}, {y_.data(), 5, 2}),
         "GroupedGemm: x is [4, 3] with stride 3, expected [5, 3]");
  Expect(Forward({x_.data(), 4, 2}, {0, 1, 4}, {y_.data(), 4, 2}),
         "weight is [2, 3] with stride 3, expected [2, 2]");
  Expect(Forward({x_.data(), 4, 3, 2}, {0, 1, 4}, {y_.data(), 4, 2}), "with stride 2");
  Expect(Forward({x_.data(), 4, 3}, {0, 4}, {y_.data(), 4, 2}), "2 offsets for 2 weights");
  Expect(Forward({x_.data(), 4, 3}, {0, 1, 3}, {y_.data(), 4, 2}),
         "offsets run from 0 to 3, expected 0 to 4 rows");
  Expect(Forward({x_.data(), 4, 3}, {0, 5, 4}, {y_.data(), 4, 2}), "offsets[1] = 5 is above");
  Expect(GemmWeightGradient<float>({x_.data(), 4, 2}, {x_.data(), 5, 3}, {y_.data(), 2, 3},
                                   Write::kAdd, workspace_, *stream_),
         "GemmWeightGradient: dy is [4, 2]");
  Expect(GemmWeightGradient<float>({x_.data(), 5, 2}, {x_.data(), 5, 3}, {y_.data(), 2, 4},
                                   Write::kAdd, workspace_, *stream_),
         "GemmWeightGradient: x is [5, 3] with stride 3, expected [5, 4]");
  Expect(GemmInputGradient<float>({x_.data(), 5, 2}, {w_.data(), 3, 2},
                                  MatrixView<float>{y_.data(), 5, 2}, workspace_, *stream_),
         "GemmInputGradient: weight is [3, 2] with stride 2, expected [2, 2]");
  EXPECT_EQ(workspace_.allocations(), 0);
}

TEST_F(GroupedGemmErrors, CudaStreamsAreUnimplemented) {
  stream_ = std::make_unique<FakeCudaStream>();
  EXPECT_EQ(Forward({x_.data(), 4, 3}, {0, 1, 4}, {y_.data(), 4, 2}).code(),
            absl::StatusCode::kUnimplemented);
}

class NoMemory final : public MemoryResource {
 public:
  Device device() const override { return {}; }
  absl::StatusOr<std::byte*> Allocate(int64_t) override {
    return absl::ResourceExhaustedError("NoMemory: none");
  }
  void Free(std::byte*, int64_t) override {}
};

TEST_F(GroupedGemmErrors, NoWorkspaceIsResourceExhausted) {
  NoMemory none;
  Workspace empty(none);
  EXPECT_EQ(Gemm<float>({x_.data(), 4, 3}, {w_.data(), 2, 3}, MatrixView<float>{y_.data(), 4, 2},
                        empty, *stream_)
                .code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace moe
