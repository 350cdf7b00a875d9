// MoE layers in a model of LibTorch, on the CPU. Compiled with the program's own LibTorch.
#ifndef MOE_MOE_TORCH_H_
#define MOE_MOE_TORCH_H_

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/str_cat.h>
#include <torch/torch.h>

#include "moe/trainer.h"

// Errors are exceptions, absl::BadStatusOrAccess, of which RunRanks and moe::Main make statuses.
namespace moe::torch {

namespace autograd = ::torch::autograd;
namespace nn = ::torch::nn;  // for TORCH_MODULE, too
using ::torch::Tensor;

inline void Check(const absl::Status& status) {
  if (!status.ok()) throw absl::BadStatusOrAccess(status);
}
inline void CheckTensor(const std::string& name, const Tensor& t, DType type = DType::kFloat32) {
  const auto scalar = type == DType::kBFloat16  ? ::torch::kBFloat16
                      : type == DType::kFloat16 ? ::torch::kFloat16
                                                : ::torch::kFloat32;
  if (t.is_cpu() && t.scalar_type() == scalar) return;
  Check(absl::InvalidArgumentError(absl::StrCat(name, " is ", t.toString(), ", expected CPU",
                                                ::torch::toString(scalar), "Type")));
}

// The steps of one rank: a moe::Trainer whose masters are float32 tensors, whatever the type that
// its layers compute in (TrainerOptions::dtype). Every rank makes the same calls.
//
//   rounds() times {BeginRound · forward · backward} · Reduce · the host's optimiser
class Trainer {
 public:
  // Collective. Errors: those of moe::Trainer::Create.
  Trainer(const TrainerOptions& options, std::unique_ptr<Communicator> world)
      : trainer_(moe::Trainer::Create(options, std::move(world)).value()) {}

  moe::Trainer& operator*() { return *trainer_; }
  moe::Trainer* operator->() { return trainer_.get(); }

  // Parameters of `module` that need a gradient and are no MoeFfn's join the steps, under their
  // names in it: all ranks start from rank 0's values, gradients are exact sums too. Before the
  // first step. Collective.
  void Adopt(nn::Module& module) {
    for (const auto& item : module.named_parameters()) {
      const Tensor& t = item.value();
      bool known = !t.requires_grad();
      for (const Weight& w : weights_) {
        for (const Tensor& part : w.parts) known = known || part.is_same(t);
      }
      if (known) continue;
      const int64_t rows = t.dim() > 1 ? t.size(0) : 1;
      Parameter* const p = trainer_->parameters()
                               .Add({.name = item.key(),
                                     .rows = rows,
                                     .cols = t.numel() / std::max<int64_t>(rows, 1),
                                     .initializer = Initializer::kZeros,
                                     .weight_decay = t.dim() > 1})
                               .value();
      AddWeight({.parameter = p,
                 .parts = {t},
                 .memory = t.detach().contiguous().view({-1}),
                 .dense = true});
      Follow(weights_.size() - 1, 1);
      const Context& context = trainer_->context();
      Check(context.mesh->world().Broadcast<float>(p->master(), 0, *context.compute));
    }
  }

  // The next round; what is in .grad before a step's first is forgotten.
  Round BeginRound() {
    Follow(0, weights_.size());
    norm_.reset();
    const Round next = trainer_->BeginRound().value();
    for (Weight& w : weights_) AddGradient(w, next.index() > 0);
    return round_ = next;
  }
  const Round& round() const { return round_; }  // that has begun last

  // After the last round, ends the step: .grad of every trained parameter is the mean over the
  // micro-batches of all ranks. kDataLoss, with no step for the optimiser, where that is not finite
  // (GradientNorm). Collective.
  void Reduce() {
    EndRounds();
    Check(trainer_->Reduce());
    const GradientNorm norm = trainer_->MeasureGradients().value();
    Stream& stream = *trainer_->context().compute;
    const double scale = trainer_->gradient_scale();
    for (Weight& w : weights_) {
      if (!w.parameter->spec().trainable) continue;
      const Tensor grad = ::torch::empty_like(w.memory);
      Check(trainer_->reducer().Gradient(*w.parameter, scale, Values(grad), stream).status());
      ForEachPart(w, grad, [](Tensor& part, const Tensor& own) { part.mutable_grad() = own; });
    }
    Check(stream.Synchronize());
    Check(trainer_->EndStep());
    Check(norm.ClipFactor(std::numeric_limits<double>::infinity()).status());
    norm_ = norm;
  }
  // Between Reduce and the optimiser, as torch.nn.utils.clip_grad_norm_: scales .grad where its L2
  // norm is more than `max_norm`, and returns the norm from before, of all experts of all ranks and
  // all that was adopted, each once: the same bits on every rank, at any layout. What the host has
  // done to .grad since Reduce does not count. kFailedPrecondition before Reduce, kInvalidArgument
  // unless max_norm >= 0.
  double ClipGradNorm(double max_norm) {
    if (!norm_) Check(absl::FailedPreconditionError("ClipGradNorm: expected Reduce before it"));
    const double factor = norm_->ClipFactor(max_norm).value();
    for (Weight& w : weights_) {
      if (factor == 1 || !w.parameter->spec().trainable) continue;
      for (Tensor& part : w.parts) part.mutable_grad().mul_(factor);
    }
    return std::exchange(norm_->value, factor * norm_->value);
  }
  // In place of Reduce and an optimiser of the host's: moe::Trainer::Step.
  GradientNorm Step(const StepOptions& options) {
    EndRounds();
    return trainer_->Step(options).value();
  }

