// Frozen weights that stay in the mapped file: the bits of weights that were copied, without their
// memory.
#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>

#include "kernels/base/status_macros.h"
#include "moe/hf/hf_save.h"
#include "moe/hf/hf_weights.h"
#include "moe/run/session.h"
#include "moe/state/parameter_hash.h"
#include "tests/moe/io/io_test.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/status_is.h"

namespace moe::hf {
namespace {

using testing::RunSessions;
using enum absl::StatusCode;
using testing::StatusIs;

constexpr int64_t kHidden = 64, kExperts = 8, kTokens = 6;

struct Model {
  const char* type = nullptr;
  const char* block = nullptr;
  std::array<const char*, 3> projections;  // gate, up, down
  const char* experts_key = nullptr;
  const char* router = "gate";
  bool stacked = false;
};
// In a file they are in order of names: Mixtral's down projection between the other two.
constexpr Model kMixtral = {"mixtral", "block_sparse_moe", {"w1", "w3", "w2"}, "num_local_experts"};
constexpr Model kGranite = {"granitemoe",        "block_sparse_moe", {},
                            "num_local_experts", "router.layer",     true};
constexpr Model kQwen = {"qwen3_moe", "mlp", {"gate_proj", "up_proj", "down_proj"}, "num_experts"};

class BorrowedWeightsTest : public IoTest {
 protected:
  int64_t expert_bytes() const { return 3 * kHidden * width_ * 2; }
  // `stray_bytes`: of a tensor that comes before all others.
  void WriteModel(const Model& model, SafetensorsType type = SafetensorsType::kBF16,
                  int64_t stray_bytes = 0) {
    Write("config.json",
          absl::StrCat(R"({"model_type": ")", model.type, R"(", "hidden_size": )", kHidden,
                       R"(, "intermediate_size": )", width_, R"(, "moe_intermediate_size": )",
                       width_, ", \"", model.experts_key, "\": ", kExperts,
                       R"(, "num_experts_per_tok": 2, "num_hidden_layers": 1})"));
    std::vector<float> values(model.stacked ? 2 * kExperts * kHidden * width_
                                            : kHidden * width_ + 100);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = 0.1f * std::sin(static_cast<float>(i % 7919));
    }
    std::vector<BFloat16> rounded;
    for (const float value : values) rounded.emplace_back(value);
    const bool bf16 = type == SafetensorsType::kBF16;
    std::vector<SafetensorsSource> tensors;
    if (stray_bytes > 0) {
      tensors.push_back({.name = "a",
                         .type = SafetensorsType::kU8,
                         .shape = {stray_bytes},
                         .bytes = BytesOf<float>(values).first(stray_bytes)});
    }
    const auto add = [&](const std::string& name, std::vector<int64_t> shape, size_t at = 0) {
      size_t n = 1;
      for (const int64_t size : shape) n *= static_cast<size_t>(size);
      tensors.push_back(
          {.name = absl::StrCat("model.layers.0.", model.block, ".", name, ".weight"),
           .type = type,
           .shape = std::move(shape),
           .bytes = bf16 ? BytesOf<BFloat16>(absl::MakeConstSpan(rounded).subspan(at, n))
                         : BytesOf<float>(absl::MakeConstSpan(values).subspan(at, n))});
    };
    for (int64_t e = 0; e < kExperts && !model.stacked; ++e) {
      const std::string expert = absl::StrCat("experts.", e, ".");
      std::vector<std::string> names(model.projections.begin(), model.projections.end());
      std::sort(names.begin(), names.end());
      for (const std::string& name : names) {
        const bool down = name == model.projections[2];
        const auto first = static_cast<size_t>(e + std::ssize(name));  // no two experts are equal
        if (down) add(expert + name, {kHidden, width_}, first);
        if (!down) add(expert + name, {width_, kHidden}, first);
      }
    }
    if (model.stacked) {
      add("input_linear", {kExperts, 2 * width_, kHidden});
      add("output_linear", {kExperts, kHidden, width_});
    }
    add(model.router, {kExperts, kHidden}, 17);
    ASSERT_TRUE(WriteSafetensors(Path("model.safetensors"), tensors).ok());
  }

  absl::StatusOr<LayerWeights> Find() const {
    MOE_ASSIGN_OR_RETURN(const HfConfig config, ReadHfConfig(Path("config.json")));
    MOE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(root_.string()));
    return LayerWeights::Find(config, std::move(checkpoint), std::nullopt);
  }

