// Layers in a LibTorch model against the same mixture written in torch's operations, and misuses.
#include "moe/torch.h"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/local_ranks.h"

namespace {

using moe::testing::RunLocalRanks;
using ::testing::HasSubstr;
using torch::Tensor;
using Named = std::map<std::string, Tensor>;

constexpr int64_t kMicroBatches = 4, kRows = 32, kHidden = 32, kFfn = 48, kExperts = 8;
constexpr double kMaxNorm = 0.01, kNoLimit = std::numeric_limits<double>::infinity();

moe::MoeLayerConfig Config(const std::string& gate, int top_k) {
  return {.router = {.gate = gate,
                     .num_experts = kExperts,
                     .top_k = top_k,
                     .hidden_size = kHidden,
                     .aux_loss_coeff = 0.02f,
                     .z_loss_coeff = 0.001f},
          .ffn_hidden_size = kFfn,
          .init_std = 0.3,
          .down_init_std = 0.3};
}

// x [T, H] → {y, the router's loss}, float64.
std::pair<Tensor, Tensor> Reference(const Tensor& x, Named& w, const moe::RouterConfig& router) {
  const Tensor logits = x.matmul(w["gate.weight"].t()), p = torch::softmax(logits, -1);
  const auto [value, index] = p.topk(router.top_k, -1);
  const Tensor weight = router.gate == "mixtral" ? value / value.sum(-1, true) : value;
  Tensor y = torch::zeros_like(x), count = torch::zeros({kExperts}, torch::kFloat64);
  for (int64_t e = 0; e < kExperts; ++e) {
    const Tensor hit = index == e, rows = hit.any(1).nonzero().squeeze(1);
    count[e] = hit.sum().to(torch::kFloat64);
    if (rows.numel() == 0) continue;
    const std::string name = "experts." + std::to_string(e) + ".";
    const Tensor xs = x.index_select(0, rows);
    const Tensor hidden = torch::silu(xs.matmul(w[name + "gate_proj.weight"].t())) *
                          xs.matmul(w[name + "up_proj.weight"].t());
    const Tensor out = hidden.matmul(w[name + "down_proj.weight"].t());
    const Tensor share = (weight * hit).sum(1).index_select(0, rows).unsqueeze(1);
    y = y.index_add(0, rows, out * share);
  }
  const double tokens = static_cast<double>(x.size(0));
  const Tensor aux = 0.02 * kExperts / (router.top_k * tokens * tokens) * (p.sum(0) * count).sum();
  return {y, aux + 0.001 / tokens * torch::logsumexp(logits, -1).pow(2).sum()};
}

// Values of every pass and gradient, from ranks that share `out`.
void RunStep(int ranks, int ep, double max_norm, const moe::MoeLayerConfig& config,
             const std::vector<Tensor>& x, const std::vector<Tensor>& g, Named& out,
             Named* weights) {
  std::mutex mu;
  RunLocalRanks(ranks, [&](std::unique_ptr<moe::Communicator> world) -> absl::Status {
    at::set_num_threads(1);
    const auto trainer = std::make_shared<moe::torch::Trainer>(
        moe::TrainerOptions{.session = {.mesh = {.expert = ep}}, .micro_batches = kMicroBatches},
        std::move(world));
    moe::torch::MoeFfn layer(trainer, config, "mlp.");
    torch::nn::Linear dense(kHidden, kHidden);
    trainer->Adopt(*dense);
    {
      const torch::NoGradGuard off;
      dense->weight.copy_(torch::eye(kHidden));  // dx of the layer is the gradient of this one
      dense->bias.zero_();
    }
    for (int64_t r = 0; r < (*trainer)->rounds(); ++r) {
      const moe::Round round = trainer->BeginRound();
      const auto m = static_cast<size_t>(std::max<int64_t>(0, round.micro_batch()));
      const int64_t rows = round.empty() ? 0 : kRows;
      const Tensor xm = x[m].narrow(0, 0, rows).clone().requires_grad_();
      const auto [y, loss] = layer(dense(xm));
      ((y * g[m].narrow(0, 0, rows)).sum() + loss).backward();
      if (round.empty()) continue;
      const std::lock_guard<std::mutex> lock(mu);
      out["y" + std::to_string(m)] = y.detach();
      out["loss" + std::to_string(m)] = loss.detach();
      out["dx" + std::to_string(m)] = xm.grad();
    }
    const Tensor norm = torch::tensor(trainer->Reduce(max_norm), torch::kFloat64);
    const std::lock_guard<std::mutex> lock(mu);
    for (auto& item : layer->named_parameters()) out[item.key()] = item.value().grad();
    out["dense"] = dense->weight.grad();
    out["bias"] = dense->bias.grad();
    EXPECT_TRUE(torch::equal(out.emplace("norm", norm).first->second, norm));  // on every rank
    if (weights != nullptr) {
      for (auto& item : layer->named_parameters()) {
        (*weights)[item.key()] = item.value().detach().to(torch::kFloat64).requires_grad_();
      }
    }
    return absl::OkStatus();
  });
}

TEST(TorchTest, GradientsAreTorchsAndHaveTheSameBitsAtAnyLayout) {
  for (const auto& [gate, top_k] :
       {std::pair<std::string, int>{"mixtral", 2}, {"qwen2", 3}, {"switch", 1}}) {
    const moe::MoeLayerConfig config = Config(gate, top_k);
    torch::manual_seed(5);
    std::vector<Tensor> x, g;
    for (int64_t m = 0; m < kMicroBatches; ++m) {
      x.push_back(torch::randn({kRows, kHidden}));
      g.push_back(torch::randn({kRows, kHidden}) / kRows);
    }
    Named one, clipped, weights, want;
    RunStep(1, 1, kNoLimit, config, x, g, one, &weights);
    RunStep(1, 1, kMaxNorm, config, x, g, clipped, nullptr);
    want["dense"] = torch::zeros({kHidden, kHidden}, torch::kFloat64);
    want["bias"] = torch::zeros({kHidden}, torch::kFloat64);
    for (size_t m = 0; m < x.size(); ++m) {
      const Tensor xm = x[m].to(torch::kFloat64).requires_grad_();
      const auto [y, loss] = Reference(xm, weights, config.router);
      ((y * g[m]).sum() + loss).backward();
      want["y" + std::to_string(m)] = y.detach();
      want["loss" + std::to_string(m)] = loss.detach();
      want["dx" + std::to_string(m)] = xm.grad();
      want["dense"] += xm.grad().t().matmul(x[m].to(torch::kFloat64)) / kMicroBatches;
      want["bias"] += xm.grad().sum(0) / kMicroBatches;
    }
    Named gradients = {{"dense", want["dense"]}, {"bias", want["bias"]}};
    for (auto& [name, w] : weights) gradients[name] = w.grad() / kMicroBatches;
    Tensor squares = torch::zeros({}, torch::kFloat64);
    for (const auto& [name, gradient] : gradients) squares += gradient.square().sum();
    want["norm"] = squares.sqrt();
    ASSERT_GT(want["norm"].item<double>(), 2 * kMaxNorm);
    want.insert(gradients.begin(), gradients.end());
    ASSERT_EQ(one.size(), want.size());
    for (const auto& [name, gradient] : gradients) {
      one["clipped " + name] = clipped[name];
      want["clipped " + name] = gradient * kMaxNorm / want["norm"];
    }
    for (const auto& [name, have] : one) {
      // Sums of at most kMicroBatches * kRows terms with some tens of roundings each, of 2^-24.
      const double scale = want[name].abs().max().item<double>();
      EXPECT_LT((have - want[name]).abs().max().item<double>(), 1e-5 * scale) << gate << name;
    }
    for (const auto& [ranks, ep] : {std::pair{2, 1}, {2, 2}, {3, 3}}) {
      Named other;
      RunStep(ranks, ep, kMaxNorm, config, x, g, other, nullptr);
      ASSERT_EQ(other.size(), clipped.size());
      for (const auto& [name, have] : clipped) {
        EXPECT_TRUE(torch::equal(other[name], have)) << ranks << " ranks, EP " << ep << name;
      }
    }
  }
}

// A layer of one rank, one micro-batch, in a round.
struct One {
  std::shared_ptr<moe::torch::Trainer> trainer;
  moe::torch::MoeFfn layer = nullptr;
  Tensor x;
  explicit One(std::unique_ptr<moe::Communicator> world)
      : trainer(std::make_shared<moe::torch::Trainer>(moe::TrainerOptions{.micro_batches = 1},
                                                      std::move(world))),
        layer(trainer, Config("mixtral", 2), "mlp.") {
    torch::manual_seed(5);
    x = torch::randn({2, 4, kHidden});
    trainer->BeginRound();
  }
  Tensor Loss() {
    const auto [y, loss] = layer(x);
    return y.square().sum() + loss;
  }
};

template <typename Run>
std::string ErrorOf(const Run& run) {
  try {
    run();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

void WithOne(const std::function<void(One&)>& run) {
  RunLocalRanks(1, [&](std::unique_ptr<moe::Communicator> world) {
    One one(std::move(world));
    run(one);
    return absl::OkStatus();
  });
}

TEST(TorchTest, MisusesAreErrorsThatSayWhatWasExpected) {
  WithOne([](One& one) {
    const Tensor loss = one.Loss();
    EXPECT_THAT(ErrorOf([&] { one.Loss(); }), HasSubstr("expected one in each"));
    EXPECT_THAT(ErrorOf([&] { one.trainer->Reduce(); }), HasSubstr("the layer of mlp.gate.weight"));
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_THAT(ErrorOf([&] { loss.backward(); }), HasSubstr("was used by another Backward"));
    torch::nn::Linear late(2, 2);
    EXPECT_THAT(ErrorOf([&] { one.trainer->Adopt(*late); }), HasSubstr("after the first step"));
    EXPECT_THAT(ErrorOf([&] { one.trainer->Reduce(-1); }), HasSubstr("a norm of -1"));
  });
  Tensor left;
  WithOne([&](One& one) { left = one.Loss(); });
  EXPECT_THAT(ErrorOf([&] { left.backward(); }), HasSubstr("the trainer is gone"));
  WithOne([](One& one) {
    const Tensor loss = one.Loss();
    one.x.add_(1);
    EXPECT_THAT(ErrorOf([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
  });
  WithOne([](One& one) {
    one.layer->eval();
    EXPECT_THAT(ErrorOf([&] { one.Loss().backward(); }), HasSubstr("expected one in training"));
    one.x = one.x.to(torch::kFloat64);
    EXPECT_THAT(ErrorOf([&] { one.Loss(); }),
                HasSubstr("x is double on cpu, expected float on cpu"));
    one.x = torch::randn({4, 5});
    EXPECT_THAT(ErrorOf([&] { one.Loss(); }), HasSubstr("expected both [T, 32]"));
    one.x = torch::randn({4, kHidden});
    one.layer->to(torch::kFloat64);
    EXPECT_THAT(ErrorOf([&] { one.Loss(); }), HasSubstr("mlp.gate.weight is double on cpu"));
  });
  WithOne([](One& one) {
    (one.Loss() * 1e30).backward();
    EXPECT_THAT(ErrorOf([&] { one.trainer->Reduce(); }), HasSubstr("are not finite"));
    EXPECT_THAT(ErrorOf([&] { one.Loss(); }), HasSubstr("has ended"));
  });
}

TEST(TorchTest, RowsOfPaddingAreNoTokens) {
  RunLocalRanks(1, [](std::unique_ptr<moe::Communicator> world) {
    const auto trainer = std::make_shared<moe::torch::Trainer>(
        moe::TrainerOptions{.micro_batches = 2}, std::move(world));
    moe::torch::MoeFfn layer(trainer, Config("mixtral", 2), "mlp.");
    torch::manual_seed(3);
    const Tensor mask = torch::arange(2 * kRows).remainder(4).eq(3).view({2, kRows});
    const Tensor tokens = torch::randn({2, kRows, kHidden});
    const Tensor rows = tokens.masked_fill(mask.unsqueeze(-1), std::nan("")).requires_grad_();
    const Tensor kept = tokens.index({~mask}).view({2, -1, kHidden}).requires_grad_();
    trainer->BeginRound();
    const auto [y, loss] = layer(kept);
    (y.square().sum() + loss).backward();
    trainer->BeginRound();
    EXPECT_THAT(ErrorOf([&] { layer(rows, mask[0]); }), HasSubstr("padding_mask is bool [32]"));
    const auto [padded, padded_loss] = layer(rows, mask);
    (padded.square().sum() + padded_loss).backward();
    trainer->Reduce();
    EXPECT_TRUE(torch::equal(padded.index({~mask}).view_as(y), y));
    EXPECT_TRUE(torch::equal(padded_loss, loss));
    EXPECT_TRUE(torch::equal(rows.grad().index({~mask}).view_as(y), kept.grad()));
    EXPECT_EQ(padded.index({mask}).abs().sum().item<float>(), 0);
    EXPECT_EQ(rows.grad().index({mask}).abs().sum().item<float>(), 0);
    return absl::OkStatus();
  });
}

// A Reduce that was refused has done nothing: the step goes on, with what was adopted, too.
TEST(TorchTest, AStepGoesOnAfterAReduceThatCameTooEarly) {
  RunLocalRanks(1, [&](std::unique_ptr<moe::Communicator> world) {
    const auto trainer = std::make_shared<moe::torch::Trainer>(
        moe::TrainerOptions{.micro_batches = 1}, std::move(world));
    moe::torch::MoeFfn layer(trainer, Config("mixtral", 2), "mlp.");
    torch::nn::Linear head(kHidden, 1);
    trainer->Adopt(*head);
    trainer->BeginRound();
    const auto [y, router] = layer(torch::ones({4, kHidden}));
    const Tensor loss = head(y).square().sum() + router;
    EXPECT_THAT(ErrorOf([&] { trainer->Reduce(); }), HasSubstr("the layer of mlp.gate.weight"));
    loss.backward();
    EXPECT_GT(trainer->Reduce(), 0);
    EXPECT_GT(head->weight.grad().abs().sum().item<double>(), 0);
    return absl::OkStatus();
  });
}

// Nothing of it is trained and nothing before it: autograd calls no backward.
TEST(TorchTest, AFrozenLayerNeedsNoBackwardWhereItsInputHasNoGradient) {
  RunLocalRanks(1, [&](std::unique_ptr<moe::Communicator> world) {
    const auto trainer = std::make_shared<moe::torch::Trainer>(
        moe::TrainerOptions{.micro_batches = 1}, std::move(world));
    moe::MoeLayerConfig config = Config("mixtral", 2);
    config.train_router = config.train_experts = false;
    moe::torch::MoeFfn layer(trainer, config, "mlp.");
    torch::nn::Linear head(kHidden, 1);
    trainer->Adopt(*head);
    trainer->BeginRound();
    const auto [y, loss] = layer(torch::ones({4, kHidden}));
    EXPECT_FALSE(y.requires_grad());
    (head(y).square().sum() + loss).backward();
    EXPECT_GT(trainer->Reduce(), 0);
    trainer->BeginRound();
    const Tensor x = torch::ones({4, kHidden}).requires_grad_();
    std::get<0>(layer(x)).square().sum().backward();
    EXPECT_GT(x.grad().abs().sum().item<double>(), 0);
    trainer->Reduce();
    return absl::OkStatus();
  });
}

// Forward without gradients, anywhere; torch::load and to() move memory, and the layer follows.
TEST(TorchTest, WeightsThatTorchMovesAreFollowed) {
  WithOne([](One& one) {
    const torch::NoGradGuard off;
    const Tensor before = one.Loss();
    std::stringstream file;
    torch::save(one.layer, file);
    for (Tensor& p : one.layer->parameters()) p.zero_();
    EXPECT_FALSE(torch::equal(one.Loss(), before));
    torch::load(one.layer, file);
    EXPECT_TRUE(torch::equal(one.Loss(), before));
    one.layer->to(torch::kFloat64);
    one.layer->to(torch::kFloat32);
    EXPECT_TRUE(torch::equal(one.Loss(), before));
    for (Tensor& p : one.layer->parameters()) p.zero_();
    EXPECT_FALSE(torch::equal(one.Loss(), before));
  });
}

TEST(TorchTest, NamesAreTransformers) {
  WithOne([](One& one) {
    std::vector<std::string> names, expected = {"gate.weight"};
    for (int64_t e = 0; e < kExperts; ++e) {
      for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
        expected.push_back(absl::StrCat("experts.", e, ".", projection, ".weight"));
      }
    }
    for (const auto& item : one.layer->named_parameters()) {
      names.push_back(item.key());
      const bool down = item.key().find("down") != std::string::npos;
      const std::vector<int64_t> shape = names.back() == "gate.weight"
                                             ? std::vector<int64_t>{kExperts, kHidden}
                                         : down ? std::vector<int64_t>{kHidden, kFfn}
                                                : std::vector<int64_t>{kFfn, kHidden};
      EXPECT_EQ(item.value().sizes().vec(), shape) << item.key();
    }
    EXPECT_THAT(names, ::testing::UnorderedElementsAreArray(expected));
  });
}

// Its own roundings apart, some in a row of 2^-8 or 2^-11, a layer in 16 bits is that of float32.
TEST(TorchTest, LayersIn16BitsComputeFromFloat32Parameters) {
  torch::manual_seed(5);
  const Tensor x = torch::randn({kRows, kHidden}), g = torch::randn({kRows, kHidden}) / kRows;
  const auto run = [&](moe::DType dtype, torch::ScalarType scalar) {
    std::vector<Tensor> out;
    RunLocalRanks(1, [&](std::unique_ptr<moe::Communicator> world) {
      const auto trainer = std::make_shared<moe::torch::Trainer>(
          moe::TrainerOptions{.dtype = dtype, .micro_batches = 1}, std::move(world));
      moe::torch::MoeFfn layer(trainer, Config("mixtral", kExperts), "mlp.");
      trainer->BeginRound();
      const Tensor in = x.to(scalar).detach().requires_grad_();
      const auto [y, loss] = layer(in);
      EXPECT_EQ(y.scalar_type(), scalar);
      EXPECT_EQ(loss.scalar_type(), torch::kFloat32);
      ((y * g.to(scalar)).sum() + loss).backward();
      trainer->Reduce();
      out = {y.detach(), in.grad()};
      for (const Tensor& p : layer->parameters()) {
        EXPECT_EQ(p.scalar_type(), torch::kFloat32);
        out.push_back(p.grad());
      }
      const torch::NoGradGuard off;
      layer->parameters()[0].zero_();  // the gate: every expert has the same weight
      EXPECT_FALSE(torch::equal(std::get<0>(layer(in)), y));
      return absl::OkStatus();
    });
    return out;
  };
  const std::vector<Tensor> want = run(moe::DType::kFloat32, torch::kFloat32);
  for (const auto& [dtype, scalar, tolerance] :
       {std::tuple(moe::DType::kBFloat16, torch::kBFloat16, 0.05),
        {moe::DType::kFloat16, torch::kFloat16, 0.05 / 8}}) {
    const std::vector<Tensor> have = run(dtype, scalar);
    ASSERT_EQ(have.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      const double scale = want[i].abs().max().item<double>();
      EXPECT_LT((have[i].to(torch::kFloat32) - want[i]).abs().max().item<double>(),
                tolerance * scale)
          << i;
    }
  }
  RunLocalRanks(1, [&](std::unique_ptr<moe::Communicator> world) {
    const auto trainer = std::make_shared<moe::torch::Trainer>(
        moe::TrainerOptions{.dtype = moe::DType::kBFloat16}, std::move(world));
    moe::MoeLayerConfig config = Config("mixtral", 2);
    config.train_experts = false;
    EXPECT_THAT(ErrorOf([&] { moe::torch::MoeFfn(trainer, config, "mlp."); }),
                HasSubstr("frozen in 16 bits"));
    return absl::OkStatus();
  });
}

// The library's optimiser, and torch's, move the same tensors.
TEST(TorchTest, EitherOptimiserLowersTheLoss) {
  for (const bool own : {false, true}) {
    RunLocalRanks(1, [&](std::unique_ptr<moe::Communicator> world) {
      const auto trainer = std::make_shared<moe::torch::Trainer>(
          moe::TrainerOptions{.micro_batches = 1}, std::move(world));
      moe::torch::MoeFfn layer(trainer, Config("mixtral", 2), "mlp.");
      torch::optim::AdamW host(layer->parameters(), torch::optim::AdamWOptions(1e-2));
      const Tensor x = torch::randn({16, kHidden});
      std::vector<double> losses;
      for (int step = 0; step < 10; ++step) {
        host.zero_grad(/*set_to_none=*/step % 2 == 0);
        trainer->BeginRound();
        const auto [y, router] = layer(x);
        const Tensor loss = (y + x).square().mean();
        losses.push_back(loss.item<double>());
        (loss + router).backward();
        if (own) {
          trainer->Step({.learning_rate = 0.01});
        } else {
          trainer->Reduce();
          host.step();
        }
      }
      EXPECT_LT(losses.back(), 0.7 * losses.front()) << own;
      return absl::OkStatus();
    });
  }
}

}  // namespace
