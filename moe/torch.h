// MoE layers in a LibTorch model, compiled together with the program. Tensors are on the trainer's
// device: the CPU, or a CUDA device, where torch's current stream is SessionOptions::cuda_stream.
#ifndef MOE_MOE_TORCH_H_
#define MOE_MOE_TORCH_H_

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/statusor.h>
#include <torch/torch.h>

#include "moe/state/boxes.h"
#include "moe/train/trainer.h"

// Errors are exceptions, absl::BadStatusOrAccess, which RunRanks and moe::Main convert to statuses.
namespace moe::torch {

namespace autograd = ::torch::autograd;
namespace nn = ::torch::nn;  // for TORCH_MODULE, too
using ::torch::Tensor;

inline void Check(const absl::Status& status) {
  if (!status.ok()) throw absl::BadStatusOrAccess(status);
}
inline at::TensorOptions OptionsOf(DType type, const Stream& stream) {
  const Device device = stream.device();
  return at::dtype(type == DType::kBFloat16  ? at::kBFloat16
                   : type == DType::kFloat16 ? at::kHalf
                                             : at::kFloat)
      .device(device.kind == DeviceKind::kCuda ? c10::str("cuda:", device.index) : "cpu");
}
inline void CheckTensor(const std::string& name, const Tensor& t, const at::TensorOptions& want) {
  if (t.dtype() == want.dtype() && t.device() == want.device()) return;
  Check(absl::InvalidArgumentError(c10::str(name, " is ", t.dtype(), " on ", t.device(),
                                            ", expected ", want.dtype(), " on ", want.device())));
}

// Runs the steps of one rank: a moe::Trainer whose masters are float32 tensors, whatever the type
// in which its layers compute (TrainerOptions::dtype). Every rank makes the same calls.
//
//   rounds() times {BeginRound · forward · backward} · Reduce · the host's optimiser
class Trainer {
 public:
  // Collective. Errors: those of moe::Trainer::Create.
  Trainer(const TrainerOptions& options, std::unique_ptr<Communicator> world)
      : trainer_(moe::Trainer::Create(options, std::move(world)).value()) {}

  moe::Trainer& operator*() { return *trainer_; }
  moe::Trainer* operator->() { return trainer_.get(); }

  // Adds the parameters of `module` that need a gradient and are no MoeFfn's to the steps, under
  // their names in the module: all ranks start from rank 0's values, and gradients are exact sums,
  // too. To be called before the first step. Collective.
  void Adopt(nn::Module& module) {
    const Context& context = trainer_->context();
    for (const auto& item : module.named_parameters()) {
      const Tensor& t = item.value();
      bool known = !t.requires_grad();
      for (const Weight& w : weights_) known = known || w.tensor.is_same(t);
      if (known) continue;
      ParameterSpec spec = {
          .name = item.key(), .cols = t.numel(), .initializer = Initializer::kZeros};
      spec.weight_decay = t.dim() > 1;
      if (t.dim() > 1 && t.numel() > 0) spec.cols /= spec.rows = t.size(0);
      Parameter* const p = trainer_->AddParameter(spec).value();
      weights_.push_back({p, t, Master(*p).view(t.sizes()), /*dense=*/true});
      Follow(weights_.back());
      Check(context.mesh->world().Broadcast<float>(p->master(), 0, *context.compute));
    }
  }

  // Begins the next round; .grad content from before a step's first round is discarded.
  Round BeginRound() {
    const Round next = trainer_->BeginRound().value();
    TakeGradients(next.index() > 0);
    return next;
  }
  // After the last round, ends the step: .grad of every trained parameter becomes the mean over the
  // micro-batches of all ranks, clipped as by torch.nn.utils.clip_grad_norm_: the L2 norm over all
  // experts of all ranks and all adopted parameters is at most `max_norm`. Returns the norm before
  // clipping (moe::Trainer::ClipGradNorm). Where it is not finite, throws kDataLoss, and no
  // parameter has a .grad. The grid loss of the gradients is in (*this)->gradient_norm().
  // Collective.
  double Reduce(double max_norm = std::numeric_limits<double>::infinity()) {
    TakeGradients(true);
    Check(trainer_->Reduce());
    const auto norm = trainer_->ClipGradNorm(max_norm);
    Tensor mean;  // mean gradient of a whole parameter
    for (Weight& w : weights_) {
      if (!norm.ok() || !w.parameter->spec().trainable) continue;
      if (w.own.storage_offset() == 0) {
        mean = at::empty({w.parameter->size()}, w.own.options());
        Check(trainer_->Gradient(*w.parameter, Values(mean)));
      }
      w.tensor.mutable_grad() =
          mean.as_strided(w.own.sizes(), w.own.strides(), w.own.storage_offset()).detach();
    }
    Check(trainer_->EndStep());
    return norm.value();
  }
  // Replaces Reduce and an optimiser of the host: moe::Trainer::Step, whose errors it throws,
  // including kDataLoss for gradients or new weights that are not finite.
  GradientNorm Step(const StepOptions& options) {
    TakeGradients(true);
    return trainer_->Step(options).value();
  }

