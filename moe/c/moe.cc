#include "moe/c/moe.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/strings/str_cat.h>

#include "comm/local/local_world.h"
#include "comm/mpi/mpi_world.h"
#include "comm/nccl/nccl_world.h"
#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"
#include "moe/hf/hf_weights.h"
#include "moe/train/trainer.h"

struct moe_world {
  std::unique_ptr<moe::Communicator> communicator;
};

namespace moe {
namespace {

thread_local std::string last_message;

// `status` for a caller in C; its message is moe_message from now on.
moe_code Said(const absl::Status& status) noexcept {
  if (status.ok()) return MOE_OK;
  const absl::Status kept = Caught([&] {
    last_message.assign(status.message().data(), status.message().size());
    return absl::OkStatus();
  });
  if (!kept.ok()) last_message.clear();
  return static_cast<moe_code>(status.code());
}

moe_code Run(absl::FunctionRef<absl::Status()> run) noexcept {
  return Said(Caught([&] { return run(); }));
}

absl::Duration Timeout(double seconds) {
  return seconds > 0 ? absl::Seconds(seconds) : absl::Seconds(60);
}

// What a struct of C leaves 0 has its default.
template <typename Field, typename Given>
void Take(Given given, Field& field) {
  if (given != 0) field = static_cast<Field>(given);
}
template <typename Field>
void TakeOrOff(double given, Field& field) {
  if (given != 0) field = static_cast<Field>(given < 0 ? 0 : given);
}

// C++ objects behind the opaque types of C.
Trainer& Of(moe_trainer* trainer) {
  return *reinterpret_cast<Trainer*>(trainer);
}
const Trainer& Of(const moe_trainer* trainer) {
  return *reinterpret_cast<const Trainer*>(trainer);
}
TrainedLayerBase& Of(moe_layer* layer) {
  return *reinterpret_cast<TrainedLayerBase*>(layer);
}

absl::StatusOr<Parameter*> ParameterAt(const moe_trainer* trainer, int64_t index) {
  const auto all = Of(trainer).parameters().parameters();
  if (index >= 0 && index < static_cast<int64_t>(all.size())) return all[index].get();
  return absl::InvalidArgumentError(
      absl::StrCat("parameter ", index, " of ", all.size(), ", expected one of them"));
}

absl::StatusOr<moe_layer*> AddLayer(Trainer& trainer, const char* prefix, moe_frozen frozen,
                                    MoeLayerConfig config) {
  config.train_router = frozen == MOE_TRAIN_ALL || frozen == MOE_FREEZE_EXPERTS;
  config.train_experts = frozen == MOE_TRAIN_ALL || frozen == MOE_FREEZE_ROUTER;
  MOE_ASSIGN_OR_RETURN(TrainedLayerBase* const layer, trainer.AddMoeLayer(prefix, config));
  return reinterpret_cast<moe_layer*>(layer);
}

absl::StatusOr<moe_layer*> LoadLayer(Trainer& trainer, const char* prefix,
                                     const std::string& folder, std::optional<int64_t> index,
                                     moe_frozen frozen) {
  MOE_ASSIGN_OR_RETURN(const hf::HfConfig config, hf::ReadHfConfig(folder + "/config.json"));
  MOE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(folder));
  MOE_ASSIGN_OR_RETURN(const auto weights,
                       hf::LayerWeights::Find(config, std::move(checkpoint), index));
  MOE_ASSIGN_OR_RETURN(moe_layer* const layer, AddLayer(trainer, prefix, frozen, config.moe));
  const Context& context = trainer.context();
  MOE_RETURN_IF_ERROR(weights.Load(trainer.parameters(), *context.compute, *context.host, prefix));
  return layer;
}

absl::Status CreateTrainer(const moe_trainer_options& given, std::unique_ptr<Communicator> world,
                           moe_trainer** trainer) {
  constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  if (given.dtype < MOE_FLOAT32 || given.dtype > MOE_FLOAT16) {
    return absl::InvalidArgumentError(
        absl::StrCat("moe_trainer_create: dtype ", given.dtype, ", expected a moe_dtype"));
  }
  TrainerOptions options = {
      .dtype = kTypes[given.dtype], .seed = given.seed, .micro_batches = given.micro_batches};
  Take(given.expert_parallel_size, options.session.mesh.expert);
  Take(given.threads, options.session.threads);
  if (given.cuda_stream != nullptr) {
    options.session.cuda_stream = given.cuda_stream;
    options.session.device = DeviceKind::kCuda;
  }
  if (given.numerics == MOE_FAST) options.session.numerics = Numerics::kFast;
  if (given.bf16_order < MOE_BF16_AUTO || given.bf16_order > MOE_BF16_TILE) {
    return absl::InvalidArgumentError(absl::StrCat(
        "moe_trainer_create: bf16_order ", given.bf16_order, ", expected a moe_bf16_order"));
  }
  if (given.bf16_order == MOE_BF16_DOT) options.session.bfloat16_order = BFloat16Order::kDot;
  if (given.bf16_order == MOE_BF16_TILE) options.session.bfloat16_order = BFloat16Order::kTile;
  if (given.grid_unit_log2 != 0) options.unit_log2 = given.grid_unit_log2;
  TakeOrOff(given.clip_grad, options.optimizer.clip_grad);
  TakeOrOff(given.weight_decay, options.optimizer.weight_decay);
  if (world == nullptr) world = std::move(MakeLocalWorld({}).front());
  MOE_ASSIGN_OR_RETURN(auto made, Trainer::Create(options, std::move(world)));
  *trainer = reinterpret_cast<moe_trainer*>(made.release());
  return absl::OkStatus();
}

}  // namespace
}  // namespace moe

