#include "moe/state/weight_lease.h"

#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "comm/local/local_world.h"
#include "moe/run/session.h"
#include "tests/moe/hidden_weights.h"

namespace moe {
namespace {

TEST(WeightLeaseTest, ValuesAreReadWhileALeaseHasThem) {
  const auto session = Session::Create({}, std::move(MakeLocalWorld({}).front())).value();
  ParameterStore store(DType::kFloat32, 1);
  Parameter* const weight = store.Add({.name = "weight", .rows = 2, .cols = 3}).value();
  Parameter* const norm = store.Add({.name = "norm", .cols = 3}).value();
  const std::vector<float> values(weight->master().begin(), weight->master().end());
  testing::HiddenWeights source(store);
  const Pass pass = {.context = session->context(), .weights = &source};
  const std::vector<Parameter*> both = {weight, norm};
  {
    const auto outer = WeightLease::Take(pass, {&weight, 1});
    { const auto inner = WeightLease::Take(pass, both); }
    EXPECT_EQ(weight->view<float>()(1, 2), values[5]);
    EXPECT_DEATH(norm->vector(), "invariant broken");
  }
  EXPECT_DEATH(weight->view<float>(), "invariant broken");
  EXPECT_DEATH(weight->part<float>(0), "invariant broken");
  EXPECT_EQ(weight->master(), values);
}

TEST(WeightLeaseTest, LayersReadValuesThatASourceHasElsewhere) {
  ParameterStore store(DType::kBFloat16, 1);
  Parameter& weight = **store.Add({.name = "weight", .rows = 2, .cols = 2});
  const BFloat16 own = weight.view<BFloat16>()(1, 1);
  const std::vector<BFloat16> gathered = {BFloat16(1.0f), BFloat16(2.0f), BFloat16(3.0f),
                                          BFloat16(4.0f)};
  store.SetValues(weight,
                  absl::Span<const std::byte>(reinterpret_cast<const std::byte*>(gathered.data()),
                                              gathered.size() * sizeof(BFloat16)));
  EXPECT_EQ(weight.view<BFloat16>()(1, 1), gathered[3]);
  store.SetValues(weight, std::nullopt);
  EXPECT_EQ(weight.view<BFloat16>()(1, 1), own);
}

}  // namespace
}  // namespace moe