 private:
  friend class MoeFfnImpl;
  struct Weight {
    Parameter* parameter;
    Tensor tensor;       // tensor of the module
    Tensor own;          // its range in the parameter's master, [size]
    bool dense = false;  // whether it is from an adopted module
  };
  static absl::Span<float> Values(const Tensor& t) {
    return {t.data_ptr<float>(), static_cast<size_t>(t.numel())};
  }
  Tensor Master(Parameter& p) {
    const auto options = OptionsOf(DType::kFloat32, StreamOf(p, trainer_->context()));
    const auto memory = trainer_->parameters().Share(p).value();
    return at::for_blob(memory.get(), {p.size()})
        .deleter([memory](void*) {})
        .options(options)
        .target_device(options.device())
        .make_tensor();
  }
  // Torch replaces the memory of tensors silently: their values are copied back to the parameter's.
  void Follow(Weight& w) {
    const at::NoGradGuard off;
    CheckTensor(w.parameter->spec().name, w.tensor, w.own.options());
    if (w.tensor.data_ptr() != w.own.data_ptr() || !w.tensor.is_contiguous()) {
      w.own.copy_(w.tensor);
      w.tensor.set_data(w.own);
    }
    // The parameter's other parts follow.
    if (w.own.storage_offset() + w.own.numel() < w.parameter->size()) return;
    Check(trainer_->parameters().RefreshCompute(*w.parameter,
                                                StreamOf(*w.parameter, trainer_->context())));
  }
  // Adds what the backward of a round left in .grad to the sum as one term.
  void TakeGradients(bool counts) {
    for (Weight& w : weights_) {
      const Tensor grad = std::exchange(w.tensor.mutable_grad(), Tensor());
      if (!w.dense) continue;
      Follow(w);
      if (!counts || !grad.defined()) continue;
      Check(trainer_->AddGradient(*w.parameter, Values(grad.contiguous())));
    }
  }