 private:
  friend class MoeFfnImpl;
  struct Weight {
    Parameter* parameter;
    std::vector<Tensor> parts = {};  // the parameter's parts(), or the host's own tensor
    Tensor memory = {};              // [size], which the parameter is in and parts are views of
    bool dense = false;              // of the host's own module
  };
  static absl::Span<float> Values(const Tensor& t) {
    return {t.data_ptr<float>(), static_cast<size_t>(t.numel())};
  }
  // do(part, its place in `memory`).
  template <typename Do>
  static void ForEachPart(Weight& w, const Tensor& memory, Do run) {
    int64_t first = 0;
    for (Tensor& part : w.parts) {
      run(part, memory.narrow(0, first, part.numel()).view(part.sizes()));
      first += part.numel();
    }
  }
  void AddWeight(Weight weight) {
    Check(trainer_->parameters().Adopt(*weight.parameter, Values(weight.memory)));
    weights_.push_back(std::move(weight));
  }
  // Torch gives tensors other memory without a word: their values come back to the parameter's.
  void Follow(size_t first, size_t count) {
    const ::torch::NoGradGuard off;
    ParameterStore& store = trainer_->parameters();
    for (Weight& w : absl::MakeSpan(weights_).subspan(first, count)) {
      ForEachPart(w, w.memory, [&](Tensor& part, const Tensor& own) {
        CheckTensor(w.parameter->spec().name, part);
        if (part.data_ptr() == own.data_ptr() && part.is_contiguous()) return;
        own.copy_(part);
        part.set_data(own);
      });
      if (store.compute() == DType::kFloat32) continue;
      Check(store.RefreshCompute(*w.parameter, StreamOf(*w.parameter, trainer_->context())));
    }
  }
  // What backward of a round left in .grad is one term of the sum.
  void AddGradient(Weight& w, bool counts) {
    Tensor grad;
    for (Tensor& part : w.parts) grad = std::exchange(part.mutable_grad(), Tensor());
    if (!w.dense || !counts || !grad.defined()) return;
    const Context& context = trainer_->context();
    Check(w.parameter->grad().Add(
        [&](absl::Span<float> out, Write write) {
          Tensor sum = ::torch::from_blob(out.data(), grad.sizes(), ::torch::kFloat32);
          write == Write::kOverwrite ? sum.copy_(grad) : sum.add_(grad);
          return absl::OkStatus();
        },
        *context.workspace, *context.compute));
  }
  void EndRounds() {
    for (Weight& w : weights_) {
      AddGradient(w, true);
      if (w.dense) Check(trainer_->MarkReady(round_, *w.parameter));
    }
  }

