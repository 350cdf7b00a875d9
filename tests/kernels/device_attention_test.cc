// Attention and rotary positions on every device of this build.
#include <cmath>
#include <cstdint>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/attention/attention.h"
#include "kernels/attention/rotary_table.h"
#include "kernels/base/workspace.h"
#include "tests/kernels/attention_oracle.h"
#include "tests/kernels/device_results.h"

namespace moe {
namespace {

using testing::DeviceArray;
using testing::kFloatRounding;
using testing::SameBits;
using testing::TestDevice;
using testing::TestDevices;

using Offsets = std::vector<int64_t>;

template <typename T>
std::vector<T> RandomValues(int64_t n, uint64_t seed) {
  const auto floats = testing::RandomFloats(n, seed);
  return {floats.begin(), floats.end()};
}

template <typename To, typename From>
std::vector<To> As(const std::vector<From>& from) {
  std::vector<To> to;
  for (const From& value : from) to.push_back(To(static_cast<float>(value)));
  return to;
}

template <typename T>
class DeviceAttentionTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16>;
TYPED_TEST_SUITE(DeviceAttentionTest, Types);

// A longer table is made while work with the shorter one is still in the stream, and offsets change
// as soon as a call has returned.
TYPED_TEST(DeviceAttentionTest, RotaryHasTheSameBits) {
  using T = TypeParam;
  const int64_t cols = 18, stride = 20, rows = 302;
  const float base = sizeof(T) == 2 ? 71 : 73;  // no other test has made its table
  testing::ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    Workspace workspace(device.memory());
    const auto few = device.Copy(RandomValues<T>(3 * stride, 1));
    const auto many = device.Copy(RandomValues<T>(rows * stride, 2));
    Offsets offsets = {0, 1, 3};
    EXPECT_TRUE(ApplyRotary<T>({.heads = 3, .sequence_offsets = offsets}, base,
                               RotaryDirection::kForward, few.view(3, cols, stride), workspace,
                               device.stream())
                    .ok());
    offsets = {0, 1, 1, rows};
    EXPECT_TRUE(ApplyRotary<T>({.heads = 3, .sequence_offsets = offsets}, base,
                               RotaryDirection::kBackward, many.view(rows, cols, stride), workspace,
                               device.stream())
                    .ok());
    offsets = {-1, -1, -1, -1};
    return std::tuple(device.Read(few), device.Read(many));
  });
}

TEST(DeviceRotaryTableTest, IsMadeOnceForManyThreadsAndLivesOn) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto table = [&](int64_t positions) {
      return RotaryTable::For(79, 4, positions, device->stream().device()).value();
    };
    const RotaryTable* made[3] = {};
    std::vector<std::thread> threads;
    for (auto& mine : made) threads.emplace_back([&mine, &table] { mine = table(200); });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(made[0], made[1]);
    EXPECT_EQ(made[0], made[2]);
    EXPECT_GE(made[0]->positions(), 200);
    const RotaryTable* const longer = table(made[0]->positions() + 1);
    EXPECT_GE(longer->positions(), 2 * made[0]->positions());
    EXPECT_EQ(table(1), longer);
    // The shorter one is the beginning of the longer one still.
    const auto row = [&](const float* values) {
      std::vector<float> host(4);
      EXPECT_TRUE(device->stream().CopyBytes(values + 99 * 4, host.data(), 16).ok());
      EXPECT_TRUE(device->stream().Synchronize().ok());
      return host;
    };
    EXPECT_EQ(row(made[0]->cosine()), row(longer->cosine()));
    EXPECT_EQ(row(made[0]->sine()), row(longer->sine()));
    EXPECT_EQ(row(longer->sine())[0], std::sin(99.0f));
  }
}

// One call of attention and its backward: q, k and v side by side, as a layer has them.
const Offsets kOffsets = {0, 7, 7, 75};
constexpr int kHeads = 2;
constexpr int64_t kDepth = 20, kCols = kHeads * kDepth, kRows = 75, kLongest = 68;

template <typename T>
struct Attention {
  const TestDevice& device;
  DeviceArray<T> qkv = device.Copy(RandomValues<T>(kRows * 3 * kCols, 1));
  DeviceArray<T> d_out = device.Copy(RandomValues<T>(kRows * kCols, 2));
  DeviceArray<T> out = device.Copy(std::vector<T>(kRows * kCols));
  DeviceArray<T> d_qkv = device.Copy(std::vector<T>(kRows * 3 * kCols));
  DeviceArray<float> log_sum_exp = device.Copy(std::vector<float>(kRows * kHeads));
  Workspace workspace = Workspace(device.memory());

  MatrixView<T> Part(const DeviceArray<T>& array, int part) const {
    return ColumnRange(array.view(kRows, 3 * kCols, 3 * kCols), part * kCols, (part + 1) * kCols);
  }
  MatrixView<T> Rows(const DeviceArray<T>& array) const { return array.view(kRows, kCols, kCols); }

