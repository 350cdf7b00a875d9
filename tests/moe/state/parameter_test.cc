// ParameterStore: initial values, access by name and by layer, masters in memory of the host.
#include "moe/state/parameter.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/layer/moe_layer.h"
#include "moe/run/session.h"
#include "moe/state/parameter_hash.h"
#include "moe/train/optimizer.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using enum absl::StatusCode;
using testing::StatusIs;

// A layer with every kind of parameter, and one micro-batch for it.
template <typename T>
class LayerOnRank {
 public:
  static constexpr int64_t kTokens = 16, kHidden = 8;

  // `options`: pack_weights, and what is trained.
  absl::Status Create(const MoeLayerConfig& options, std::unique_ptr<Communicator> world) {
    MOE_ASSIGN_OR_RETURN(session_, Session::Create({}, std::move(world)));
    store_ = std::make_unique<ParameterStore>(DTypeOf<T>::value, 1);
    const MoeLayerConfig config = {
        .router = {.gate = "deepseek-v3", .num_experts = 4, .top_k = 2, .hidden_size = kHidden},
        .ffn_hidden_size = 12,
        .shared_expert_ffn_hidden_size = 4,
        .gated_shared_expert = true,
        .projection_biases = true,
        .train_router = options.train_router,
        .train_experts = options.train_experts,
        .init_std = 0.5,
        .down_init_std = 0.5,
        .pack_weights = options.pack_weights};
    MOE_ASSIGN_OR_RETURN(layer_, MoeLayer<T>::Create(config, "", *store_, session_->context()));
    MOE_ASSIGN_OR_RETURN(reducer_,
                         GradientReducer::Create({.max_terms = 1}, *store_, session_->context(),
                                                 session_->gradient_stream()));
    MOE_ASSIGN_OR_RETURN(optimizer_,
                         Optimizer::Create({}, *store_, *reducer_, session_->context()));
    return absl::OkStatus();
  }
  ParameterStore& store() { return *store_; }
  // Gradient of the last step.
  absl::StatusOr<std::vector<float>> Gradient(const Parameter& parameter) {
    std::vector<float> values(parameter.size());
    MOE_ASSIGN_OR_RETURN(const auto sum, reducer_->Gradient(parameter, 1, absl::MakeSpan(values),
                                                            *session_->context().compute));
    return std::vector<float>(sum.begin(), sum.end());
  }
  const Context& context() const { return session_->context(); }

