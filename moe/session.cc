#include "moe/session.h"

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"

namespace moe {

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
  if (options.overlap_exchange) {
    MOE_ASSIGN_OR_RETURN(session->exchange_, MakeStream({}));
  }
  MOE_ASSIGN_OR_RETURN(session->gradients_, MakeStream({}));
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
