// Layers in a LibTorch model whose tensors are memory of a simulated CUDA device.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <cuda_runtime_api.h>

#include "moe/run/session.h"
#include "moe/torch.h"
#include "tests/comm/local_ranks.h"

namespace {

using moe::testing::RunLocalRanks;
using ::testing::HasSubstr;
using torch::Tensor;

// Torch's CUDA backend, in place of libtorch_cuda: each operation, once its device is idle, by the
// CPU's kernel on the same memory. Its results are memory of the device.
Tensor Alias(const Tensor& t, torch::Device device) {
  return at::for_blob(t.data_ptr(), t.sizes())
      .strides(t.strides())
      .deleter([t](void*) {})
      .options(t.options().device(device))
      .target_device(device)
      .make_tensor();
}

Tensor Copied(const Tensor& t, torch::Device device) {
  const Tensor dense = t.contiguous();
  void* data = nullptr;
  EXPECT_EQ(cudaSetDevice(device.index()), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&data, std::max<size_t>(dense.nbytes(), 1)), cudaSuccess);
  std::memcpy(data, dense.data_ptr(), dense.nbytes());
  return at::for_blob(data, dense.sizes())
      .deleter([](void* gone) { EXPECT_EQ(cudaFree(gone), cudaSuccess); })
      .options(dense.options().device(device))
      .target_device(device)
      .make_tensor();
}

void RunOnHost(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::InferenceMode none(false);
  torch::Device device = torch::kCPU;
  std::vector<std::pair<Tensor, Tensor>> arguments;  // the device's, and the host's for it
  const auto on_host = [&](const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    device = t.device();
    arguments.emplace_back(t, Alias(t, torch::kCPU));
    return arguments.back().second;
  };
  const auto given = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  for (auto value = given; value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = on_host(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value->toTensorVector()) list.push_back(on_host(t));
      *value = std::move(list);
    } else if (value->isDevice()) {
      device = value->toDevice();
      *value = torch::Device(torch::kCPU);
    }
  }
  EXPECT_EQ(cudaSetDevice(device.index()), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto value = stack->end() - static_cast<int64_t>(op.schema().returns().size());
       value != stack->end(); ++value) {
    if (!value->isTensor() || !value->toTensor().defined()) continue;
    const Tensor result = value->toTensor();
    Tensor kept;
    for (const auto& [theirs, ours] : arguments) {
      if (ours.is_same(result)) kept = theirs;
    }
    *value = kept.defined() ? kept : Copied(result, device);
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&RunOnHost>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  for (const char* const op :
       {"copy_", "fill_.Scalar"}) {  // whose own kernels have stubs by device
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&RunOnHost>());
  }
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
}

// What autograd asks of it. The types of indices are other ones in every version of torch.
template <typename Result, typename Hooks, typename... Arguments>
std::tuple<Arguments...> ArgumentsOf(Result (Hooks::*)(Arguments...) const);
struct SimulatedHooks : at::CUDAHooksInterface {
  using Index =
      std::tuple_element_t<0, decltype(ArgumentsOf(&CUDAHooksInterface::hasPrimaryContext))>;
  explicit SimulatedHooks(at::CUDAHooksArgs /*none*/) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const { return true; }  // of the interface since torch 2
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(Index /*device*/) const override { return true; }
  decltype(CUDAHooksInterface().getNumGPUs()) getNumGPUs() const override {
    return c10::impl::kFakeGuardImplMaxDevices;
  }
};
using at::CUDAHooksRegistry, at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks);
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>);

constexpr int64_t kRows = 8, kHidden = 16, kMicroBatches = 3;

const moe::MoeLayerConfig kLayer = {
    .router = {.num_experts = 4, .top_k = 2, .hidden_size = kHidden, .aux_loss_coeff = 0.02f},
    .ffn_hidden_size = 24,
    .init_std = 0.3,
    .down_init_std = 0.3};