  // y and dx of a step, one behind the other.
  absl::StatusOr<std::vector<float>> Step(double learning_rate) {
    const Context& context = session_->context();
    std::vector<T> x(kTokens * kHidden), y(x.size()), dx(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = T(std::sin(static_cast<float>(i * i)));
    const auto view = [](std::vector<T>& rows) {
      return MatrixView<T>(rows.data(), kTokens, kHidden);
    };
    const StashHandle stash = session_->stashes().Take();
    const Pass pass = {.context = context, .stash = stash.get()};
    MOE_RETURN_IF_ERROR(reducer_->Begin());
    MOE_RETURN_IF_ERROR(layer_->Forward(pass, view(x), view(y)));
    MOE_RETURN_IF_ERROR(layer_->Backward(
        pass, view(x), view(dx), [&](Parameter& each) { return reducer_->MarkReady(each); }));
    MOE_RETURN_IF_ERROR(reducer_->Finish());
    MOE_RETURN_IF_ERROR(optimizer_->Step({.learning_rate = learning_rate}).status());
    std::vector<float> both;
    for (const auto* rows : {&y, &dx}) {
      for (const T value : *rows) both.push_back(static_cast<float>(value));
    }
    return both;
  }

 private:
  std::unique_ptr<Session> session_;
  std::unique_ptr<ParameterStore> store_;
  std::unique_ptr<MoeLayer<T>> layer_;
  std::unique_ptr<GradientReducer> reducer_;
  std::unique_ptr<Optimizer> optimizer_;
};

using HostMemory = std::vector<std::vector<float>>;  // by parameter

HostMemory CopyOfMasters(const ParameterStore& store) {
  HostMemory copy;
  for (const auto& p : store.parameters()) {
    copy.emplace_back(p->master().begin(), p->master().end());
  }
  return copy;
}

absl::Status AdoptAll(ParameterStore& store, HostMemory& memory) {
  for (const auto& p : store.parameters()) {
    MOE_RETURN_IF_ERROR(store.Adopt(*p, absl::MakeSpan(memory[p->index()])));
  }
  return absl::OkStatus();
}

// The host moves all weights twice; what it leaves behind is NaN, so that nothing reads it.
template <typename T>
void ExpectStepsFromAdoptedMemory(bool pack_weights) {
  testing::RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    LayerOnRank<T> rank;
    MOE_RETURN_IF_ERROR(rank.Create({.pack_weights = pack_weights}, std::move(world)));
    MOE_ASSIGN_OR_RETURN(const auto before, rank.Step(0));
    const HostMemory initial = CopyOfMasters(rank.store());
    HostMemory first = initial, second = initial;
    for (auto& values : first) {
      for (float& value : values) value *= 2;
    }
    MOE_RETURN_IF_ERROR(AdoptAll(rank.store(), first));
    MOE_ASSIGN_OR_RETURN(const auto doubled, rank.Step(0));
    EXPECT_NE(doubled, before);

    MOE_RETURN_IF_ERROR(AdoptAll(rank.store(), second));
    for (auto& values : first) {
      std::fill(values.begin(), values.end(), std::numeric_limits<float>::quiet_NaN());
    }
    MOE_ASSIGN_OR_RETURN(const auto after, rank.Step(0.01));
    EXPECT_EQ(after, before);
    for (const auto& p : rank.store().parameters()) {
      EXPECT_EQ(second[p->index()] != initial[p->index()], p->spec().trainable) << p->spec().name;
    }
    return absl::OkStatus();
  });
}

TEST(ParameterStoreTest, LayersAndTheOptimiserFollowAdoptedMemory) {
  ExpectStepsFromAdoptedMemory<float>(false);
  ExpectStepsFromAdoptedMemory<float>(true);
  ExpectStepsFromAdoptedMemory<BFloat16>(false);
}

// Compares with a layer that is trained whole: the same outputs and gradients, by the input too,
// and frozen parameters stay. In 16 bits these have no float32 values but those of vectors.
template <typename T>
void ExpectFrozenPartsToStay(bool train_router, bool train_experts) {
  testing::RunLocalRanks(1, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(auto other, world->Split(0, 0));
    LayerOnRank<T> whole, part;
    MOE_RETURN_IF_ERROR(whole.Create({}, std::move(world)));
    MOE_RETURN_IF_ERROR(part.Create({.train_router = train_router, .train_experts = train_experts},
                                    std::move(other)));
    MOE_ASSIGN_OR_RETURN(const auto expected, whole.Step(0));
    std::vector<std::vector<float>> before;
    for (const auto& p : part.store().parameters()) {
      MOE_ASSIGN_OR_RETURN(before.emplace_back(), p->ReadMaster(*part.context().compute));
    }
    MOE_ASSIGN_OR_RETURN(const auto got, part.Step(0.1));
    EXPECT_EQ(got, expected);
    int64_t bytes = 0;
    for (const auto& p : part.store().parameters()) {
      const std::string& name = p->spec().name;
      const bool router = absl::StartsWith(name, "gate.");
      const bool trained = !p->spec().host_state && (router ? train_router : train_experts);
      EXPECT_EQ(p->spec().trainable, trained) << name;
      const bool half = sizeof(T) == 2, matrix = p->spec().rows > 1;
      bytes += p->size() * (!half ? 4 : p->frozen() && matrix ? 2 : 6);
      MOE_ASSIGN_OR_RETURN(const auto after, p->ReadMaster(*part.context().compute));
      EXPECT_EQ(after != before[p->index()], trained) << name;
      if (!trained) continue;
      MOE_ASSIGN_OR_RETURN(const auto gradient, part.Gradient(*p));
      MOE_ASSIGN_OR_RETURN(const auto all, whole.Gradient(*whole.store().Find(name)));
      EXPECT_EQ(gradient, all) << name;
    }
    EXPECT_EQ(part.store().bytes(), bytes);
    return CheckReplicas(part.store(), part.context());
  });
}

