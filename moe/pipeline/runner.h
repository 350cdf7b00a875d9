// Runs the operations of a schedule.
#ifndef MOE_MOE_PIPELINE_RUNNER_H_
#define MOE_MOE_PIPELINE_RUNNER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/workspace.h"
#include "moe/pipeline/links.h"
#include "moe/pipeline/schedule.h"
#include "moe/run/deferred_gradients.h"
#include "moe/run/pass.h"
#include "moe/run/round.h"
#include "moe/run/turns.h"
#include "moe/state/module.h"
#include "moe/tensor/own_rows.h"

namespace moe {

// What the loop around a model does in every round: tokens before its passes, losses after them.
// The chunks of a rank are called one by one; with one stage and one chunk, the whole model.
class RoundHost {
 public:
  virtual ~RoundHost() = default;
  // Rows of the round's micro-batch in the model, on all ranks of a tensor group.
  virtual int64_t RowsOf(const Round& round) const = 0;
  // Before the forward of a chunk: hands the module its tokens, and completes `pass` (batch,
  // router_stats), which the operations are given. What it refers to lives until EndRound.
  virtual absl::Status BeginRound(const Round& round, int chunk, Pass& pass) = 0;
  // After the chunk's last operation, for whose exchanges the compute stream then waits.
  virtual absl::Status EndRound(const Round& /*round*/, int /*chunk*/, const Pass& /*pass*/) {
    return absl::OkStatus();
  }
};

// The part of a model that a rank runs. The first part of the whole chain reads tokens itself: its
// x and dx are of no use to anybody. The last one computes losses: its y and dy are empty.
template <typename T>
struct PipelineModel {
  std::vector<Module<T>*> chunks;
  int64_t hidden_size = 0;  // columns of the rows between modules
};

// Keeps the micro-batches in flight of one rank, and what its neighbours send. Steps like the first
// one allocate nothing.
class PipelineRunner {
 public:
  // Collective over the world of `context` where there are several stages; blocks the host. Errors
  // of CheckPipeline. Of k1F1BOverlap: kInvalidArgument without a queue for exchanges
  // (SessionOptions::overlap_exchange), kUnimplemented on a CUDA device.
  static absl::StatusOr<std::unique_ptr<PipelineRunner>> Create(const PipelineShape& shape,
                                                                const Context& context);

  // Runs MakeSchedule's operations for all rounds of `rounds`, a Trainer, which says what the
  // rounds are and learns when a gradient is complete. Collective over the groups of the modules
  // and the pipeline.
  template <typename T, typename Rounds>
  absl::Status Run(const PipelineModel<T>& model, RoundHost& host, Rounds& rounds);

  const PipelineShape& shape() const { return shape_; }
  // Where an operation of the round belongs.
  Site SiteOf(const Round& round, const char* name) const;
  // How much later than this rank, beyond a deadline, another stage may come to what all of them
  // do: passes of all parts may lie between.
  absl::Duration grace() const;
  // Sent to neighbouring stages by this rank so far.
  int64_t bytes_sent() const { return links_ == nullptr ? 0 : links_->bytes_sent(); }
  // The most memory of rows between stages, in bytes.
  int64_t peak_bytes() const { return boundary_->peak_bytes(); }

 private:
  // Rows [N, hidden_size] between stages, and the stash that they are memory of.
  struct Message {
    StashHandle owner;  // nullptr: there is none
    absl::Span<std::byte> bytes;

    template <typename T>
    MatrixView<T> RowsOf(const PipelineModel<T>& model) const {
      if (owner == nullptr) return {};
      const auto row_bytes = model.hidden_size * int64_t{sizeof(T)};
      return {reinterpret_cast<T*>(bytes.data()), std::ssize(bytes) / row_bytes, model.hidden_size};
    }
  };
  // A micro-batch between its forward through a chunk and its backward.
  struct Flight {
    StashHandle stash;  // nullptr in an evaluation
    Message rows;       // that the forward began with
    std::optional<Pass> pass;
    DeferredGradients later;  // of a backward whose weight gradients are operations of their own
    Context context;          // of the backward

    void Clear() {
      pass.reset();
      stash.reset();
      rows = {};
    }
  };
  // Keeps the time of the longest operation, without the wait for its rows.
  class OpTimer {
   public:
    explicit OpTimer(int64_t& longest_ns) : longest_ns_(longest_ns) {}
    ~OpTimer() { longest_ns_ = std::max(longest_ns_, MonotonicNs() - begun_ns_); }

