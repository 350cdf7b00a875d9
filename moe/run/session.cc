#include "moe/run/session.h"

#include <algorithm>
#include <cstring>
#include <string>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "comm/extremes.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/divisors.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/simd_targets.h"

namespace moe {
namespace {

// Up to 8 letters as a number, and back.
int64_t Pack(absl::string_view name) {
  int64_t packed = 0;
  std::memcpy(&packed, name.data(), std::min(name.size(), sizeof(packed)));
  return packed;
}
std::string Unpack(int64_t packed) {
  char letters[sizeof(packed) + 1] = {};
  std::memcpy(letters, &packed, sizeof(packed));
  return letters;
}

// The target that stands for all that have the same bits as `target`: AVX2 for what x86 CPUs have
// beyond it (grouped_gemm.h: products have the same bits on every path).
absl::string_view SameBits(absl::string_view target) {
  return absl::StartsWith(target, "AVX3") ? "AVX2" : target;
}

std::string TargetText(int64_t packed) {
  const std::string target = Unpack(packed);
  return target == "AVX2" ? "AVX2 or above" : target;
}

// "dot", or "auto" for none.
const char* OrderText(int64_t order) {
  return order < 0 ? "auto" : NameOf(static_cast<BFloat16Order>(order), kBFloat16OrderWords);
}

// "sm_90"; empty on the CPU.
absl::StatusOr<std::string> CudaArchitecture(Device device) {
  if (device.kind == DeviceKind::kCpu) return std::string();
  MOE_ASSIGN_OR_RETURN(const CudaDevice mine, CudaDeviceAt(device.index));
  return absl::StrCat("sm_", mine.major, mine.minor);
}

// That so many ranks can share matrices.
absl::Status CheckShare(absl::string_view flag, int ranks, const SessionOptions& options) {
  if (ranks == 1) return absl::OkStatus();
  const int most = std::min(options.tensor_leaves, kMostTreeRanks);
  if (ranks <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      flag, " is ", ranks, " with --tensor-leaves ", options.tensor_leaves, ", expected at most ",
      ranks <= kMostTreeRanks ? "as many ranks as leaves: --tensor-leaves 8"
                              : absl::StrCat("8: ", flag, " 8")));
}

}  // namespace

absl::Status CheckMesh(const SessionOptions& options, int ranks) {
  const MeshShape& mesh = options.mesh;
  const int of_stage = ranks / std::max(1, mesh.pipeline);
  const int block = mesh.expert * mesh.expert_tensor;
  const bool has_block = mesh.expert > 0 && mesh.expert_tensor > 0;
  if (has_block && of_stage % mesh.expert == 0 && of_stage % block != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--etp is ", mesh.expert_tensor, ", expected a divisor of the ", of_stage / mesh.expert,
        " ranks for each expert-parallel index: ", DivisorsOf(of_stage / mesh.expert)));
  }
  if (mesh.tensor > 1 && has_block && block % mesh.tensor != 0) {
    std::string fits = DivisorsOf(block);
    // The fewest expert-parallel ranks for which it would do.
    const auto fits_with = [&](int expert) {
      const int of_block = expert * mesh.expert_tensor;
      return of_block % mesh.tensor == 0 && of_stage % of_block == 0;
    };
    int more = mesh.expert;
    while (more * mesh.expert_tensor <= of_stage && !fits_with(more)) ++more;
    if (more * mesh.expert_tensor <= of_stage) absl::StrAppend(&fits, "; or --ep ", more);
    const std::string times =
        mesh.expert_tensor > 1 ? absl::StrCat(" times --etp ", mesh.expert_tensor) : "";
    return absl::InvalidArgumentError(absl::StrCat(
        "--tp is ", mesh.tensor, ", expected a divisor of --ep ", mesh.expert, times, ": ", fits));
  }
  MOE_RETURN_IF_ERROR(CheckMeshShape(mesh, ranks));
  MOE_RETURN_IF_ERROR(CheckShare("--tp", mesh.tensor, options));
  return CheckShare("--etp", mesh.expert_tensor, options);
}