TEST(ParameterStoreTest, FrozenPartsOfALayerStayAndTheOthersTrain) {
  for (const bool train_router : {false, true}) {
    ExpectFrozenPartsToStay<float>(train_router, !train_router);
    ExpectFrozenPartsToStay<BFloat16>(train_router, !train_router);
    ExpectFrozenPartsToStay<Float16>(train_router, false);
  }
}

TEST(ParameterStoreTest, AMatrixThatIsFrozenIn16BitsIsWrittenAndReadWithoutAMaster) {
  ParameterStore store(DType::kBFloat16, 1);
  Parameter& weight = **store.Add({.name = "w", .rows = 2, .cols = 2, .trainable = false});
  const auto stream = MakeInlineStream();
  EXPECT_TRUE(weight.master().empty());
  ASSERT_TRUE(store.WriteMaster(weight, {1, 2, 3, 4}, *stream).ok());
  ASSERT_TRUE(store.WriteMaster(weight, {5, 1 + 0x1p-12f}, *stream, 2).ok());
  EXPECT_THAT(*weight.ReadMaster(*stream), ElementsAre(1, 2, 5, 1));
  EXPECT_EQ(weight.view<BFloat16>().row(1)[0], BFloat16(5.0f));
  const absl::Status beyond = store.WriteMaster(weight, {1, 2}, *stream, 3);
  EXPECT_THAT(std::string(beyond.message()), HasSubstr("2 values from 3 on for w"));
  std::vector<float> values(4);
  EXPECT_TRUE(absl::IsFailedPrecondition(store.Adopt(weight, absl::MakeSpan(values))));
  EXPECT_EQ(store.bytes(), 8);
  EXPECT_TRUE(absl::IsInvalidArgument(store.Add({.name = "s", .host_state = true}).status()));
}

TEST(ParameterStoreTest, WhatAFileWillFillStartsAtZeroAndForInferenceFrozen) {
  for (const StoreUse use : {StoreUse::kReading, StoreUse::kInference}) {
    ParameterStore store(DType::kFloat32, 1);
    store.set_use(use);
    for (const Initializer initializer : {Initializer::kNormal, Initializer::kOnes}) {
      const Parameter& p = **store.Add(
          {.name = absl::StrCat("w", static_cast<int>(initializer)), .initializer = initializer});
      EXPECT_THAT(p.master(), ElementsAre(0));
      EXPECT_EQ(p.spec().trainable, use == StoreUse::kReading);
    }
  }
}

