#include "moe/session.h"

#include <algorithm>
#include <cstring>
#include <string>

#include <absl/strings/str_cat.h>

#include "comm/extremes.h"
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

}  // namespace

absl::Status CheckOneSimdTarget(absl::string_view target, Communicator& world, Stream& stream) {
  MOE_ASSIGN_OR_RETURN(const auto packed, ExtremesOverRanks({Pack(target)}, world, stream));
  if (packed[0].same()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("layout-invariant numerics: ranks compute with ", Unpack(packed[0].most),
                   " and ", Unpack(packed[0].least),
                   ", expected one SIMD target: use machines of one kind, or --numerics fast"));
}

absl::StatusOr<std::unique_ptr<Session>> Session::Create(const SessionOptions& options,
                                                         std::unique_ptr<Communicator> world) {
  if (options.threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("Session: ", options.threads, " threads, expected >= 1"));
  }
  auto session = std::unique_ptr<Session>(new Session(options.threads));
  MOE_ASSIGN_OR_RETURN(session->mesh_,
                       Mesh::Create(std::move(world), options.expert_parallel_size));
  session->compute_ = MakeInlineStream(&session->pool_);
  if (options.numerics == Numerics::kLayoutInvariant) {
    MOE_RETURN_IF_ERROR(CheckOneSimdTarget(gemm::SimdTargets().front(), session->mesh_->world(),
                                           *session->compute_));
  }
  if (options.overlap_exchange) {
    MOE_ASSIGN_OR_RETURN(session->exchange_, MakeStream({}));
  }
  MOE_ASSIGN_OR_RETURN(session->gradients_, MakeStream({}));
  if (options.trace_capacity > 0) {
    session->trace_ = std::make_unique<TraceRecorder>(options.trace_capacity);
    session->trace_->AddLane("compute", session->compute_.get());
    if (options.overlap_exchange) session->trace_->AddLane("exchange", session->exchange_.get());
    session->trace_->AddLane("gradients", session->gradients_.get());
    session->clock_.set_recorder(session->trace_.get());
  }
  session->context_ = {
      .mesh = session->mesh_.get(),
      .compute = session->compute_.get(),
      .exchange = options.overlap_exchange ? session->exchange_.get() : session->compute_.get(),
      .workspace = &session->workspace_,
      .clock = &session->clock_,
      .numerics = options.numerics,
  };
  return session;
}

}  // namespace moe