// y, dx, gradients and, after a step of torch's optimiser, parameters; of `ranks` on `kind`.
std::vector<Tensor> Train(moe::DeviceKind kind, int ranks, moe::DType dtype,
                          torch::ScalarType type) {
  std::vector<Tensor> out;
  RunLocalRanks(ranks, [&](std::unique_ptr<moe::Communicator> world) -> absl::Status {
    at::set_num_threads(1);
    const bool first = world->rank() == 0;
    MOE_ASSIGN_OR_RETURN(const moe::Device device, moe::DeviceOfRank(kind, *world));
    const bool cuda = kind == moe::DeviceKind::kCuda;
    const torch::Device at(cuda ? c10::str("cuda:", device.index) : "cpu");
    cudaStream_t stream = nullptr;
    if (cuda) {
      EXPECT_EQ(cudaSetDevice(device.index), cudaSuccess);
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    }
    const auto trainer = std::make_shared<moe::torch::Trainer>(
        moe::TrainerOptions{
            .session = {.device = kind, .cuda_stream = stream, .mesh = {.expert = ranks}},
            .dtype = dtype,
            .micro_batches = kMicroBatches},
        std::move(world));
    moe::torch::MoeFfn layer(trainer, kLayer, "mlp.");
    torch::nn::Linear dense(kHidden, kHidden);
    {
      const torch::NoGradGuard off;
      dense->weight.copy_(torch::eye(kHidden));
      dense->bias.zero_();
    }
    dense->to(at);
    trainer->Adopt(*dense);
    std::vector<Tensor> parameters = layer->parameters(), kept;
    for (const Tensor& p : dense->parameters()) parameters.push_back(p);
    torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2));
    for (int64_t r = 0; r < (*trainer)->rounds(); ++r) {
      const moe::Round round = trainer->BeginRound();
      const int64_t rows = round.empty() ? 0 : kRows, m = round.micro_batch();
      const Tensor x =
          torch::arange(rows * kHidden, torch::kFloat32).add(m).sin().view({-1, kHidden}).to(at);
      const Tensor in = x.clone().requires_grad_();
      const auto [y, loss] = layer(dense(in).to(type));
      (y.to(torch::kFloat32).mul(x).sum() + loss).backward();
      if (first && !round.empty()) kept.insert(kept.end(), {y.detach().cpu(), in.grad().cpu()});
    }
    EXPECT_GT(trainer->Reduce(0.1), 0.1);
    for (const Tensor& p : parameters) {
      EXPECT_EQ(p.device(), at);
      kept.push_back(p.grad().cpu());
    }
    optimizer.step();
    layer->to(torch::kCPU);  // and what torch moves comes back
    layer->to(at);
    const torch::NoGradGuard off;
    const Tensor x = torch::ones({first ? 2 : 0, kHidden}).to(at, type);
    kept.push_back(std::get<0>(layer(x)).cpu());
    for (const Tensor& p : parameters) kept.push_back(p.detach().cpu());
    if (cuda) {
      std::string error;
      try {
        layer(x.cpu());
      } catch (const std::exception& e) {
        error = e.what();
      }
      EXPECT_THAT(error, HasSubstr(c10::str(" on cpu, expected ", x.dtype(), " on ", at)));
    }
    if (first) out = std::move(kept);
    return absl::OkStatus();
  });
  return out;
}

TEST(TorchDeviceTest, TensorsOfACudaDeviceTrainAsThoseOfTheHost) {
  for (const auto& [ranks, dtype, type, tolerance] :
       {std::tuple(1, moe::DType::kFloat32, torch::kFloat32, 1e-5),
        {2, moe::DType::kFloat32, torch::kFloat32, 1e-5},
        {1, moe::DType::kBFloat16, torch::kBFloat16, 0.02}}) {
    const std::vector<Tensor> want = Train(moe::DeviceKind::kCpu, ranks, dtype, type);
    const std::vector<Tensor> have = Train(moe::DeviceKind::kCuda, ranks, dtype, type);
    ASSERT_EQ(have.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      const double scale = want[i].abs().max().item<double>();
      EXPECT_LE((have[i] - want[i]).abs().max().item<double>(), tolerance * scale) << i;
    }
  }
}

}  // namespace