absl::Status CheckOneTarget(absl::string_view target, Communicator& world, Stream& stream) {
  MOE_ASSIGN_OR_RETURN(const auto packed,
                       ExtremesOverRanks({Pack(SameBits(target))}, world, stream));
  if (packed[0].same()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("layout-invariant numerics: ranks compute with ", TargetText(packed[0].most),
                   " and ", TargetText(packed[0].least),
                   ", expected one target: use machines of one kind, or --numerics fast"));
}

absl::StatusOr<BFloat16Order> AgreedBFloat16Order(std::optional<BFloat16Order> given,
                                                  BFloat16Order fastest, Communicator& world,
                                                  Stream& stream) {
  const int64_t mine = given.has_value() ? static_cast<int64_t>(*given) : -1;
  MOE_ASSIGN_OR_RETURN(const auto orders,
                       ExtremesOverRanks({mine, static_cast<int64_t>(fastest)}, world, stream));
  if (!orders[0].same()) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks were given --bf16-order ", OrderText(orders[0].least), " and ",
                     OrderText(orders[0].most), ", expected the same on all"));
  }
  return given.value_or(static_cast<BFloat16Order>(orders[1].least));
}

absl::StatusOr<Device> DeviceOfRank(DeviceKind kind, const Communicator& world) {
  if (kind == DeviceKind::kCpu) return Device();
  MOE_ASSIGN_OR_RETURN(const int count, CudaDeviceCount());
  const Device device = world.device().value_or(Device{kind, world.rank() % count});
  MOE_ASSIGN_OR_RETURN(const CudaDevice mine, CudaDeviceAt(device.index));
  MOE_RETURN_IF_ERROR(mine.usable);
  return device;
}

absl::StatusOr<std::unique_ptr<Session>> Session::Create(const SessionOptions& options,
                                                         std::unique_ptr<Communicator> world) {
  if (options.threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("Session: ", options.threads, " threads, expected >= 1"));
  }
  const bool cuda = options.device == DeviceKind::kCuda;
  if (!cuda && options.cuda_stream != nullptr) {
    return absl::InvalidArgumentError("Session: a CUDA stream on the CPU, expected its device");
  }
  if (!IsTreeLeaves(options.tensor_leaves)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Session: --tensor-leaves ", options.tensor_leaves, ", expected 1, 2, 4, 8 or 16"));
  }
  if (cuda && options.bfloat16_order.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("Session: --bf16-order ", NameOf(*options.bfloat16_order, kBFloat16OrderWords),
                     " on a CUDA device, expected auto: it is an order of products on a CPU"));
  }
  MOE_RETURN_IF_ERROR(CheckMesh(options, world->size()));
  MOE_ASSIGN_OR_RETURN(const Device device, options.cuda_stream != nullptr
                                                ? DeviceOfCudaStream(options.cuda_stream)
                                                : DeviceOfRank(options.device, *world));
  MemoryResource* memory = &CpuMemory();
  if (cuda) {
    MOE_ASSIGN_OR_RETURN(memory, CudaMemory(device.index));
  }
  auto session = std::unique_ptr<Session>(new Session(options.threads, *memory));
  MOE_RETURN_IF_ERROR(session->MakeStreams(options, device));
  const bool invariant = options.numerics == Numerics::kLayoutInvariant;
  MOE_ASSIGN_OR_RETURN(
      session->cublas_,
      MakeCublas(options.grouped_gemm,
                 invariant ? RowBits::kIndependent : RowBits::kMayDependOnCount, device));
  session->spare_ = SpareMultiprocessors(world->kernel_blocks());
  MOE_ASSIGN_OR_RETURN(session->mesh_, Mesh::Create(std::move(world), options.mesh));
  const bool queue = options.overlap_exchange && !cuda;
  if (queue) MOE_RETURN_IF_ERROR(session->mesh_->Open(MeshLane::kExchange));
  session->context_ = {
      .mesh = session->mesh_.get(),
      .compute = session->compute_.get(),
      .exchange = options.overlap_exchange ? session->exchange_.get() : session->compute_.get(),
      .exchange_lane = queue ? MeshLane::kExchange : MeshLane::kForward,
      .host = cuda ? session->host_.get() : session->compute_.get(),
      .workspace = &session->workspace_,
      .exchange_workspace =
          cuda && options.overlap_exchange ? &session->exchange_workspace_ : &session->workspace_,
      .host_workspace = cuda ? &session->host_workspace_ : &session->workspace_,
      .memory = memory,
      .non_finite = &session->non_finite_,
      .gemm = {.kernel = options.grouped_gemm,
               .cublas = session->cublas_.get(),
               .spare = &session->spare_},
      .clock = &session->clock_,
      .numerics = options.numerics,
      .tensor_leaves = options.tensor_leaves,
  };
  session->stashes_ = StashPool::Create(session->context_);
  session->context_.stashes = session->stashes_.get();
  MOE_ASSIGN_OR_RETURN(
      session->context_.gemm.bfloat16_order,
      AgreedBFloat16Order(options.bfloat16_order,
                          cuda ? BFloat16Order::kDot : gemm::FastestBFloat16Order(),
                          session->mesh_->world(), *session->context_.host));
  if (invariant) {
    MOE_ASSIGN_OR_RETURN(const std::string architecture, CudaArchitecture(device));
    for (const std::string& target : {gemm::SimdTargets().front(), architecture}) {
      MOE_RETURN_IF_ERROR(CheckOneTarget(target, session->mesh_->world(), *session->context_.host));
    }
  }
  if (options.trace_capacity > 0) session->RecordTrace(options.trace_capacity);
  return session;
}