  int64_t width_ = 96;
};

// A frozen layer of this rank. The checkpoint is closed once it is loaded.
struct Loaded {
  const Context* context = nullptr;
  std::unique_ptr<ParameterStore> store;
  std::unique_ptr<MoeLayer<BFloat16>> layer;

  static absl::StatusOr<Loaded> Create(const absl::StatusOr<LayerWeights>& weights, LoadBy by,
                                       const Context& context, bool pack = false) {
    MOE_RETURN_IF_ERROR(weights.status());
    Loaded loaded = {.context = &context};
    MoeLayerConfig config = weights->config().moe;
    config.train_router = config.train_experts = false;
    config.pack_weights = pack;
    loaded.store = std::make_unique<ParameterStore>(DType::kBFloat16, 1, context);
    MOE_ASSIGN_OR_RETURN(loaded.layer,
                         MoeLayer<BFloat16>::Create(config, "mlp.", *loaded.store, context));
    MOE_RETURN_IF_ERROR(weights->Load(*loaded.store, *context.compute, *context.host, "mlp.", by));
    return loaded;
  }

  absl::Status Forward(std::vector<float>& y, Stash* stash = nullptr) {
    std::vector<BFloat16> x(kTokens * kHidden), out(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = BFloat16(std::cos(static_cast<float>(i * i)));
    }
    MOE_RETURN_IF_ERROR(
        layer->Forward({.context = *context, .batch = {.mode = Mode::kEvaluation}, .stash = stash},
                       {x.data(), kTokens, kHidden}, {out.data(), kTokens, kHidden}));
    y.resize(out.size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = static_cast<float>(out[i]);
    return absl::OkStatus();
  }
};

int64_t AnonymousBytes() {
  std::ifstream status("/proc/self/status");
  int64_t kib = 0;
  for (std::string line; std::getline(status, line);) {
    if (!absl::StartsWith(line, "RssAnon:")) continue;
    EXPECT_TRUE(absl::SimpleAtoi(line.substr(8, line.size() - 8 - 3), &kib)) << line;
  }
  return kib << 10;
}

TEST_F(BorrowedWeightsTest, HaveTheBitsOfCopiesAtAnyLayout) {
  for (const Model& model : {kMixtral, kQwen, kGranite}) {
    WriteModel(model);
    for (const int ranks : {1, 3}) {
      RunSessions(ranks, {.mesh = {.expert = ranks}}, [&](Session& session) -> absl::Status {
        const Context& context = session.context();
        MOE_ASSIGN_OR_RETURN(auto copied, Loaded::Create(Find(), LoadBy::kCopy, context));
        MOE_ASSIGN_OR_RETURN(auto borrowed, Loaded::Create(Find(), LoadBy::kBorrow, context));
        std::vector<float> y, same;
        MOE_RETURN_IF_ERROR(copied.Forward(y));
        MOE_RETURN_IF_ERROR(borrowed.Forward(same));
        EXPECT_EQ(same, y) << model.type << ", " << ranks << " ranks";
        EXPECT_GT(std::fabs(y[0]), 0);
        const auto here = static_cast<int64_t>(copied.layer->parameters().size() - 1) / 2;
        EXPECT_EQ(borrowed.store->borrowed_bytes(), here * expert_bytes());
        EXPECT_EQ(borrowed.store->bytes(), copied.store->bytes() - here * expert_bytes());
        EXPECT_EQ(copied.store->borrowed_bytes(), 0);
        for (const auto& p : borrowed.store->parameters()) {
          MOE_ASSIGN_OR_RETURN(const auto values, p->ReadMaster(*context.compute));
          MOE_ASSIGN_OR_RETURN(const auto expected,
                               copied.store->Find(p->spec().name)->ReadMaster(*context.compute));
          EXPECT_EQ(values, expected) << p->spec().name;
        }
        return CheckReplicas(*borrowed.store, context);
      });
    }
  }
}

TEST_F(BorrowedWeightsTest, TakeNoMemoryOfTheProcess) {
  width_ = 2048;
  WriteModel(kMixtral);
  RunSessions(1, {}, [&](Session& session) -> absl::Status {
    std::vector<float> y;
    const int64_t before = AnonymousBytes();
    MOE_ASSIGN_OR_RETURN(auto borrowed, Loaded::Create(Find(), LoadBy::kBorrow, session.context()));
    MOE_RETURN_IF_ERROR(borrowed.Forward(y));
    const int64_t all = kExperts * expert_bytes();
    const int64_t taken = AnonymousBytes() - before;
    EXPECT_LT(taken, all / 2);
    MOE_ASSIGN_OR_RETURN(auto copied, Loaded::Create(Find(), LoadBy::kCopy, session.context()));
    EXPECT_GT(AnonymousBytes() - before - taken, all / 2);  // or the test sees nothing
    return absl::OkStatus();
  });
}

TEST_F(BorrowedWeightsTest, WhatTheStoreWouldNotHaveSoIsCopied) {
  for (const auto& [type, stray, pack] :
       {std::tuple(SafetensorsType::kF32, 0, false), std::tuple(SafetensorsType::kBF16, 1, false),
        std::tuple(SafetensorsType::kBF16, 0, true)}) {
    WriteModel(kQwen, type, stray);
    RunSessions(1, {}, [&](Session& session) -> absl::Status {
      const Context& context = session.context();
      MOE_ASSIGN_OR_RETURN(auto copied, Loaded::Create(Find(), LoadBy::kCopy, context));
      MOE_ASSIGN_OR_RETURN(auto asked, Loaded::Create(Find(), LoadBy::kBorrow, context, pack));
      EXPECT_EQ(asked.store->borrowed_bytes(), 0);
      std::vector<float> y, same;
      MOE_RETURN_IF_ERROR(copied.Forward(y));
      MOE_RETURN_IF_ERROR(asked.Forward(same));
      EXPECT_EQ(same, y);
      return absl::OkStatus();
    });
  }
}

TEST_F(BorrowedWeightsTest, AreSavedAsTheyWereRead) {
  const std::string copy = Path("copy");
  std::filesystem::create_directory(copy);
  for (const Model& model : {kMixtral, kQwen, kGranite}) {
    WriteModel(model);
    RunSessions(3, {.mesh = {.expert = 3}}, [&](Session& session) -> absl::Status {
      const auto weights = Find();
      MOE_ASSIGN_OR_RETURN(const auto loaded,
                           Loaded::Create(weights, LoadBy::kBorrow, session.context()));
      return SaveLayers(weights->config(), {{.layer = 0, .prefix = "mlp."}}, *loaded.store,
                        session.context(), {.folder = copy, .type = DType::kBFloat16});
    });
    const auto from = SafetensorsFile::Open(Path("model.safetensors"));
    const auto to = SafetensorsFile::Open(copy + "/model.safetensors").value();
    ASSERT_EQ(to.tensors().size(), from->tensors().size());
    for (const SafetensorsTensor& tensor : from->tensors()) {
      const SafetensorsTensor* const saved = to.Find(tensor.name);
      ASSERT_NE(saved, nullptr) << tensor.name;
      EXPECT_EQ(saved->shape, tensor.shape) << tensor.name;
      EXPECT_EQ(to.Data(*saved), from->Data(tensor)) << tensor.name;
    }
  }
}

TEST_F(BorrowedWeightsTest, AreNotWrittenAndServeBackwardWhereTheyLieTogether) {
  for (const Model& model : {kMixtral, kQwen}) {
    WriteModel(model);
    RunSessions(1, {}, [&](Session& session) -> absl::Status {
      const Context& context = session.context();
      MOE_ASSIGN_OR_RETURN(auto borrowed, Loaded::Create(Find(), LoadBy::kBorrow, context));
      const StashHandle stash = session.stashes().Take();
      std::vector<float> y;
      const absl::Status status = borrowed.Forward(y, stash.get());
      if (absl::string_view(model.type) == "mixtral") {
        EXPECT_THAT(status,
                    StatusIs(kFailedPrecondition, "mlp.experts.0.gate_up_proj.weight lie apart"));
      } else {
        EXPECT_TRUE(status.ok()) << status;
      }
      Parameter* const weight = borrowed.store->Find("mlp.experts.0.down_proj.weight");
      const std::vector<float> values(static_cast<size_t>(weight->size()));
      EXPECT_EQ(borrowed.store->WriteMaster(*weight, values, *context.compute).code(),
                kFailedPrecondition);
      EXPECT_EQ(borrowed.store->Borrow(*weight, {}).code(), kInvalidArgument);
      Parameter* const router = borrowed.store->Find("mlp.gate.weight");
      EXPECT_EQ(borrowed.store->Borrow(*router, {}).code(), kFailedPrecondition);
      return absl::OkStatus();
    });
  }
}

}  // namespace
}  // namespace moe::hf