  std::vector<Weight> weights_;  // goes after what computes with them
  const std::unique_ptr<moe::Trainer> trainer_;
  Round round_;
  std::optional<GradientNorm> norm_;  // of .grad, from Reduce to the next round
};

// A forward pass, and what waits for its backward.
struct Pass : ::torch::CustomClassHolder {
  std::shared_ptr<Trainer> trainer;
  TrainedLayerBase* layer = nullptr;
  std::vector<int64_t> sequences;  // their bounds
  Batch batch;
  bool in_graph = false;                     // a backward may come
  TrainedLayerBase::GraphBackward backward;  // until it was used
};

struct MoeFunction : autograd::Function<MoeFunction> {
  // `anchor`: a weight, so that outputs have a gradient where x has none.
  static autograd::variable_list forward(autograd::AutogradContext* ctx, const Tensor& x,
                                         const Tensor& /*anchor*/,
                                         const c10::intrusive_ptr<Pass>& pass) {
    const Tensor y = ::torch::empty_like(x);
    TrainedLayerBase& layer = *pass->layer;
    if (pass->in_graph) {
      pass->backward = layer
                           .ForwardInGraph(pass->trainer->round(), x.data_ptr(), x.size(0),
                                           y.data_ptr(), pass->batch)
                           .value();
    } else {
      Check(layer.ForwardAlone(x.data_ptr(), x.size(0), y.data_ptr(), pass->batch));
    }
    ctx->save_for_backward({x});
    ctx->saved_data["pass"] = c10::IValue::make_capsule(pass);
    return {y, ::torch::tensor(static_cast<float>(layer.stats().loss()))};
  }
  static autograd::variable_list backward(autograd::AutogradContext* ctx,
                                          autograd::variable_list grads) {
    const auto capsule = ctx->saved_data["pass"].toCapsule();
    const auto run = std::exchange(static_cast<Pass&>(*capsule).backward, nullptr);
    if (!run) {
      Check(absl::FailedPreconditionError(
          "MoeFfn: backward of a pass in eval(), or a second one, expected one in train()"));
    }
    const Tensor x = ctx->get_saved_variables()[0];  // throws where x was changed in place
    const Tensor dy = grads[0].defined() ? grads[0].contiguous() : ::torch::zeros_like(x);
    const Tensor dx = ::torch::empty_like(x);
    const float d_loss = grads[1].defined() ? grads[1].item<float>() : 0.0f;
    Check(run(dy.data_ptr(), d_loss, dx.data_ptr()));
    return {dx, Tensor(), Tensor()};
  }
};

// A layer that computes in the trainer's type. Its parameters are this rank's, float32, as
// transformers names them below `prefix` ("gate.weight", "experts.0.gate_proj.weight"); what is not
// trained is a buffer.
class MoeFfnImpl : public nn::Module {
 public:
  // `prefix`: its place in the model ("blocks.0.moe."). Before the first step. Collective.
  // kUnimplemented: frozen in 16 bits, of which there are no float32 values.
  MoeFfnImpl(std::shared_ptr<Trainer> trainer, const MoeLayerConfig& config,
             const std::string& prefix)
      : trainer_(std::move(trainer)),
        hidden_(config.router.hidden_size),
        layer_(trainer_->trainer_->AddMoeLayer(prefix, config).value()),
        first_(trainer_->weights_.size()) {
    for (Parameter* const p : layer_->parameters()) {
      if (p->master().empty() && p->size() > 0) {
        Check(absl::UnimplementedError(
            absl::StrCat(p->spec().name, " is frozen in 16 bits, expected a trainer of float32")));
      }
      const Tensor memory =
          ::torch::from_blob(p->master().data(), {p->size()}, ::torch::kFloat32).clone();
      std::vector<Tensor> parts;
      int64_t first = 0;
      for (const CanonicalTensor& part : p->parts()) {
        const Tensor flat =
            memory.narrow(0, std::exchange(first, first + part.size()), part.size());
        parts.push_back(
            Register(*this, part.name.substr(prefix.size()),
                     (part.rows == 1 ? flat : flat.view({part.rows, part.cols})).variable_data(),
                     p->spec().trainable));
      }
      trainer_->AddWeight({.parameter = p, .parts = std::move(parts), .memory = memory});
    }
  }

  // x [..., T, H], sequences of T tokens, of the trainer's type → {y, like x; the router's loss,
  // [], float32}. Add the second to the loss, or leave it out. Collective, backward too: a rank
  // without tokens passes none.
  std::pair<Tensor, Tensor> forward(const Tensor& x) {
    CheckTensor("MoeFfn: x", x, trainer_->trainer_->parameters().compute());
    if (x.dim() < 2 || x.size(-1) != hidden_) {
      Check(absl::InvalidArgumentError(
          absl::StrCat("MoeFfn: x has ", x.dim(), " dimensions, ", x.dim() > 0 ? x.size(-1) : 1,
                       " in the last, expected [..., T, ", hidden_, "]")));
    }
    trainer_->Follow(first_, layer_->parameters().size());
    const Tensor rows = x.reshape({-1, x.size(-1)}).contiguous();
    const auto pass = c10::make_intrusive<Pass>();
    const int64_t length = x.dim() > 2 ? x.size(-2) : 0;
    for (int64_t at = 0; length > 0 && at <= rows.size(0); at += length) {
      pass->sequences.push_back(at);
    }
    pass->trainer = trainer_;
    pass->layer = layer_;
    pass->in_graph = is_training() && ::torch::GradMode::is_enabled();
    const Round& round = trainer_->round();
    pass->batch = {.sequence_offsets = pass->sequences,
                   .first_global_token = round.empty() ? 0 : round.micro_batch() * rows.size(0),
                   .step = round.step(),
                   .mode = is_training() ? Mode::kTraining : Mode::kEvaluation};
    const auto weights = parameters();
    const auto out = MoeFunction::apply(rows, weights.empty() ? rows : weights.front(), pass);
    return {out[0].view(x.sizes()), out[1]};
  }

 private:
  // One module for each part of the name: torch's names have no dots.
  static Tensor Register(nn::Module& at, const std::string& name, const Tensor& value,
                         bool trainable) {
    const size_t dot = name.find('.');
    if (dot == std::string::npos) {
      return trainable ? at.register_parameter(name, value) : at.register_buffer(name, value);
    }
    const std::string part = name.substr(0, dot);
    const auto children = at.named_children();
    const auto* const child = children.find(part);
    return Register(child ? **child : *at.register_module(part, std::make_shared<nn::Module>()),
                    name.substr(dot + 1), value, trainable);
  }

  const std::shared_ptr<Trainer> trainer_;
  const int64_t hidden_;
  TrainedLayerBase* const layer_;
  const size_t first_;  // of the trainer's weights
};

TORCH_MODULE(MoeFfn);

}  // namespace moe::torch

#endif  // MOE_MOE_TORCH_H_