TEST(ParameterStoreTest, AdoptingTheSameMemoryChangesNothingAndAnotherSizeIsRefused) {
  ParameterStore store(DType::kFloat32, 1);
  Parameter& weight = **store.Add({.name = "w", .rows = 2, .cols = 3});
  std::vector<float> values = {1, 2, 3, 4, 5, 6};
  ASSERT_TRUE(store.Adopt(weight, absl::MakeSpan(values)).ok());
  const int64_t version = weight.version();
  ASSERT_TRUE(store.Adopt(weight, absl::MakeSpan(values)).ok());
  EXPECT_EQ(weight.version(), version);
  EXPECT_THAT(store.Adopt(weight, absl::MakeSpan(values).first(5)),
              StatusIs(kInvalidArgument, "5 values for w, expected 2 * 3"));
  EXPECT_EQ(weight.master().data(), values.data());
  EXPECT_THAT(weight.master(), ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST(ParameterStoreTest, ASharedMasterStaysAfterTheStoreAndIsNotPacked) {
  std::shared_ptr<float> memory;
  {
    ParameterStore store(DType::kBFloat16, 1);
    Parameter* const weight = *store.Add({.name = "w", .rows = 2, .cols = 3});
    Parameter& frozen = **store.Add({.name = "f", .rows = 2, .cols = 3, .trainable = false});
    memory = *store.Share(*weight);
    EXPECT_EQ(memory.get(), weight->master().data());
    memory.get()[5] = 7;
    EXPECT_TRUE(absl::IsFailedPrecondition(store.Pack({&weight, 1}, *MakeInlineStream()).status()));
    EXPECT_TRUE(absl::IsFailedPrecondition(store.Share(frozen).status()));
  }
  EXPECT_EQ(memory.get()[5], 7);
}

// Weights of a slab, as layers read them, are stored one behind the other, and have the values of
// lone parameters.
TEST(ParameterStoreTest, ParametersOfASlabLieOneBehindTheOtherUntilAdopted) {
  const ParameterSpec specs[] = {{.name = "a", .rows = 3, .cols = 5},
                                 {.name = "b", .rows = 3, .cols = 5}};
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    ParameterStore store(type, 1), lone(type, 1);
    ASSERT_TRUE(store.Add({.name = "before"}).ok());
    const std::vector<Parameter*> slab = *store.AddSlab(specs);
    const std::byte* const first = slab[0]->replica().front().data();
    EXPECT_EQ(slab[1]->replica().front().data() - first, 15 * 4);
    if (type == DType::kBFloat16) {
      EXPECT_EQ(slab[1]->view<BFloat16>().data() - slab[0]->view<BFloat16>().data(), 15);
    }
    EXPECT_EQ(slab[1]->slab(), 1);
    EXPECT_FALSE(store.EndsSlab(*slab[0]));
    EXPECT_TRUE(store.EndsSlab(*slab[1]));
    ASSERT_TRUE(lone.Add(specs[1]).ok());
    EXPECT_EQ(slab[1]->master(), lone.Find("b")->master());
    const int64_t bytes = store.bytes();
    std::vector<float> values(15, 7.0f);
    const std::vector<float> other(slab[1]->master().begin(), slab[1]->master().end());
    ASSERT_TRUE(store.Adopt(*slab[0], absl::MakeSpan(values)).ok());
    EXPECT_EQ(store.bytes(), bytes - 15 * 4);
    EXPECT_THAT(slab[1]->master(), ::testing::ElementsAreArray(other));
    if (type == DType::kBFloat16) {
      EXPECT_EQ(slab[0]->view<BFloat16>()(2, 4), BFloat16(7.0f));
      EXPECT_EQ(slab[1]->view<BFloat16>().data() - slab[0]->view<BFloat16>().data(), 15);
    }
  }
  ParameterStore store(DType::kFloat32, 1);
  const absl::Status status =
      store.AddSlab({{.name = "a", .rows = 3}, {.name = "b", .rows = 4}}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(store.Find("a"), nullptr);
}

TEST(ParameterStoreTest, MastersAreFoundByNameWrittenAndRead) {
  ParameterStore store(DType::kBFloat16, 1);
  Parameter* const weight = *store.Add({.name = "w", .rows = 2, .cols = 2});
  EXPECT_EQ(store.Find("w"), weight);
  EXPECT_EQ(store.Find("v"), nullptr);
  const auto stream = MakeInlineStream();
  const std::vector<float> values = {1, 2, 3, 1 + 0x1p-12f};
  ASSERT_TRUE(store.WriteMaster(*weight, values, *stream).ok());
  EXPECT_THAT(store.WriteMaster(*weight, {5, 6, 7}, *stream),
              StatusIs(kInvalidArgument, "3 values for w, expected 2 * 2"));
  EXPECT_EQ(*weight->ReadMaster(*stream), values);
  EXPECT_EQ(weight->view<BFloat16>().row(1)[1], BFloat16(1.0f));  // what layers read, rounded
}

TEST(ParameterStoreTest, ALayerKnowsItsParametersInTheStore) {
  testing::RunSessions(2, {.mesh = {.expert = 2}}, [&](Session& session) -> absl::Status {
    const Context& context = session.context();
    ParameterStore store(DType::kFloat32, 1, context);
    const MoeLayerConfig config = {
        .router = {.gate = "deepseek-v3", .num_experts = 2, .top_k = 1, .hidden_size = 8},
        .ffn_hidden_size = 4};
    MOE_ASSIGN_OR_RETURN(const auto first, MoeLayer<float>::Create(config, "0.", store, context));
    MOE_ASSIGN_OR_RETURN(const auto second, MoeLayer<float>::Create(config, "1.", store, context));
    const std::string expert = absl::StrCat("1.experts.", context.mesh->world().rank());
    EXPECT_THAT(second->parameters(), ElementsAre(store.Find("1.gate.weight"),
                                                  store.Find("1.gate.e_score_correction_bias"),
                                                  store.Find(expert + ".gate_up_proj.weight"),
                                                  store.Find(expert + ".down_proj.weight")));
    EXPECT_EQ(second->parameters().front()->spec().name, "1.gate.weight");
    EXPECT_EQ(first->parameters().front()->spec().name, "0.gate.weight");
    return absl::OkStatus();
  });
}

// Boxes may begin at an odd element, although two elements share a draw.
TEST(ParameterStoreTest, ABoxStartsWithTheValuesThatItHasInTheWhole) {
  const ParameterSpec whole = {
      .name = "w",
      .rows = 6,
      .cols = 5,
      .parts = {{.name = "a", .rows = 4, .cols = 5}, {.name = "b", .rows = 2, .cols = 5}}};
  ParameterStore store(DType::kFloat32, 1);
  const MatrixView<const float> all = (*store.Add(whole))->view<float>();
  const auto expect = [&](const std::vector<TensorBox>& boxes, const std::vector<int64_t>& rows,
                          const std::vector<int64_t>& cols) {
    ParameterSpec spec = whole;
    spec.rows = std::ssize(rows);
    spec.cols = std::ssize(cols);
    spec.boxes = boxes;
    ParameterStore of_rank(DType::kFloat32, 1);
    const MatrixView<const float> held = (*of_rank.Add(spec))->view<float>();
    for (size_t r = 0; r < rows.size(); ++r) {
      for (size_t c = 0; c < cols.size(); ++c) EXPECT_EQ(held(r, c), all(rows[r], cols[c]));
    }
  };
  expect({{2, 4, 0, 5}, {1, 2, 0, 5}}, {2, 3, 5}, {0, 1, 2, 3, 4});
  expect({{0, 4, 3, 5}, {0, 2, 3, 5}}, {0, 1, 2, 3, 4, 5}, {3, 4});

  ParameterSpec spec = whole;
  spec.name = "v";
  spec.boxes = {{0, 5, 0, 5}, {0, 1, 0, 5}};
  EXPECT_THAT(store.Add(spec).status(),
              StatusIs(kInvalidArgument, "v has 2 boxes, expected one within each of its 2 parts"));
}

int64_t ThreadsOfThisProcess() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

// Weights that are worth several threads: oneTBB's are made where they are first asked for, and
// stay.
TEST(ParameterStoreTest, InitialValuesAreDrawnByTheRanksThreadsAlone) {
  const ParameterSpec spec = {.name = "w", .cols = (1 << 16) + 1};
  const int64_t before = ThreadsOfThisProcess();
  ParameterStore serial(DType::kFloat32, 1);
  const Parameter& weight = **serial.Add(spec);
  EXPECT_EQ(ThreadsOfThisProcess(), before);
  testing::RunSessions(1, {.threads = 3}, [&](Session& session) -> absl::Status {
    ParameterStore store(DType::kFloat32, 1, session.context());
    MOE_ASSIGN_OR_RETURN(const Parameter* const same, store.Add(spec));
    EXPECT_EQ(same->master(), weight.master());
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace moe
