// Runs the operations of a schedule.
#ifndef MOE_MOE_PIPELINE_RUNNER_H_
#define MOE_MOE_PIPELINE_RUNNER_H_

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "moe/pipeline/schedule.h"
#include "moe/run/pass.h"
#include "moe/run/round.h"
#include "moe/state/module.h"

namespace moe {

// What the loop around a model does in every round: tokens before its passes, losses after them.
class RoundHost {
 public:
  virtual ~RoundHost() = default;
  // Before the first operation: hands the module its tokens, and completes `pass` (batch,
  // router_stats), which the operations are given. What it refers to lives until EndRound.
  virtual absl::Status BeginRound(const Round& round, Pass& pass) = 0;
  // After the last operation, for whose exchanges the compute stream then waits.
  virtual absl::Status EndRound(const Pass& pass) = 0;
};

// Runs `ops`, in which the operations of a round are neighbours. `module` reads tokens and writes
// losses itself: its rows are empty. `rounds`, a Trainer, begins each round, and complete gradients
// are reported to it. Collective over the groups of the module.
template <typename T, typename Rounds>
absl::Status RunOperations(absl::Span<const PipelineOp> ops, Module<T>& module, RoundHost& host,
                           Rounds& rounds) {
  for (auto op = ops.begin(); op != ops.end();) {
    MOE_ASSIGN_OR_RETURN(const Round round, rounds.BeginRound());
    Pass pass = rounds.PassOf(round);
    const auto run = [&]() -> absl::Status {
      MOE_RETURN_IF_ERROR(host.BeginRound(round, pass));
      const auto ready = [&](Parameter& parameter) {
        return rounds.MarkReady(round, parameter);
      };
      do {
        MOE_RETURN_IF_ERROR(op->kind == OpKind::kForward ? module.Forward(pass, {}, {})
                                                         : module.Backward(pass, {}, {}, ready));
      } while (++op != ops.end() && op->round == op[-1].round);
      // A stash is given back only once the compute stream waits for all that works on it.
      MOE_RETURN_IF_ERROR(JoinStreams(*pass.context.compute, *pass.context.exchange));
      return host.EndRound(pass);
    };
    MOE_RETURN_IF_ERROR(Timed(pass, {.name = "micro-batch"}, *pass.context.compute, run));
  }
  return absl::OkStatus();
}

}  // namespace moe

#endif  // MOE_MOE_PIPELINE_RUNNER_H_