absl::Status Session::MakeStreams(const SessionOptions& options, Device device) {
  if (device.kind == DeviceKind::kCuda) {
    host_ = MakeInlineStream(&pool_);
    MOE_ASSIGN_OR_RETURN(compute_, MakeStream(device, &pool_, options.cuda_stream));
  } else {
    compute_ = MakeInlineStream(&pool_);
  }
  if (options.overlap_exchange) {
    MOE_ASSIGN_OR_RETURN(exchange_, MakeTransferStream(device));
  }
  MOE_ASSIGN_OR_RETURN(gradients_, MakeTransferStream(device));
  return absl::OkStatus();
}

absl::StatusOr<Stream*> Session::WeightStream() {
  if (weights_ == nullptr) {
    MOE_RETURN_IF_ERROR(mesh_->Open(MeshLane::kWeights));
    MOE_ASSIGN_OR_RETURN(weights_, MakeTransferStream(context_.memory->device()));
    if (trace_ != nullptr) trace_->AddLane("weights", weights_.get());
  }
  return weights_.get();
}

int64_t Session::peak_bytes() const {
  const bool apart = context_.exchange_workspace != context_.workspace;
  return workspace_.peak_bytes() + (apart ? exchange_workspace_.peak_bytes() : 0) +
         stashes_->peak_bytes();
}

void Session::End(const absl::Status& reason) {
  mesh_->Abort(reason);
  for (Stream* stream : {compute_.get(), exchange_.get(), gradients_.get(), weights_.get()}) {
    if (stream != nullptr) stream->Synchronize().IgnoreError();
  }
}

void Session::RecordTrace(int64_t capacity) {
  trace_ = std::make_unique<TraceRecorder>(capacity);
  trace_->AddLane("compute", compute_.get());
  if (exchange_ != nullptr) trace_->AddLane("exchange", exchange_.get());
  trace_->AddLane("gradients", gradients_.get());
  clock_.set_recorder(trace_.get());
}

}  // namespace moe