using moe::Run;

const char* moe_message(void) {
  return moe::last_message.c_str();
}

moe_code moe_world_threads(int ranks, double timeout_s, moe_world** worlds) {
  return Run([&] {
    if (ranks < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("moe_world_threads: ", ranks, " ranks, expected >= 1"));
    }
    auto all = moe::MakeLocalWorld({.ranks = ranks, .timeout = moe::Timeout(timeout_s)});
    std::vector<std::unique_ptr<moe_world>> made;
    for (auto& each : all) made.push_back(std::make_unique<moe_world>(moe_world{std::move(each)}));
    for (auto& each : made) *worlds++ = each.release();
    return absl::OkStatus();
  });
}

moe_code moe_world_mpi(int64_t comm, double timeout_s, moe_world** world) {
  return Run([&]() -> absl::Status {
    auto made = std::make_unique<moe_world>();
    MOE_ASSIGN_OR_RETURN(made->communicator,
                         moe::MakeMpiWorld({.comm = comm, .timeout = moe::Timeout(timeout_s)}));
    *world = made.release();
    return absl::OkStatus();
  });
}

moe_code moe_nccl_id(char id[MOE_NCCL_ID_BYTES]) {
  static_assert(sizeof(moe::NcclId) == MOE_NCCL_ID_BYTES);
  return Run([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const moe::NcclId made, moe::MakeNcclId());
    std::memcpy(id, made.data(), sizeof(made));
    return absl::OkStatus();
  });
}
moe_code moe_world_nccl(const char id[MOE_NCCL_ID_BYTES], int rank, int ranks, int device,
                        double timeout_s, moe_world** world) {
  return Run([&]() -> absl::Status {
    moe::NcclRankOptions options = {
        .rank = rank, .size = ranks, .device = device, .timeout = moe::Timeout(timeout_s)};
    std::memcpy(options.id.data(), id, sizeof(options.id));
    auto made = std::make_unique<moe_world>();
    MOE_ASSIGN_OR_RETURN(made->communicator, moe::MakeNcclCommunicator(options));
    *world = made.release();
    return absl::OkStatus();
  });
}