  std::vector<Weight> weights_;
  const std::unique_ptr<moe::Trainer> trainer_;
};

// What a forward pass saves for its backward.
struct KeptForward : ::torch::CustomClassHolder {
  TrainedLayerBase::GraphBackward backward;
};

struct MoeFunction : autograd::Function<MoeFunction> {
  static autograd::variable_list forward(autograd::AutogradContext* ctx, const Tensor& x,
                                         TrainedLayerBase* layer,
                                         TrainedLayerBase::GraphForward call) {
    const Tensor y = at::empty_like(x);
    call.x = x.data_ptr();
    call.rows = x.size(0);
    call.cols = x.size(1);
    call.y = y.data_ptr();
    const auto kept = c10::make_intrusive<KeptForward>();
    kept->backward = layer->ForwardInGraph(call).value();
    Check(layer->stats().Wait());
    ctx->save_for_backward({x});
    ctx->saved_data["forward"] = c10::IValue::make_capsule(kept);
    return {y, at::scalar_tensor(layer->stats().loss(), at::kFloat)};
  }
  static autograd::variable_list backward(autograd::AutogradContext* ctx,
                                          const autograd::variable_list& grads) {
    const Tensor x = ctx->get_saved_variables()[0];  // throws where x was changed in place
    const Tensor dx = at::empty_like(x);
    const auto kept = ctx->saved_data["forward"].toCapsule();
    Check(static_cast<KeptForward&>(*kept).backward(grads[0].contiguous().data_ptr(),
                                                    grads[1].item<float>(), dx.data_ptr()));
    return {dx, Tensor(), Tensor()};
  }
};

// A layer that computes in the trainer's type. Its parameters are this rank's, float32, with the
// names that transformers uses below `prefix` ("gate.weight", "experts.0.gate_proj.weight"); a
// tensor that is not trained is a buffer.
class MoeFfnImpl : public nn::Module {
 public:
  // `prefix`: the layer's place in the model ("blocks.0.moe."). To be called before the first step.
  // Collective. kFailedPrecondition: frozen in 16 bits, where there are no float32 values.
  MoeFfnImpl(std::shared_ptr<Trainer> trainer, const MoeLayerConfig& config,
             const std::string& prefix)
      : trainer_(std::move(trainer)),
        layer_((*trainer_)->AddMoeLayer(prefix, config).value()),
        first_(trainer_->weights_.size()) {
    for (Parameter* const p : layer_->parameters()) {
      const Tensor master = trainer_->Master(*p);
      for (const BoxInMemory& held : BoxesOf(*p)) {
        const int64_t rows = held.box.rows(), cols = held.box.cols();
        Tensor own = master.as_strided({rows, cols}, {cols, 1}, held.first);
        if (rows == 1) own = own.squeeze(0);
        const Tensor tensor = Register(*this, held.tensor->name.substr(prefix.size()),
                                       own.variable_data(), p->spec().trainable);
        trainer_->weights_.push_back({p, tensor, own});
      }
    }
    last_ = trainer_->weights_.size();
  }

  // x [..., T, H], sequences of T tokens, of the trainer's type → {y, like x; the router's loss,
  // [], float32}. Add the second to the loss, or leave it out. Collective, backward too: a rank
  // without tokens passes none.
  // padding_mask [..., T], bool: true = padding, as in Megatron. Such rows are not routed, take no
  // capacity and count in no loss; y and the gradient by x are 0 there, and all else has the bits
  // of a call without them. A mask on a CUDA device is copied to the host, which waits for it.
  std::pair<Tensor, Tensor> forward(const Tensor& x, const Tensor& padding_mask = {}) {
    moe::Trainer& trainer = **trainer_;
    CheckTensor("MoeFfn: x", x,
                OptionsOf(trainer.parameters().compute(), *trainer.context().compute));
    for (size_t i = first_; i < last_; ++i) trainer_->Follow(trainer_->weights_[i]);
    Tensor rows = x.reshape({-1, x.size(-1)}).contiguous();
    Tensor mask;  // [rows] on the host
    if (padding_mask.defined()) {
      if (padding_mask.dtype() != at::kBool ||
          padding_mask.sizes() != x.sizes().slice(0, x.dim() - 1)) {
        Check(absl::InvalidArgumentError(
            c10::str("MoeFfn: padding_mask is ", padding_mask.dtype(), " ", padding_mask.sizes(),
                     ", expected bool, of the sizes of x ", x.sizes(), " without the last")));
      }
      mask = padding_mask.cpu().contiguous();
    }
    // Weights have gradients even if x has none; a frozen layer then needs no backward.
    if (!rows.requires_grad() && !parameters().empty()) rows = rows.detach().requires_grad_();
    const bool graph = rows.requires_grad() && at::GradMode::is_enabled();
    const auto out = MoeFunction::apply(
        rows, layer_,
        TrainedLayerBase::GraphForward{.sequence_length = x.dim() > 2 ? x.size(-2) : 0,
                                       .padding_mask = BytesOf(mask),
                                       .mode = is_training() ? Mode::kTraining : Mode::kEvaluation,
                                       .backward = graph && is_training()});
    return {out[0].view(x.sizes()), out[1]};
  }

 private:
  static const uint8_t* BytesOf(const Tensor& mask) {
    static_assert(sizeof(bool) == 1);
    return mask.defined() ? static_cast<const uint8_t*>(mask.data_ptr()) : nullptr;
  }
  // Registers one module for each component of the name: torch's names contain no dots.
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
  TrainedLayerBase* const layer_;
  const size_t first_;  // index of the layer's first entry in the trainer's weights
  size_t last_ = 0;
};

TORCH_MODULE(MoeFfn);

}  // namespace moe::torch

#endif  // MOE_MOE_TORCH_H_