   private:
    int64_t& longest_ns_;
    const int64_t begun_ns_ = MonotonicNs();
  };
  // Rows that a neighbour was asked for.
  struct Expected {
    size_t op = 0;  // that needs them
    Message message;
    Event here;
  };

  PipelineRunner(const PipelineShape& shape, const Context& context)
      : shape_(shape),
        stage_(context.mesh->index(MeshGroup::kPipeline)),
        context_(context),
        backward_context_(context),
        boundary_(StashPool::Create(context)) {}

  // Gives backwards what they need to run together with forwards.
  absl::Status MakeTurns();

  int PartOf(const PipelineOp& op) const { return shape_.PartOf(stage_, op.chunk); }
  bool is_first(const PipelineOp& op) const { return PartOf(op) == 0; }
  bool is_last(const PipelineOp& op) const { return PartOf(op) + 1 == shape_.parts(); }
  bool Receives(const PipelineOp& op) const {
    return (op.kind == OpKind::kForward && !is_first(op)) ||
           (op.kind == OpKind::kBackward && !is_last(op));
  }
  bool Sends(const PipelineOp& op) const {
    return (op.kind == OpKind::kForward && !is_last(op)) ||
           (op.kind == OpKind::kBackward && !is_first(op));
  }
  // Without neighbours both passes of a round are one piece of work, unless they have turns.
  bool whole_rounds() const { return links_ == nullptr && turns_ == nullptr; }
  bool defers() const { return shape_.schedule == ScheduleKind::kZeroBubbleH1; }
  static const char* NameOf(OpKind kind);
  static RowsWay WayOf(const PipelineOp& op) {
    return op.kind == OpKind::kForward ? RowsWay::kActivations : RowsWay::kGradients;
  }
  const Context& ContextOf(const PipelineOp& op) {
    return op.kind == OpKind::kBackward ? FlightOf(op).context : context_;
  }
  // Those of a chunk are rounds one behind the other.
  Flight& FlightOf(const PipelineOp& op) {
    return flights_[static_cast<size_t>(op.chunk * most_in_flight_ + op.round % most_in_flight_)];
  }
  // Overwrites ops_, and forgets what an earlier run left.
  void Begin(int64_t rounds, bool backward);
  // Asks for the rows of the next operation from `op` on that comes this way.
  template <typename T, typename Rounds>
  absl::Status Expect(size_t op, RowsWay way, const PipelineModel<T>& model, const RoundHost& host,
                      const Rounds& rounds);
  // The rows that operation `op` receives, if any, which have arrived; asks for the next.
  template <typename T, typename Rounds>
  absl::StatusOr<Message> Take(size_t op, const PipelineModel<T>& model, const RoundHost& host,
                               const Rounds& rounds);
  // Operations [begin, end), as one piece of work.
  template <typename T, typename Rounds>
  absl::Status RunOps(size_t begin, size_t end, const PipelineModel<T>& model, RoundHost& host,
                      Rounds& rounds);
  template <typename T, typename Rounds>
  absl::Status RunOp(size_t op, const PipelineModel<T>& model, RoundHost& host, Rounds& rounds);
  template <typename T, typename Rounds>
  absl::Status Forward(size_t op, const PipelineModel<T>& model, RoundHost& host, Rounds& rounds);
  template <typename T, typename Rounds>
  absl::Status Backward(size_t op, const PipelineModel<T>& model, RoundHost& host, Rounds& rounds);
  template <typename T, typename Rounds>
  absl::Status WeightGradients(size_t op, const PipelineModel<T>& model, Rounds& rounds);
  // This rank's rows of a micro-batch.
  int64_t RowsHere(const RoundHost& host, const Round& round) const {
    return OwnRowsOf(context_, host.RowsOf(round)).count();
  }
  // Memory for these.
  template <typename T>
  absl::StatusOr<Message> NewMessage(const PipelineModel<T>& model, int64_t rows) {
    Message message = {boundary_->Take(), {}};
    MOE_ASSIGN_OR_RETURN(message.bytes, message.owner->device().template Array<std::byte>(
                                            rows * model.hidden_size * int64_t{sizeof(T)}));
    return message;
  }
  // Where `op` sends rows.
  absl::Status Send(const PipelineOp& op, Message message, const Round& round);