  void Forward() {
    Offsets offsets = kOffsets;
    EXPECT_TRUE(CausalAttention<T>({.heads = kHeads, .sequence_offsets = offsets}, Part(qkv, 0),
                                   Part(qkv, 1), Part(qkv, 2), Rows(out),
                                   log_sum_exp.view(kRows, kHeads, kHeads), workspace,
                                   device.stream())
                    .ok());
    offsets.assign(offsets.size(), -1);
  }
  void Backward() {
    Offsets offsets = kOffsets;
    EXPECT_TRUE(CausalAttentionBackward<T>(
                    {.heads = kHeads, .sequence_offsets = offsets}, Part(qkv, 0), Part(qkv, 1),
                    Part(qkv, 2), Rows(out), log_sum_exp.view(kRows, kHeads, kHeads), Rows(d_out),
                    Part(d_qkv, 0), Part(d_qkv, 1), Part(d_qkv, 2), workspace, device.stream())
                    .ok());
    offsets.assign(offsets.size(), -1);
  }
};

// Columns [part * kCols, (part + 1) * kCols) of a [kRows, 3 * kCols] matrix.
std::vector<double> PartOf(const std::vector<float>& matrix, int part) {
  std::vector<double> values;
  for (int64_t r = 0; r < kRows; ++r) {
    const auto row = matrix.begin() + (r * 3 + part) * kCols;
    values.insert(values.end(), row, row + kCols);
  }
  return values;
}

TEST(DeviceAttentionFloatTest, IsWithinFloat32sRoundingsOfFloat64) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    Attention<float> a = {*device};
    a.Forward();
    a.Backward();
    const auto qkv = device->Read(a.qkv), d_out = device->Read(a.d_out);
    const auto out = device->Read(a.out), log_sum_exp = device->Read(a.log_sum_exp);
    const auto d_qkv = device->Read(a.d_qkv);
    const testing::AttentionOracle oracle(kHeads, kOffsets, PartOf(qkv, 0), PartOf(qkv, 1),
                                          PartOf(qkv, 2), {d_out.begin(), d_out.end()});
    const auto expect = [&](const std::vector<double>& got,
                            const testing::AttentionOracle::Value& want, const char* name) {
      ASSERT_EQ(got.size(), want.value.size()) << name;
      const double roundings = testing::CudaAttentionRoundings(kDepth, kLongest);  // the CPU's too
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], want.value[i], roundings * kFloatRounding * want.bound[i])
            << name << " [" << i << "]";
      }
    };
    expect({out.begin(), out.end()}, oracle.out, "out");
    expect({log_sum_exp.begin(), log_sum_exp.end()}, oracle.log_sum_exp, "log_sum_exp");
    expect(PartOf(d_qkv, 0), oracle.d_q, "d_q");
    expect(PartOf(d_qkv, 1), oracle.d_k, "d_k");
    expect(PartOf(d_qkv, 2), oracle.d_v, "d_v");
  }
}

TEST(DeviceAttentionBFloat16Test, IsTheFloat32ResultRoundedOnce) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    Attention<BFloat16> a = {*device};
    Attention<float> wide = {*device};
    wide.qkv = device->Copy(As<float>(device->Read(a.qkv)));
    wide.d_out = device->Copy(As<float>(device->Read(a.d_out)));
    a.Forward();
    wide.Forward();
    const auto out = device->Read(a.out);
    EXPECT_TRUE(SameBits(out, As<BFloat16>(device->Read(wide.out))));
    EXPECT_TRUE(SameBits(device->Read(a.log_sum_exp), device->Read(wide.log_sum_exp)));
    wide.out = device->Copy(As<float>(out));  // what backward sees
    a.Backward();
    wide.Backward();
    EXPECT_TRUE(SameBits(device->Read(a.d_qkv), As<BFloat16>(device->Read(wide.d_qkv))));
  }
}

TYPED_TEST(DeviceAttentionTest, TakesNoRows) {
  using T = TypeParam;
  const Offsets offsets = {0, 0};
  const AttentionShape shape = {.heads = 2, .sequence_offsets = offsets};
  const MatrixView<T> none = {nullptr, 0, 8};
  const MatrixView<float> no_heads = {nullptr, 0, 2};
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    Workspace workspace(device->memory());
    Stream& stream = device->stream();
    EXPECT_TRUE(ApplyRotary<T>(shape, 10, RotaryDirection::kForward, none, workspace, stream).ok());
    EXPECT_TRUE(
        CausalAttention<T>(shape, none, none, none, none, no_heads, workspace, stream).ok());
    EXPECT_TRUE(CausalAttentionBackward<T>(shape, none, none, none, none, no_heads, none, none,
                                           none, none, workspace, stream)
                    .ok());
    EXPECT_TRUE(stream.Synchronize().ok());
  }
}

// Refused before anything is launched: the stream goes on.
TEST(DeviceAttentionFloatTest, RefusesMoreHeadsThanAGridHasRows) {
  for (const auto& device : TestDevices()) {
    if (device->stream().device().kind == DeviceKind::kCpu) continue;
    const Offsets offsets = {0, 1};
    Workspace workspace(device->memory());
    const MatrixView<float> row = {nullptr, 1, 65536};
    EXPECT_EQ(testing::Message(CausalAttention<float>({65536, offsets}, row, row, row, row, row,
                                                      workspace, device->stream())),
              "CausalAttention: 65536 heads, at most 65535 on CUDA");
    EXPECT_EQ(testing::Message(CausalAttentionBackward<float>({65536, offsets}, row, row, row, row,
                                                              row, row, row, row, row, workspace,
                                                              device->stream())),
              "CausalAttentionBackward: 65536 heads, at most 65535 on CUDA");
    EXPECT_TRUE(device->stream().Synchronize().ok());
  }
}

}  // namespace
}  // namespace moe
