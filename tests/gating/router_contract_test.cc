// What the router promises beyond its formulas, which moe_layer_test and verify_test compare with a
// reference: same bits however the batch is cut and on every device, storage types, empty parts,
// padding, errors.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gating/router.h"
#include "tests/gating/router_case.h"
#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Drops and losses on, so that everything that depends on a group is in play.
RouterConfig FullConfig(const std::string& gate = "mixtral") {
  RouterConfig config = SmallConfig(gate, 7);
  config.capacity_factor = 0.9;
  config.aux_loss_coeff = 0.5f;
  config.z_loss_coeff = 0.25f;
  return config;
}

template <typename T>
bool SameBits(absl::Span<const T> a, absl::Span<const T> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

struct ExactGradient {
  ExactGrid grid = {.unit_log2 = -40, .max_terms = 16};
  std::vector<int64_t> sum;
  GridTally tally;

  GradAccumulator accumulator() { return {absl::MakeSpan(sum), grid, &tally}; }
};

TEST(RouterContract, MicroBatchesInOneCallOrManyGiveTheSameBits) {
  for (const std::string gate : {"switch", "gshard", "mixtral", "olmoe", "qwen3"}) {
    SCOPED_TRACE(gate);
    const auto whole = LogitCase(FullConfig(gate), 31);
    const auto k = static_cast<size_t>(whole->config.top_k);
    const std::vector<float> d_slot = RandomVector<float>(72 * k, 32);
    ASSERT_TRUE(RunForward(*whole).ok());
    ExactGradient whole_weight = {.sum = std::vector<int64_t>(49, 0)};
    std::vector<float> whole_tokens = RandomVector<float>(72 * 7, 33);
    ASSERT_TRUE(RunBackward(*whole, d_slot, 8, whole_tokens, whole_weight.accumulator()).ok());

    ExactGradient weight = {.sum = std::vector<int64_t>(49, 0)};
    double aux = 0, z = 0;
    int64_t dropped = 0;
    std::vector<int64_t> count(7, 0);
    for (const size_t b : {0, 1, 2}) {
      const auto part = LogitCase(whole->config, 31);
      const size_t begin = 24 * b, end = begin + 24;
      part->tokens = 24;
      part->x = {whole->x.begin() + 7 * 24 * static_cast<int64_t>(b),
                 whole->x.begin() + 7 * 24 * static_cast<int64_t>(b + 1)};
      part->sequences = {0, 24};
      part->micro_batches = {};
      ASSERT_TRUE(RunForward(*part).ok());
      const auto slots = [&](auto span) {
        return span.subspan(begin * k, 24 * k);
      };
      EXPECT_TRUE(SameBits(part->routing.expert, slots(whole->routing.expert)));
      EXPECT_TRUE(SameBits(part->routing.weight, slots(whole->routing.weight)));
      EXPECT_TRUE(SameBits(part->routing.dropped, slots(whole->routing.dropped)));

      std::vector<float> tokens = RandomVector<float>(72 * 7, 33);
      tokens = {tokens.begin() + static_cast<int64_t>(begin) * 7,
                tokens.begin() + static_cast<int64_t>(end) * 7};
      const auto first = d_slot.begin() + static_cast<int64_t>(begin * k);
      ASSERT_TRUE(RunBackward(*part, {first, first + 24 * static_cast<int64_t>(k)}, 8, tokens,
                              weight.accumulator())
                      .ok());
      EXPECT_TRUE(SameBits<float>(tokens, absl::MakeSpan(whole_tokens).subspan(begin * 7, 24 * 7)));
      aux += part->stats.aux_loss;
      z += part->stats.z_loss;
      dropped += part->stats.dropped_slots;
      for (size_t e = 0; e < 7; ++e) count[e] += part->stats.expert_count[e];
    }
    EXPECT_EQ(weight.sum, whole_weight.sum);
    EXPECT_NE(weight.sum, std::vector<int64_t>(49, 0));
    EXPECT_EQ(weight.tally.non_finite, 0);
    EXPECT_EQ(aux, whole->stats.aux_loss);
    EXPECT_EQ(z, whole->stats.z_loss);
    EXPECT_EQ(dropped, whole->stats.dropped_slots);
    EXPECT_GT(dropped, 0);
    EXPECT_EQ(count, whole->stats.expert_count);
  }
}

TEST(RouterContract, ThreadsAndWorkerStreamsGiveTheSameBits) {
  RouterConfig config = FullConfig("qwen3");
  const auto make = [&] {
    auto c = LogitCase(config, 41);
    c->tokens = 2000;  // several tasks of every loop
    c->x = RandomVector<float>(2000 * 7, 42);
    c->sequences = c->micro_batches = {0, 900, 2000};
    return c;
  };
  const auto serial = make();
  ASSERT_TRUE(RunForward(*serial).ok());
  const std::vector<float> d_slot = RandomVector<float>(2000 * 3, 43);
  const CaseGradients<float> want = RunBackward(*serial, d_slot);

  ThreadPool pool(3);
  const auto threaded = make();
  threaded->stream = MakeInlineStream(&pool);
  ASSERT_TRUE(RunForward(*threaded).ok());
  const CaseGradients<float> got = RunBackward(*threaded, d_slot);
  EXPECT_TRUE(SameBits(threaded->routing.weight, serial->routing.weight));
  EXPECT_TRUE(SameBits(threaded->routing.expert, serial->routing.expert));
  EXPECT_TRUE(SameBits<float>(got.d_tokens, want.d_tokens));
  EXPECT_TRUE(SameBits<float>(got.d_weight, want.d_weight));
  EXPECT_EQ(threaded->stats.aux_loss, serial->stats.aux_loss);

  const auto queued = make();
  queued->stream = *MakeStream(Device{});
  ASSERT_TRUE(RunForward(*queued).ok());
  EXPECT_TRUE(SameBits(queued->routing.weight, serial->routing.weight));
  EXPECT_TRUE(SameBits(queued->routing.dropped, serial->routing.dropped));
}

TEST(RouterContract, BFloat16RoundsTheTokenGradientOnceAndNothingElse) {
  const auto half = LogitCase<BFloat16>(FullConfig(), 51);
  half->weight = RandomVector<BFloat16>(49, 52, 0.5);
  const auto full = LogitCase<float>(FullConfig(), 51);
  for (size_t i = 0; i < half->x.size(); ++i) full->x[i] = static_cast<float>(half->x[i]);
  for (size_t i = 0; i < 49; ++i) full->weight[i] = static_cast<float>(half->weight[i]);
  ASSERT_TRUE(RunForward(*half).ok());
  ASSERT_TRUE(RunForward(*full).ok());
  EXPECT_TRUE(SameBits(half->routing.weight, full->routing.weight));
  EXPECT_TRUE(SameBits(half->routing.expert, full->routing.expert));
  EXPECT_EQ(half->stats.z_loss, full->stats.z_loss);

  const std::vector<float> d_slot = RandomVector<float>(72 * 3, 53);
  std::vector<BFloat16> d_tokens = RandomVector<BFloat16>(72 * 7, 54);
  const std::vector<BFloat16> before = d_tokens;
  std::vector<float> d_weight(49, 0.0f);
  ASSERT_TRUE(
      RunBackward(*half, d_slot, 1, d_tokens, GradAccumulator(absl::MakeSpan(d_weight))).ok());
  const CaseGradients<float> want = RunBackward(*full, d_slot);
  EXPECT_TRUE(SameBits<float>(d_weight, want.d_weight));
  for (size_t i = 0; i < d_tokens.size(); ++i) {
    const BFloat16 rounded(static_cast<float>(before[i]) + want.d_tokens[i]);
    ASSERT_EQ(d_tokens[i].bits, rounded.bits) << i;
  }
}

TEST(RouterContract, LossScaleMultipliesTheLossesAlone) {
  const auto c = RoutedCase(FullConfig(), 63);
  const std::vector<float> zero(72 * 3, 0.0f);
  const CaseGradients<float> losses = RunBackward(*c, zero);
  EXPECT_THAT(losses.d_tokens, ::testing::Contains(::testing::Ne(0.0f)));
  std::vector<float> scaled(72 * 7, 0.0f), d_weight(49, 0.0f);
  ASSERT_TRUE(RunBackward(*c, zero, 1024, scaled, GradAccumulator(absl::MakeSpan(d_weight))).ok());
  for (size_t i = 0; i < scaled.size(); ++i) ASSERT_EQ(scaled[i], 1024 * losses.d_tokens[i]);
  for (size_t i = 0; i < 49; ++i) ASSERT_EQ(d_weight[i], 1024 * losses.d_weight[i]);

  c->config.aux_loss_coeff = c->config.z_loss_coeff = 0;
  ASSERT_TRUE(RunForward(*c).ok());
  EXPECT_EQ(c->saved.d_aux.data(), nullptr);
  EXPECT_THAT(RunBackward(*c, zero).d_tokens, Each(0.0f));
  EXPECT_EQ(c->stats.aux_loss, 0);
  EXPECT_EQ(c->stats.z_loss, 0);
}

TEST(RouterContract, DroppedSlotsWeighNothingAndTheirGradientIsNotRead) {
  for (const std::string gate : {"gshard", "mixtral", "olmoe"}) {
    const auto c = RoutedCase(FullConfig(gate), 64);
    std::vector<float> d_slot = RandomVector<float>(c->routing.weight.size(), 65);
    const CaseGradients<float> want = RunBackward(*c, d_slot);
    ASSERT_GT(c->stats.dropped_slots, 0);
    for (size_t s = 0; s < d_slot.size(); ++s) {
      if (c->routing.dropped[s] == 0) continue;
      EXPECT_EQ(c->routing.weight[s], 0.0f);
      d_slot[s] = kNan;
    }
    EXPECT_TRUE(SameBits<float>(RunBackward(*c, d_slot).d_tokens, want.d_tokens)) << gate;
  }
}

TEST(RouterContract, BackwardReadsItsOwnCopyOfTheBatch) {
  const auto c = RoutedCase(FullConfig(), 66);
  const std::vector<float> d_slot = RandomVector<float>(72 * 3, 67);
  const CaseGradients<float> want = RunBackward(*c, d_slot);
  std::fill(c->micro_batches.begin(), c->micro_batches.end(), -1);
  std::fill(c->sequences.begin(), c->sequences.end(), -1);
  EXPECT_TRUE(SameBits<float>(RunBackward(*c, d_slot).d_weight, want.d_weight));
}

TEST(RouterContract, NoTokensRouteNothing) {
  const auto c = LogitCase(FullConfig(), 71);
  c->tokens = 0;
  c->x = {};
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{}, {0}, {0, 0}, {0, 0, 0}}) {
    c->sequences = c->micro_batches = offsets;
    ASSERT_TRUE(RunForward(*c).ok());
    EXPECT_EQ(c->routing.tokens(), 0);
    EXPECT_EQ(c->routing.slots(), 0);
    EXPECT_THAT(c->routing.slot_offset, ElementsAre(0));
    EXPECT_THAT(c->stats.expert_count, Each(0));
    EXPECT_EQ(c->stats.aux_loss, 0);
    EXPECT_EQ(c->stats.z_loss, 0);
    EXPECT_THAT(RunBackward(*c, {}).d_weight, Each(0.0f));
  }
}

