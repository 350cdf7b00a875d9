#include "moe/pipeline/runner.h"

#include <iterator>
#include <utility>

namespace moe {

absl::StatusOr<std::unique_ptr<PipelineRunner>> PipelineRunner::Create(const PipelineShape& shape,
                                                                       const Context& context) {
  MOE_RETURN_IF_ERROR(CheckPipeline(shape));
  std::unique_ptr<PipelineRunner> runner(new PipelineRunner(shape, context));
  if (shape.schedule == ScheduleKind::k1F1BOverlap) MOE_RETURN_IF_ERROR(runner->MakeTurns());
  if (shape.stages > 1) {
    MOE_ASSIGN_OR_RETURN(runner->links_, PipelineLinks::Create(runner->context_));
  }
  return runner;
}

absl::Status PipelineRunner::MakeTurns() {
  if (OnCuda(context_)) {
    return absl::UnimplementedError(
        "pipeline: schedule 1f1b-overlap on a CUDA device, expected another, and an overlap degree "
        "to hide exchanges");
  }
  if (context_.exchange == context_.compute) {
    return absl::InvalidArgumentError(
        "pipeline: schedule 1f1b-overlap without SessionOptions::overlap_exchange, expected with");
  }
  MOE_ASSIGN_OR_RETURN(turns_, Turns::Create());
  context_.turns = turns_.get();
  backward_compute_ = MakeInlineStream(&context_.compute->threads());
  backward_scratch_ = context_.stashes->Take();
  backward_context_ = context_;
  backward_context_.compute = backward_context_.host = backward_compute_.get();
  backward_context_.workspace = backward_context_.exchange_workspace =
      backward_context_.host_workspace = &backward_scratch_->device();
  if (context_.clock != nullptr && context_.clock->recorder() != nullptr) {
    context_.clock->recorder()->AddLane("backward", backward_compute_.get());
  }
  return absl::OkStatus();
}

// The rows of a micro-batch go through all parts forward and, for two to three times as long,
// backward. Before an operation was measured, each may take as long as a deadline.
absl::Duration PipelineRunner::grace() const {
  if (links_ == nullptr) return absl::ZeroDuration();
  if (longest_op_ns_ == 0) return shape_.parts() * links_->timeout();
  return (measured_backward_ ? 2 : 4) * shape_.parts() * absl::Nanoseconds(longest_op_ns_);
}

Site PipelineRunner::SiteOf(const Round& round, const char* name) const {
  return {.name = name,
          .round = static_cast<int32_t>(round.index()),
          .step = round.step(),
          .stage = links_ == nullptr ? -1 : stage_,
          .micro_batch = links_ == nullptr ? -1 : round.micro_batch(),
          .grace = grace()};
}

const char* PipelineRunner::NameOf(OpKind kind) {
  switch (kind) {
    case OpKind::kForward:
      return "forward";
    case OpKind::kBackward:
      return "backward";
    case OpKind::kWeightGradient:
      break;
  }
  return "weight gradients";
}

void PipelineRunner::Begin(int64_t rounds, bool backward) {
  backward_ = backward;
  MakeSchedule(shape_, stage_, rounds, backward, ops_);
  most_in_flight_ = std::max<int64_t>(1, MostInFlight(shape_, stage_, rounds));
  const auto flights = static_cast<size_t>(shape_.chunks * most_in_flight_);
  if (flights_.size() != flights) flights_ = std::vector<Flight>(flights);
  for (Flight& flight : flights_) {
    flight.Clear();
    flight.context = backward_context_;
    if (defers()) flight.context.later = &flight.later;
  }
  for (Event& sent : sent_) sent = {};
}

// Backwards hold back a stage that is ahead of the next one. In an evaluation nothing else does.
absl::Status PipelineRunner::Send(const PipelineOp& op, Message message, const Round& round) {
  if (!Sends(op)) return absl::OkStatus();
  const Site site = SiteOf(round, "pipeline send");
  const Work work = {
      .phase = Phase::kPipeline, .name = "pipeline send", .bytes = std::ssize(message.bytes)};
  const Context& context = ContextOf(op);
  return Timed(context, site, work, *context.compute, [&]() -> absl::Status {
    if (!backward_ && sent_[0].state() != nullptr) {
      MOE_RETURN_IF_ERROR(context.compute->WaitFor(sent_[0]));
    }
    sent_[0] = std::move(sent_[1]);
    MOE_ASSIGN_OR_RETURN(sent_[1],
                         links_->Send(WayOf(op), message.bytes, std::move(message.owner), site));
    return absl::OkStatus();
  });
}

}  // namespace moe