int moe_world_rank(const moe_world* world) {
  return world->communicator->rank();
}
int moe_world_size(const moe_world* world) {
  return world->communicator->size();
}
void moe_world_free(moe_world* world) {
  delete world;
}

moe_code moe_trainer_create(const moe_trainer_options* options, moe_world* world,
                            moe_trainer** trainer) {
  const std::unique_ptr<moe_world> taken(world);
  return Run([&] {
    return moe::CreateTrainer(*options, taken ? std::move(taken->communicator) : nullptr, trainer);
  });
}
void moe_trainer_free(moe_trainer* trainer) {
  delete reinterpret_cast<moe::Trainer*>(trainer);
}

moe_code moe_layer_create(moe_trainer* trainer, const char* prefix, const moe_layer_config* given,
                          moe_layer** layer) {
  return Run([&]() -> absl::Status {
    moe::MoeLayerConfig config = {
        .router = {.num_experts = given->num_experts,
                   .hidden_size = given->hidden_size,
                   .aux_loss_coeff = given->aux_loss_coeff,
                   .z_loss_coeff = given->z_loss_coeff},
        .ffn_hidden_size = given->ffn_hidden_size,
        .shared_expert_ffn_hidden_size = given->shared_expert_ffn_hidden_size};
    if (given->gate != nullptr) config.router.gate = given->gate;
    moe::Take(given->top_k, config.router.top_k);
    if (given->capacity_factor != 0) config.router.capacity_factor = given->capacity_factor;
    MOE_ASSIGN_OR_RETURN(*layer, moe::AddLayer(moe::Of(trainer), prefix, given->frozen, config));
    return absl::OkStatus();
  });
}

moe_code moe_layer_load(moe_trainer* trainer, const char* prefix, const char* folder, int64_t index,
                        moe_frozen frozen, moe_layer** layer) {
  return Run([&]() -> absl::Status {
    const std::optional<int64_t> which = index < 0 ? std::nullopt : std::optional(index);
    MOE_ASSIGN_OR_RETURN(*layer, moe::LoadLayer(moe::Of(trainer), prefix, folder, which, frozen));
    return absl::OkStatus();
  });
}

int64_t moe_rounds(const moe_trainer* trainer) {
  return moe::Of(trainer).rounds();
}

moe_code moe_begin_round(moe_trainer* trainer, int64_t* micro_batch) {
  return Run([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const moe::Round round, moe::Of(trainer).BeginRound());
    if (micro_batch != nullptr) *micro_batch = round.micro_batch();
    return absl::OkStatus();
  });
}

moe_code moe_begin_evaluation(moe_trainer* trainer, int64_t micro_batches) {
  return Run([&] { return moe::Of(trainer).BeginEvaluation(micro_batches); });
}

moe_code moe_forward(moe_layer* layer, const void* x, int64_t tokens, void* y) {
  return moe_forward_padded(layer, x, tokens, nullptr, y);
}
moe_code moe_forward_padded(moe_layer* layer, const void* x, int64_t rows,
                            const uint8_t* padding_mask, void* y) {
  return Run([&] { return moe::Of(layer).ForwardRows(x, rows, padding_mask, y); });
}
moe_code moe_backward(moe_layer* layer, const void* dy, void* dx) {
  return Run([&] { return moe::Of(layer).BackwardRows(dy, dx); });
}
double moe_router_loss(const moe_layer* layer) {
  moe::RouterStats& stats = moe::Of(const_cast<moe_layer*>(layer)).stats();  // Wait fills them
  return Run([&] { return stats.Wait(); }) == MOE_OK ? stats.loss() : NAN;
}

moe_code moe_step(moe_trainer* trainer, double learning_rate, double* gradient_norm) {
  return Run([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const moe::GradientNorm norm,
                         moe::Of(trainer).Step({.learning_rate = learning_rate}));
    if (gradient_norm != nullptr) *gradient_norm = norm.value;
    return absl::OkStatus();
  });
}