TEST(RouterContract, EmptyMicroBatchesChangeNothing) {
  const auto plain = LogitCase(FullConfig(), 72);
  const auto holes = LogitCase(FullConfig(), 72);
  holes->micro_batches = {0, 0, 24, 48, 48, 72, 72};
  ASSERT_TRUE(RunForward(*plain).ok());
  ASSERT_TRUE(RunForward(*holes).ok());
  EXPECT_TRUE(SameBits(holes->routing.weight, plain->routing.weight));
  EXPECT_EQ(holes->stats.aux_loss, plain->stats.aux_loss);
  EXPECT_EQ(holes->stats.z_loss, plain->stats.z_loss);
  const std::vector<float> d_slot = RandomVector<float>(72 * 3, 73);
  EXPECT_TRUE(
      SameBits<float>(RunBackward(*holes, d_slot).d_weight, RunBackward(*plain, d_slot).d_weight));
}

TEST(RouterContract, OneExpertTakesEverything) {
  const auto c = RoutedCase(SmallConfig("mixtral", 1), 74);
  EXPECT_THAT(c->routing.expert, Each(0));
  EXPECT_THAT(c->routing.weight, Each(1.0f));
  EXPECT_THAT(c->stats.expert_count, ElementsAre(72));
  EXPECT_THAT(RunBackward(*c, std::vector<float>(72, 3.0f)).d_tokens, Each(0.0f));
}

