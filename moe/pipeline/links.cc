#include "moe/pipeline/links.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// Communicators of one way: one stream at a time uses a communicator, and a stage has two edges.
// Edge e joins stages e and e + 1; a ring of an odd number of edges needs a third.
int GroupsOfWay(int stages) {
  return stages % 2 == 0 ? 2 : 3;
}
int GroupOfEdge(int edge, int stages) {
  return edge == stages - 1 && stages % 2 == 1 ? 2 : edge % 2;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PipelineLinks>> PipelineLinks::Create(const Context& context) {
  Mesh& mesh = *context.mesh;
  const int stages = mesh.size(MeshGroup::kPipeline), stage = mesh.index(MeshGroup::kPipeline);
  const int before = (stage + stages - 1) % stages, after = (stage + 1) % stages;
  // Through the host a call would wait for its peer, which itself waits for rows first.
  if (OnCuda(context) && !mesh.group(MeshGroup::kPipeline).moves(DeviceKind::kCuda)) {
    return absl::UnimplementedError(
        absl::StrCat("--pp is ", stages, " on CUDA devices over the ", mesh.world().backend(),
                     " backend, expected 1 or a backend that moves rows between devices: nccl"));
  }
  std::unique_ptr<PipelineLinks> links(new PipelineLinks(context));
  const int groups = GroupsOfWay(stages);
  for (int i = 0; i < kRowsWays * groups; ++i) {
    MOE_ASSIGN_OR_RETURN(auto group, mesh.NewGroup(MeshGroup::kPipeline));
    links->groups_.push_back(std::move(group));
  }
  const auto end = [&](int way, int edge, int peer) -> absl::StatusOr<End> {
    MOE_ASSIGN_OR_RETURN(auto stream, MakeTransferStream(context.compute->device()));
    Communicator* const group = links->groups_[way * groups + GroupOfEdge(edge, stages)].get();
    return End{.group = group, .peer = peer, .stream = std::move(stream)};
  };
  // An edge is numbered by the stage at its lower end: before -> stage and stage -> after.
  const int to[kRowsWays] = {after, before}, from[kRowsWays] = {before, after};
  const int to_edge[kRowsWays] = {stage, before}, from_edge[kRowsWays] = {before, stage};
  for (int way = 0; way < kRowsWays; ++way) {
    MOE_ASSIGN_OR_RETURN(End send, end(way, to_edge[way], to[way]));
    MOE_ASSIGN_OR_RETURN(End receive, end(way, from_edge[way], from[way]));
    links->sends_.push_back(std::move(send));
    links->receives_.push_back(std::move(receive));
  }
  return links;
}

PipelineLinks::~PipelineLinks() {
  if (in_flight_) {
    context_.mesh->Abort(
        Caught([] { return absl::AbortedError("rows of a pipeline were given up"); }));
  }
  for (const auto* const ends : {&sends_, &receives_}) {
    for (const End& end : *ends) end.stream->Synchronize().IgnoreError();
  }
}

absl::StatusOr<Event> PipelineLinks::Move(std::vector<End>& ends, RowsWay way, SendRecvOp op,
                                          StashHandle owner, const Site& site) {
  in_flight_ = true;
  End& end = ends[static_cast<size_t>(way)];
  op.peer = end.peer;
  MOE_RETURN_IF_ERROR(JoinStreams(*end.stream, *context_.compute));
  MOE_RETURN_IF_ERROR(end.group->SendRecv({&op, 1}, *end.stream, site));
  if (owner != nullptr) {
    MOE_RETURN_IF_ERROR(end.stream->Enqueue([owner = std::move(owner)]() mutable {
      owner.reset();
      return absl::OkStatus();
    }));
  }
  return end.stream->Record();
}

absl::StatusOr<Event> PipelineLinks::Receive(RowsWay way, absl::Span<std::byte> rows,
                                             const Site& site) {
  return Move(receives_, way, {.recv = rows.data(), .bytes = std::ssize(rows)}, nullptr, site);
}

absl::StatusOr<Event> PipelineLinks::Send(RowsWay way, absl::Span<const std::byte> rows,
                                          StashHandle owner, const Site& site) {
  bytes_sent_ += std::ssize(rows);
  return Move(sends_, way, {.send = rows.data(), .bytes = std::ssize(rows)}, std::move(owner),
              site);
}

absl::Status PipelineLinks::Join() {
  for (const End& end : sends_) {
    MOE_RETURN_IF_ERROR(JoinStreams(*context_.compute, *end.stream));
  }
  in_flight_ = false;
  return absl::OkStatus();
}

}  // namespace moe