  const PipelineShape shape_;
  const int stage_;
  Context context_;           // of forwards
  Context backward_context_;  // its compute stream and scratch are others where there are turns
  bool backward_ = false;
  std::vector<PipelineOp> ops_;
  // Memory of rows between stages: a message's, or a micro-batch's first rows until its backward.
  std::shared_ptr<StashPool> boundary_;
  int64_t most_in_flight_ = 1;
  std::vector<Flight> flights_;  // [chunk][most_in_flight_]
  Expected expected_[kRowsWays];
  Event sent_[2];                   // in an evaluation, the last two messages
  int64_t longest_op_ns_ = 0;       // the longest operation that this rank has run
  bool measured_backward_ = false;  // whether a backward was among them
  // Of backwards that run together with forwards; nullptr: there are none.
  StashHandle backward_scratch_;
  std::unique_ptr<Stream> backward_compute_;
  std::unique_ptr<Turns> turns_;
  std::unique_ptr<PipelineLinks> links_;  // nullptr: one stage. Last: it stops first
};

template <typename T, typename Rounds>
absl::Status PipelineRunner::Run(const PipelineModel<T>& model, RoundHost& host, Rounds& rounds) {
  Begin(rounds.rounds(), !rounds.evaluates());
  for (const RowsWay way : {RowsWay::kActivations, RowsWay::kGradients}) {
    if (links_ != nullptr) MOE_RETURN_IF_ERROR(Expect(0, way, model, host, rounds));
  }
  for (size_t i = 0, end = 0; i < ops_.size(); i = end) {
    end = i + 1;
    if (ops_[i].with_next) {
      MOE_RETURN_IF_ERROR(turns_->Run([&] { return RunOps(i, i + 1, model, host, rounds); },
                                      [&] { return RunOps(i + 1, i + 2, model, host, rounds); },
                                      // Peers wait for what it will not send.
                                      [&](const absl::Status& s) { context_.mesh->Abort(s); }));
      end = i + 2;
      continue;
    }
    if (whole_rounds()) {
      while (end < ops_.size() && ops_[end].round == ops_[i].round) ++end;
    }
    MOE_RETURN_IF_ERROR(RunOps(i, end, model, host, rounds));
  }
  return links_ == nullptr ? absl::OkStatus() : links_->Join();
}

template <typename T, typename Rounds>
absl::Status PipelineRunner::RunOps(size_t begin, size_t end, const PipelineModel<T>& model,
                                    RoundHost& host, Rounds& rounds) {
  const PipelineOp& first = ops_[begin];
  const Context& context = ContextOf(first);
  const char* const name = whole_rounds() ? "micro-batch" : NameOf(first.kind);
  const Site site = SiteOf(rounds.RoundAt(first.round), name);
  return Timed(context, site, {.name = name}, *context.compute, [&]() -> absl::Status {
    for (size_t op = begin; op < end; ++op) {
      MOE_RETURN_IF_ERROR(RunOp(op, model, host, rounds));
    }
    return absl::OkStatus();
  });
}

template <typename T, typename Rounds>
absl::Status PipelineRunner::Expect(size_t op, RowsWay way, const PipelineModel<T>& model,
                                    const RoundHost& host, const Rounds& rounds) {
  while (op < ops_.size() && (WayOf(ops_[op]) != way || !Receives(ops_[op]))) ++op;
  Expected& expected = expected_[static_cast<size_t>(way)];
  expected.op = op;
  if (op == ops_.size()) return absl::OkStatus();
  const Round round = rounds.RoundAt(ops_[op].round);
  MOE_ASSIGN_OR_RETURN(expected.message, NewMessage(model, RowsHere(host, round)));
  MOE_ASSIGN_OR_RETURN(expected.here, links_->Receive(way, expected.message.bytes,
                                                      SiteOf(round, "pipeline receive")));
  return absl::OkStatus();
}

template <typename T, typename Rounds>
absl::StatusOr<PipelineRunner::Message> PipelineRunner::Take(size_t op,
                                                             const PipelineModel<T>& model,
                                                             const RoundHost& host,
                                                             const Rounds& rounds) {
  if (!Receives(ops_[op])) return Message();
  const RowsWay way = WayOf(ops_[op]);
  MOE_CHECK(expected_[static_cast<size_t>(way)].op == op);
  Expected taken = std::move(expected_[static_cast<size_t>(way)]);
  MOE_RETURN_IF_ERROR(Expect(op + 1, way, model, host, rounds));
  const Site site = SiteOf(rounds.RoundAt(ops_[op].round), "pipeline receive");
  const Context& context = ContextOf(ops_[op]);
  MOE_RETURN_IF_ERROR(Timed(context, site, {.phase = Phase::kPipeline, .name = "pipeline receive"},
                            *context.compute,
                            [&] { return context.compute->WaitFor(taken.here); }));
  return std::move(taken.message);
}

template <typename T, typename Rounds>
absl::Status PipelineRunner::RunOp(size_t op, const PipelineModel<T>& model, RoundHost& host,
                                   Rounds& rounds) {
  switch (ops_[op].kind) {
    case OpKind::kForward:
      return Forward(op, model, host, rounds);
    case OpKind::kBackward:
      return Backward(op, model, host, rounds);
    case OpKind::kWeightGradient:
      break;
  }
  return WeightGradients(op, model, rounds);
}

template <typename T, typename Rounds>
absl::Status PipelineRunner::Forward(size_t op, const PipelineModel<T>& model, RoundHost& host,
                                     Rounds& rounds) {
  const PipelineOp& at = ops_[op];
  const Round round = rounds.RoundAt(at.round);
  Flight& flight = FlightOf(at);
  // Without a stash, tokens too are scratch.
  const WorkspaceScope scope(*context_.workspace), host_scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(flight.rows, Take(op, model, host, rounds));
  const OpTimer timer(longest_op_ns_);
  if (backward_) flight.stash = context_.stashes->Take();
  flight.pass.emplace(rounds.PassOf(round).On(context_));
  Pass& pass = *flight.pass;
  pass.stash = flight.stash.get();
  MOE_RETURN_IF_ERROR(host.BeginRound(round, at.chunk, pass));
  Message y;
  if (Sends(at)) {
    MOE_ASSIGN_OR_RETURN(y, NewMessage(model, RowsHere(host, round)));
  }
  MOE_RETURN_IF_ERROR(
      model.chunks[at.chunk]->Forward(pass, flight.rows.RowsOf(model), y.RowsOf(model)));
  MOE_RETURN_IF_ERROR(JoinStreams(*context_.compute, *context_.exchange));
  MOE_RETURN_IF_ERROR(Send(at, std::move(y), round));
  if (backward_) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(host.EndRound(round, at.chunk, pass));
  flight.Clear();
  return absl::OkStatus();
}

template <typename T, typename Rounds>
absl::Status PipelineRunner::Backward(size_t op, const PipelineModel<T>& model, RoundHost& host,
                                      Rounds& rounds) {
  const PipelineOp& at = ops_[op];
  const Round round = rounds.RoundAt(at.round);
  Flight& flight = FlightOf(at);
  const Context& context = flight.context;
  if (defers()) flight.later.Begin(context, *flight.stash);
  const Pass pass = flight.pass->On(context);
  // dx replaces dy; the last part has no dy, and the first one nobody who reads its dx.
  MOE_ASSIGN_OR_RETURN(Message dx, Take(op, model, host, rounds));
  const MatrixView<T> dy = dx.RowsOf(model);
  if (Sends(at) && !Receives(at)) {
    MOE_ASSIGN_OR_RETURN(dx, NewMessage(model, RowsHere(host, round)));
  }
  const OpTimer timer(longest_op_ns_);
  if (!defers()) MOE_RETURN_IF_ERROR(rounds.BeginBackward(round, at.chunk));
  const auto ready = [&](Parameter& parameter) {
    return defers() ? absl::OkStatus() : rounds.MarkComplete(round, parameter);
  };
  MOE_RETURN_IF_ERROR(model.chunks[at.chunk]->Backward(pass, dy, dx.RowsOf(model), ready));
  // A stash is given back only once the compute stream waits for all that works on it.
  MOE_RETURN_IF_ERROR(JoinStreams(*context.compute, *context.exchange));
  MOE_RETURN_IF_ERROR(Send(at, std::move(dx), round));
  measured_backward_ = true;
  MOE_RETURN_IF_ERROR(host.EndRound(round, at.chunk, pass));
  if (!defers()) flight.Clear();
  return absl::OkStatus();
}

template <typename T, typename Rounds>
absl::Status PipelineRunner::WeightGradients(size_t op, const PipelineModel<T>& model,
                                             Rounds& rounds) {
  const PipelineOp& at = ops_[op];
  const Round round = rounds.RoundAt(at.round);
  Flight& flight = FlightOf(at);
  MOE_RETURN_IF_ERROR(rounds.BeginBackward(round, at.chunk));
  MOE_RETURN_IF_ERROR(flight.later.Run());
  // Backward goes through them last to first.
  const auto parameters = model.chunks[at.chunk]->parameters();
  for (auto p = parameters.rbegin(); p != parameters.rend(); ++p) {
    if ((*p)->spec().trainable) MOE_RETURN_IF_ERROR(rounds.MarkComplete(round, **p));
  }
  flight.Clear();
  return absl::OkStatus();
}

}  // namespace moe

#endif  // MOE_MOE_PIPELINE_RUNNER_H_