TEST(RouterContract, PaddedRowsFollowFromTheConfigurationAlone) {
  RouterConfig config = FullConfig();
  config.capacity_factor = 1.0;
  config.pad_to_capacity = true;
  config.micro_batch_tokens = 24;
  const auto rows = [](const RouterConfig& of) {
    const auto c = LogitCase(of, 75);
    EXPECT_TRUE(RunForward(*c).ok());
    const int64_t with_tokens = c->routing.padded_rows;
    c->tokens = 0;
    c->x = {};
    c->sequences = c->micro_batches = {0, 0};
    EXPECT_TRUE(RunForward(*c).ok());
    EXPECT_EQ(c->routing.padded_rows, with_tokens);
    return with_tokens;
  };
  EXPECT_EQ(rows(config), 11);  // ceil(24 * 3 / 7)
  config.token_group.tokens = 6;
  EXPECT_EQ(rows(config), 4 * 3);  // four blocks of ceil(6 * 3 / 7)
  config.capacity_factor = 1000;
  EXPECT_EQ(rows(config), 24);  // never above one slot a token
  config.pad_to_capacity = false;
  EXPECT_EQ(rows(config), 0);
}

TEST(RouterContract, StatsAreOptional) {
  const auto c = RoutedCase(FullConfig(), 76);
  RouterSaved<float> saved;
  ASSERT_TRUE(Route(**Router<float>::Create(c->config), c->Call(), saved, nullptr).ok());
  EXPECT_TRUE(SameBits(saved.routing.weight, c->routing.weight));
}