moe_code moe_reduce(moe_trainer* trainer) {
  return Run([&] { return moe::Of(trainer).Reduce(); });
}

moe_code moe_clip_grad_norm(moe_trainer* trainer, double most, double* norm) {
  return Run([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const double before, moe::Of(trainer).ClipGradNorm(most));
    if (norm != nullptr) *norm = before;
    return absl::OkStatus();
  });
}

moe_code moe_end_step(moe_trainer* trainer) {
  return Run([&] { return moe::Of(trainer).EndStep(); });
}

double moe_grid_loss(const moe_trainer* trainer, const char** tensor) {
  const moe::GradientNorm* const norm = moe::Of(trainer).gradient_norm();
  if (tensor != nullptr) *tensor = norm == nullptr ? "" : norm->grid_loss_tensor.c_str();
  return norm == nullptr ? 0 : norm->grid_loss;
}

int moe_grid_unit_log2(const moe_trainer* trainer) {
  return moe::Of(trainer).grid_unit().log2;
}

moe_bf16_order moe_trainer_bf16_order(const moe_trainer* trainer) {
  const auto order = moe::Of(trainer).bfloat16_order();
  if (!order.has_value()) return MOE_BF16_AUTO;
  return *order == moe::BFloat16Order::kTile ? MOE_BF16_TILE : MOE_BF16_DOT;
}

int64_t moe_parameter_count(const moe_trainer* trainer) {
  return static_cast<int64_t>(moe::Of(trainer).parameters().parameters().size());
}

moe_code moe_parameter_at(const moe_trainer* trainer, int64_t index, moe_parameter* parameter) {
  return Run([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const moe::Parameter* const found, moe::ParameterAt(trainer, index));
    const moe::ParameterSpec& spec = found->spec();
    *parameter = {.name = spec.name.c_str(),
                  .rows = spec.rows,
                  .cols = spec.cols,
                  .trained = spec.trainable ? 1 : 0,
                  .master = found->master().data()};
    return absl::OkStatus();
  });
}

moe_code moe_read(const moe_trainer* trainer, int64_t index, float* values) {
  return Run([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const moe::Parameter* const found, moe::ParameterAt(trainer, index));
    MOE_ASSIGN_OR_RETURN(const auto read,
                         found->ReadMaster(StreamOf(*found, moe::Of(trainer).context())));
    std::copy(read.begin(), read.end(), values);
    return absl::OkStatus();
  });
}

moe_code moe_write(moe_trainer* trainer, int64_t index, const float* values) {
  return Run([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(moe::Parameter* const found, moe::ParameterAt(trainer, index));
    return moe::Of(trainer).parameters().WriteMaster(*found,
                                                     {values, static_cast<size_t>(found->size())},
                                                     StreamOf(*found, moe::Of(trainer).context()));
  });
}

moe_code moe_refresh(moe_trainer* trainer, int64_t index) {
  return Run([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(moe::Parameter* const found, moe::ParameterAt(trainer, index));
    return moe::Of(trainer).parameters().RefreshCompute(
        *found, StreamOf(*found, moe::Of(trainer).context()));
  });
}

moe_code moe_gradient(moe_trainer* trainer, int64_t index, float* gradient) {
  return Run([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const moe::Parameter* const found, moe::ParameterAt(trainer, index));
    return moe::Of(trainer).Gradient(*found, {gradient, static_cast<size_t>(found->size())});
  });
}

moe_code moe_adopt(moe_trainer* trainer, int64_t index, float* values) {
  return Run([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(moe::Parameter* const found, moe::ParameterAt(trainer, index));
    return moe::Of(trainer).parameters().Adopt(*found,
                                               {values, static_cast<size_t>(found->size())});
  });
}
