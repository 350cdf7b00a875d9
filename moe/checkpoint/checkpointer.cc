#include "moe/checkpoint/checkpointer.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "moe/io/file.h"

namespace moe {

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Create(
    const CheckpointerOptions& options, TrainingState& state, const Context& context) {
  auto checkpointer = std::unique_ptr<Checkpointer>(new Checkpointer(options, state, context));
  const Communicator& world = context.mesh->world();
  MOE_ASSIGN_OR_RETURN(checkpointer->writer_,
                       CheckpointWriter::Create(options.writer, world.rank(), world.size()));
  return checkpointer;
}

CheckpointVotes Checkpointer::Votes() const {
  return {.stop = options_.stop != nullptr && options_.stop->received() != 0 ? 1 : 0,
          .writing = writer_->phase() == WriterPhase::kWriting ? 1 : 0};
}

absl::Status Checkpointer::AfterStep(int64_t step, const CheckpointVotes& all, Describe describe) {
  if (all.stop > 0) return Finish(step, describe);
  MOE_RETURN_IF_ERROR(writer_->CheckProgress());
  if (writing_step_ >= 0 && all.writing == 0) MOE_RETURN_IF_ERROR(Publish());
  if (options_.interval == 0 || step % options_.interval != 0) return absl::OkStatus();
  if (writing_step_ < 0) return Begin(step, describe);
  if (context_.mesh->world().rank() == 0) {
    Log(LogLevel::kWarning, absl::StrCat("no checkpoint of step ", step, ": that of step ",
                                         writing_step_, " is still being written"));
  }
  return absl::OkStatus();
}

absl::Status Checkpointer::Finish(int64_t step, Describe describe) {
  if (writing_step_ >= 0) MOE_RETURN_IF_ERROR(Publish());
  if (saved_step_ == step) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(Begin(step, describe));
  if (writing_step_ >= 0) MOE_RETURN_IF_ERROR(Publish());
  return saved_step_ == step ? absl::OkStatus() : failure_;
}

absl::Status Checkpointer::Begin(int64_t step, Describe describe) {
  context_.mesh->world().Mark({.name = "ckpt-write", .step = step});
  MOE_ASSIGN_OR_RETURN(const auto parts, state_.PartsToWrite());
  writing_step_ = step;
  // What goes wrong on one rank, all learn in Publish.
  const absl::Status begun =
      writer_->Start({.step = step, .sections = describe()}, parts,
                     [this](VisitParts visit) { return state_.ReadParts(visit); });
  if (absl::IsFailedPrecondition(begun)) return begun;
  return options_.asynchronous ? absl::OkStatus() : Publish();
}

absl::Status Checkpointer::Publish() {
  const int64_t step = std::exchange(writing_step_, -1);
  context_.mesh->world().Mark({.name = "ckpt-commit", .step = step});
  const absl::Status published = writer_->Publish(context_.mesh->world(), *context_.host);
  if (published.ok()) {
    saved_step_ = step;
    failures_in_a_row_ = 0;
    return absl::OkStatus();
  }
  if (FileFaultOf(published) != FileFault::kWrite) return published;
  ++failures_;
  failure_ = WithFileFault(
      absl::Status(published.code(),
                   absl::StrCat("no checkpoint of step ", step, ": ", published.message())),
      FileFault::kWrite);
  if (++failures_in_a_row_ >= options_.max_failures) return failure_;
  if (context_.mesh->world().rank() == 0) Log(LogLevel::kWarning, failure_.message());
  return absl::OkStatus();
}

}  // namespace moe