TEST(RouterContract, NanTokensStayInRangeAndShowInTheLosses) {
  for (const DropPolicy policy : {DropPolicy::kProbability, DropPolicy::kPosition}) {
    RouterConfig config = FullConfig("qwen3");
    config.drop_policy = policy;
    const auto c = LogitCase(config, 77);
    c->x[7 * 30] = kNan;  // token 30; the identity weight spreads it over its row of logits
    ASSERT_TRUE(RunForward(*c).ok());
    EXPECT_THAT(c->routing.expert, Each(::testing::AllOf(::testing::Ge(0), ::testing::Lt(7))));
    for (size_t s = 0; s < c->routing.weight.size(); ++s) {
      const bool is_nan = std::isnan(c->routing.weight[s]);
      EXPECT_EQ(is_nan, s / 3 == 30 && c->routing.dropped[s] == 0) << s;
    }
    EXPECT_TRUE(std::isnan(c->stats.aux_loss));
    EXPECT_TRUE(std::isnan(c->stats.z_loss));
    const CaseGradients<float> g = RunBackward(*c, std::vector<float>(72 * 3, 1.0f));
    EXPECT_TRUE(std::isnan(g.d_weight[0]));
  }
}

TEST(RouterContract, JitterHasTheSameBitsOnEveryDevice) {
  constexpr int64_t kTokens = 300, kHidden = 5;  // more tokens than are uploaded at once
  constexpr float kJitter = 0.25f;
  const auto router = Router<float>::Create({.gate = "switch",
                                             .num_experts = 3,
                                             .top_k = 1,
                                             .hidden_size = kHidden,
                                             .input_jitter = kJitter,
                                             .seed = 7,
                                             .layer = 2})
                          .value();
  testing::ExpectSameBitsOnEveryDevice([&](const testing::TestDevice& device) {
    const auto tokens = device.Random(kTokens * kHidden, 1);
    const auto weight = device.Random(3 * kHidden, 2);
    Workspace workspace(device.memory()), host;
    RouterSaved<float> saved;
    const absl::Status status =
        Route<float>(*router,
                     {.tokens = tokens.view(kTokens, kHidden, kHidden),
                      .inputs = {.weight = weight.view(3, kHidden, kHidden)},
                      .batch = {.first_global_token = 1000, .step = 3},
                      .workspace = workspace,
                      .host = host,
                      .stream = device.stream()},
                     saved, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    const auto read = [&](MatrixView<const float> from) {
      const auto copy = device.Copy(std::vector<float>(kTokens * kHidden));
      EXPECT_TRUE(device.stream()
                      .CopyBytes(from.data(), copy.span().data(),
                                 kTokens * kHidden * int64_t{sizeof(float)})
                      .ok());
      return device.Read(copy);
    };
    const auto factors = read(saved.jitter);
    for (const float factor : factors) {
      EXPECT_GE(factor, 1 - kJitter);
      EXPECT_LE(factor, 1 + kJitter);
    }
    return std::tuple(factors, read(saved.tokens));
  });
}

TEST(RouterContract, ForwardRefusesWhatDoesNotFit) {
  const auto message = [](auto change) {
    const auto c = LogitCase(FullConfig(), 81);
    change(*c);
    const absl::Status status = RunForward(*c);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  using C = RouterCase<float>;
  EXPECT_THAT(message([](C& c) {
                c.micro_batches = {0, 24, 71};
              }),
              HasSubstr("Batch.micro_batch_offsets has 3 entries from 0 to 71, expected"));
  EXPECT_THAT(message([](C& c) { c.micro_batches = {1, 72}; }), HasSubstr("from 1 to 72"));
  EXPECT_THAT(message([](C& c) {
                c.sequences = {0, 30, 20, 72};
              }),
              HasSubstr("Batch.sequence_offsets has 4 entries from 0 to 72, expected ascending"));
  EXPECT_THAT(message([](C& c) { c.config.token_group.tokens = 5; }),
              HasSubstr("token group of 5 tokens, expected a divisor of 24"));
  EXPECT_THAT(message([](C& c) {
                c.config.token_group.tokens = -1;
                c.sequences = {0, 36, 72};
              }),
              HasSubstr("a sequence crosses the micro-batch of tokens 0 .. 24"));
  EXPECT_THAT(message([](C& c) {
                c.config.load_balancing = LoadBalancing::kSeqAuxLoss;
                c.sequences = {};
              }),
              HasSubstr("a sequence crosses"));
  EXPECT_THAT(message([](C& c) { c.config.micro_batch_tokens = 12; }),
              HasSubstr("micro-batch 0 has 24 tokens, expected 12 (micro_batch_tokens)"));

  const auto c = LogitCase(FullConfig(), 82);
  const auto router = *Router<float>::Create(c->config);
  const auto shape_message = [&](MatrixView<const float> x, MatrixView<const float> w) {
    RouterSaved<float> saved;
    const absl::Status status = router->Logits({.tokens = x,
                                                .inputs = {.weight = w},
                                                .batch = c->batch(),
                                                .workspace = c->workspace,
                                                .host = c->workspace,
                                                .stream = *c->stream},
                                               saved);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(shape_message({c->x.data(), 72, 6}, c->Weight()),
              HasSubstr("Router::Logits: tokens is [72, 6], expected [72, 7]"));
  EXPECT_THAT(shape_message(c->Tokens(), {c->weight.data(), 6, 7}),
              HasSubstr("weight is [6, 7], expected [7, 7]"));
}

TEST(RouterContract, BackwardRefusesWhatDoesNotFit) {
  const auto c = RoutedCase(FullConfig(), 83);
  const auto router = *Router<float>::Create(c->config);
  const auto message = [&](size_t slots, int64_t d_rows, size_t d_weight_size, int64_t w_cols) {
    const std::vector<float> d_slot(slots, 0.0f);
    std::vector<float> d_tokens(72 * 7, 0.0f), d_weight(d_weight_size, 0.0f);
    const absl::Status status = router->Backward(
        {.d_weight = d_slot,
         .weight = {c->weight.data(), 7, w_cols},
         .d_tokens = {d_tokens.data(), d_rows, 7},
         .gradients = RouterGradients{.weight = GradAccumulator(absl::MakeSpan(d_weight))},
         .workspace = c->workspace,
         .host = c->workspace,
         .stream = *c->stream},
        c->saved);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(message(215, 72, 49, 7), HasSubstr("d_weight holds 215"));
  EXPECT_THAT(message(216, 71, 49, 7), HasSubstr("d_tokens is [71, 7], expected [72, 7]"));
  EXPECT_THAT(message(216, 72, 48, 7),
              HasSubstr("the weight's gradient 48, the bias's 0, expected 216 (slots), 49 and 0"));
  EXPECT_THAT(message(216, 72, 49, 6), HasSubstr("weight is [7, 6], expected [7, 7]"));
}

}  // namespace
}  // namespace moe
