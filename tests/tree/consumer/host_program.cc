// A program with its own training loop that uses layers by installed headers alone, over 2 ranks.
// Run: host_program MODEL FOLDER: a Hugging Face folder; one for files.
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <moe/hf/hf_save.h>
#include <moe/hf/hf_weights.h>
#include <moe/moe.h>

namespace {

using moe::BFloat16;
using moe::Context;
constexpr int64_t kTokens = 12, kHidden = 16;

#define EXPECT(condition) \
  if (!(condition))       \
  return absl::InternalError("host_program: line " + std::to_string(__LINE__) + ": " #condition)

template <typename T>
moe::MatrixView<T> View(std::vector<T>& rows) {
  return {rows.data(), static_cast<int64_t>(rows.size()) / kHidden, kHidden};
}
template <typename T>
std::vector<T> Rows(int call) {
  std::vector<T> rows;
  for (int i = 0; i < kTokens * kHidden; ++i) rows.push_back(T(std::sin(float(i * i + call))));
  return rows;
}

absl::Status Parameters(moe::ParameterStore& store, const Context& context) {
  moe::Parameter* const gate = store.Find("a.gate.weight");
  EXPECT(gate != nullptr && store.Find("a.no.weight") == nullptr);
  moe::Stream& stream = StreamOf(*gate, context);
  MOE_ASSIGN_OR_RETURN(std::vector<float> values, gate->ReadMaster(stream));
  for (float& value : values) value *= 2;
  MOE_RETURN_IF_ERROR(store.WriteMaster(*gate, values, stream));
  MOE_ASSIGN_OR_RETURN(const std::vector<float> read, gate->ReadMaster(stream));
  EXPECT(read == values);
  return absl::OkStatus();
}

// Two calls of a layer and one of another, whose experts are frozen; their Backwards in another
// order; the norm of all gradients, and clipping to half of it.
absl::Status Graph(moe::Session& session) {
  const Context& context = session.context();
  moe::ParameterStore store(moe::DType::kFloat32, /*seed=*/1, context);
  moe::MoeLayerConfig config = {
      .router = {.num_experts = 4, .top_k = 2, .hidden_size = kHidden, .aux_loss_coeff = 0.1f},
      .ffn_hidden_size = 8};
  MOE_ASSIGN_OR_RETURN(const auto a, moe::MoeLayer<float>::Create(config, "a.", store, context));
  config.train_experts = false;
  MOE_ASSIGN_OR_RETURN(const auto b, moe::MoeLayer<float>::Create(config, "b.", store, context));
  MOE_RETURN_IF_ERROR(Parameters(store, context));
  MOE_ASSIGN_OR_RETURN(const auto reducer,
                       moe::GradientReducer::Create({.max_terms = 2 * context.mesh->world().size()},
                                                    store, context, session.gradient_stream()));
  MOE_RETURN_IF_ERROR(reducer->Begin());
  std::vector<moe::MoeLayer<float>*> layers = {a.get(), a.get(), b.get()};
  std::vector<moe::StashHandle> stashes;
  std::vector<std::vector<float>> x, y;
  for (int call = 0; call < 3; ++call) {
    x.push_back(Rows<float>(call));
    y.emplace_back(x.back().size());
    stashes.push_back(session.stashes().Take());
    moe::RouterStats stats;
    MOE_RETURN_IF_ERROR(layers[call]->Forward(
        {.context = context, .stash = stashes[call].get(), .router_stats = {&stats, 1}},
        View(x[call]), View(y[call])));
    EXPECT(stats.loss() > 0);
  }
  std::vector<float> dx(x[0].size());
  for (const int call : {1, 2, 0}) {
    bool frozen_is_ready = false;
    MOE_RETURN_IF_ERROR(layers[call]->Backward({.context = context, .stash = stashes[call].get()},
                                               View(y[call]), View(dx), [&](moe::Parameter& p) {
                                                 frozen_is_ready |= !p.spec().trainable;
                                                 return absl::OkStatus();
                                               }));
    EXPECT(!frozen_is_ready && dx[0] != 0);
  }
  for (const auto& p : store.parameters()) {
    if (p->spec().trainable) MOE_RETURN_IF_ERROR(reducer->MarkReady(*p));
  }
  MOE_RETURN_IF_ERROR(reducer->Finish());
  MOE_ASSIGN_OR_RETURN(const moe::GradientNorm norm, reducer->Norm(/*scale=*/1));
  MOE_ASSIGN_OR_RETURN(const double clip, norm.ClipFactor(norm.value / 2));
  EXPECT(std::fabs(clip - 0.5) < 1e-6);
  for (const auto& p : store.parameters()) {
    std::vector<float> scratch(static_cast<size_t>(p->size()));
    const auto gradient = reducer->Gradient(*p, clip, absl::MakeSpan(scratch), *context.compute);
    EXPECT(gradient.ok() == p->spec().trainable);
  }
  return absl::OkStatus();
}

struct Inference {
  std::vector<std::vector<BFloat16>> y;  // output of each layer
  int64_t bytes = 0, borrowed_bytes = 0;
};

// All layers of `config` with the weights of `files`; saves them to `folder` unless it is empty.
absl::StatusOr<Inference> Run(const moe::hf::HfConfig& config, const std::string& files,
                              moe::hf::LoadBy by, const std::string& folder,
                              const Context& context) {
  moe::ParameterStore store(moe::DType::kBFloat16, /*seed=*/1, context);
  store.set_use(moe::StoreUse::kInference);
  MOE_ASSIGN_OR_RETURN(moe::Checkpoint checkpoint, moe::Checkpoint::Open(files));
  MOE_ASSIGN_OR_RETURN(const auto all,
                       moe::hf::LayerWeights::FindAll(config, std::move(checkpoint)));
  Inference result;
  std::vector<moe::hf::StoredLayer> stored;
  for (const moe::hf::LayerWeights& weights : all) {
    const std::string prefix = "layer" + std::to_string(weights.layer()) + ".";
    MOE_ASSIGN_OR_RETURN(const auto layer,
                         moe::MoeLayer<BFloat16>::Create(config.moe, prefix, store, context));
    MOE_RETURN_IF_ERROR(weights.Load(store, *context.compute, *context.host, prefix, by));
    std::vector<BFloat16> x = Rows<BFloat16>(0);
    MOE_RETURN_IF_ERROR(
        layer->Forward({.context = context, .batch = {.mode = moe::Mode::kEvaluation}}, View(x),
                       View(result.y.emplace_back(x.size()))));
    stored.push_back({.layer = weights.layer(), .prefix = prefix});
  }
  for (const auto& p : store.parameters()) EXPECT(p->master().empty() || p->spec().rows == 1);
  if (!folder.empty()) {
    MOE_RETURN_IF_ERROR(moe::hf::SaveLayers(config, stored, store, context,
                                            {.folder = folder, .type = store.compute()}));
  }
  result.bytes = store.bytes();
  result.borrowed_bytes = store.borrowed_bytes();
  return result;
}

// A model's layers without masters; saved in bfloat16, then borrowed from the files that were
// saved.
absl::Status Files(const std::string& model, const std::string& folder, const Context& context) {
  MOE_ASSIGN_OR_RETURN(const auto config, moe::hf::ReadHfConfig(model + "/config.json"));
  EXPECT(config.moe.router.hidden_size == kHidden);
  MOE_ASSIGN_OR_RETURN(const Inference copied,
                       Run(config, model, moe::hf::LoadBy::kCopy, folder, context));
  MOE_ASSIGN_OR_RETURN(const Inference borrowed,
                       Run(config, folder, moe::hf::LoadBy::kBorrow, "", context));
  EXPECT(copied.borrowed_bytes == 0 && borrowed.borrowed_bytes > 0);
  EXPECT(borrowed.bytes + borrowed.borrowed_bytes == copied.bytes);
  for (size_t n = 0; n < copied.y.size(); ++n) {
    for (size_t i = 0; i < copied.y[n].size(); ++i) {
      EXPECT(float(copied.y[n][i]) == float(borrowed.y[n][i]));
    }
  }
  return absl::OkStatus();
}

}  // namespace

int main(int, char** argv) {
  const auto run = [&](std::unique_ptr<moe::Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto session,
                         moe::Session::Create({.mesh = {.expert = 2}}, std::move(world)));
    MOE_RETURN_IF_ERROR(Graph(*session));
    return Files(argv[1], argv[2], session->context());
  };
  const int code = moe::Main(run, /*ranks=*/2);
  if (code == 0) std::puts("the program has what it asked for");
  return code;
}
