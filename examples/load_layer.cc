// Loads one MoE layer of a Hugging Face folder for inference and times its forward pass. It is
// frozen and in bfloat16; experts that the files store in this form are read there in place.
// Run: load_layer FOLDER [LAYER]. Under mpirun the experts are spread over the processes.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <moe/hf/hf_weights.h>
#include <moe/moe.h>

using moe::BFloat16;

absl::Status Run(const std::string& folder, std::optional<int64_t> number,
                 std::unique_ptr<moe::Communicator> world) {
  const bool first = world->rank() == 0;
  const moe::SessionOptions options = {.mesh = {.expert = world->size()}};
  MOE_ASSIGN_OR_RETURN(const auto session, moe::Session::Create(options, std::move(world)));
  const moe::Context& context = session->context();

  MOE_ASSIGN_OR_RETURN(moe::hf::HfConfig config, moe::hf::ReadHfConfig(folder + "/config.json"));
  config.moe.train_router = config.moe.train_experts = false;
  moe::ParameterStore store(moe::DType::kBFloat16, /*seed=*/1, context);
  MOE_ASSIGN_OR_RETURN(const auto layer,
                       moe::MoeLayer<BFloat16>::Create(config.moe, "mlp.", store, context));
  MOE_ASSIGN_OR_RETURN(moe::Checkpoint checkpoint, moe::Checkpoint::Open(folder));
  MOE_ASSIGN_OR_RETURN(const auto weights,
                       moe::hf::LayerWeights::Find(config, std::move(checkpoint), number));
  MOE_RETURN_IF_ERROR(
      weights.Load(store, *context.compute, *context.host, "mlp.", moe::hf::LoadBy::kBorrow));
  if (first) {
    std::printf("layer %lld: %lld bytes of memory, %lld left in the files\n",
                static_cast<long long>(weights.layer()), static_cast<long long>(store.bytes()),
                static_cast<long long>(store.borrowed_bytes()));
  }

  const int64_t hidden = config.moe.router.hidden_size;
  for (int64_t tokens = 1; tokens <= 64; tokens *= 2) {  // per rank
    std::vector<BFloat16> x(static_cast<size_t>(tokens * hidden)), y(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = BFloat16(std::sin(static_cast<float>(i * i)));
    std::vector<double> times_us;
    for (int pass = 0; pass < 11; ++pass) {
      const auto start = std::chrono::steady_clock::now();
      MOE_RETURN_IF_ERROR(
          layer->Forward({.context = context, .batch = {.mode = moe::Mode::kEvaluation}},
                         {x.data(), tokens, hidden}, {y.data(), tokens, hidden}));
      MOE_RETURN_IF_ERROR(context.compute->Synchronize());
      const std::chrono::duration<double, std::micro> time =
          std::chrono::steady_clock::now() - start;
      // the first pass reads pages and allocates memory
      if (pass > 0) times_us.push_back(time.count());
    }
    std::sort(times_us.begin(), times_us.end());
    double squares = 0;
    for (const BFloat16 value : y) squares += std::pow(static_cast<float>(value), 2);
    if (first) {
      std::printf("%2lld tokens  %8.1f us  |y| %.4f\n", static_cast<long long>(tokens),
                  times_us[times_us.size() / 2], std::sqrt(squares));
    }
  }
  return absl::OkStatus();
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "load_layer FOLDER [LAYER]\n");
    return 2;
  }
  std::optional<int64_t> number;  // without a number: the first layer with experts
  if (argc > 2) number = std::atoll(argv[2]);
  const auto run = [&](std::unique_ptr<moe::Communicator> world) {
    return Run(argv[1], number, std::move(world));
  };
  return moe::Main(run, /*ranks=*/1);
}
