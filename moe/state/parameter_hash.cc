#include "moe/state/parameter_hash.h"

#include <algorithm>
#include <limits>
#include <string>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include "comm/extremes.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"

namespace moe {
namespace {

// Hash of the values that all of its holders have.
absl::StatusOr<int64_t> HashOf(const Parameter& parameter, const Context& context) {
  const auto hash = [](absl::Span<const std::byte> values) {
    return static_cast<int64_t>(Xxh3(values.data(), values.size()));
  };
  const auto pieces = parameter.replica();
  if (!OnCuda(context) && pieces.size() == 1) {
    MOE_RETURN_IF_ERROR(context.compute->Synchronize());
    return hash(pieces.front());
  }
  MOE_ASSIGN_OR_RETURN(const Buffer copy, parameter.ReadReplica(*context.compute));
  return hash(copy.span<std::byte>());
}

// Name of a parameter among all ranks: with the tensor index where they hold parts of it.
std::string NameAmongRanks(const Parameter& parameter, const Context& context) {
  const Mesh& mesh = *context.mesh;
  const bool of_experts = parameter.spec().holders == MeshGroup::kExpertData;
  const MeshGroup share = of_experts ? MeshGroup::kExpertTensor : MeshGroup::kTensor;
  const bool cut =
      (of_experts || parameter.spec().holders == MeshGroup::kData) && mesh.size(share) > 1;
  return absl::StrCat(parameter.spec().name,
                      cut ? absl::StrCat(" of tensor index ", mesh.index(share)) : "");
}

// `mine` of all ranks of a group, one behind the other, with newlines between them.
absl::StatusOr<std::string> Gathered(std::string mine, Communicator& group, Stream& stream,
                                     const Site& site) {
  auto length = static_cast<int64_t>(mine.size());
  MOE_RETURN_IF_ERROR(group.AllReduce<int64_t>({&length, 1}, ReduceOp::kMax, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  mine.resize(length, '\n');
  std::string all(mine.size() * group.size(), '\n');
  const auto bytes = [](std::string& s) {
    return absl::Span<uint8_t>(reinterpret_cast<uint8_t*>(s.data()), s.size());
  };
  MOE_RETURN_IF_ERROR(group.AllGather<uint8_t>(bytes(mine), bytes(all), stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return all;
}

// Names of the parameters of a whole model, sorted: of a block of experts, and of all stages.
absl::StatusOr<std::vector<std::string>> AllNames(const ParameterStore& store,
                                                  const Context& context, const Site& site) {
  Mesh& mesh = *context.mesh;
  std::string all;  // newline after each
  for (const auto& p : store.parameters()) all += NameAmongRanks(*p, context) + "\n";
  MOE_ASSIGN_OR_RETURN(
      all, Gathered(std::move(all), mesh.group(MeshGroup::kExpertBlock), *context.host, site));
  if (mesh.size(MeshGroup::kPipeline) > 1) {
    MOE_ASSIGN_OR_RETURN(
        all, Gathered(std::move(all), mesh.group(MeshGroup::kPipeline), *context.host, site));
  }
  std::vector<std::string> names = absl::StrSplit(all, '\n', absl::SkipEmpty());
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

bool SpeaksFor(const Parameter& parameter, const Context& context) {
  const MeshGroup holders = parameter.spec().holders;
  if (HoldExperts(holders)) return context.mesh->index(MeshGroup::kExpertTensor) == 0;
  const bool first = holders != MeshGroup::kEnds || context.mesh->index(MeshGroup::kPipeline) == 0;
  return first && context.mesh->index(MeshGroup::kExpertBlock) == 0;
}

absl::Status CheckReplicas(const ParameterStore& store, const Context& context, const Site& site) {
  Communicator& world = context.mesh->world();
  // The largest hash and the largest ~hash over the ranks that hold a parameter; the others have
  // the least int64 in both places.
  MOE_ASSIGN_OR_RETURN(const std::vector<std::string> names, AllNames(store, context, site));
  const auto size = static_cast<int64_t>(names.size());
  const int64_t absent = std::numeric_limits<int64_t>::min();
  std::vector<int64_t> mine(2 * size, absent);
  for (const auto& p : store.parameters()) {
    const int64_t at =
        std::lower_bound(names.begin(), names.end(), NameAmongRanks(*p, context)) - names.begin();
    MOE_ASSIGN_OR_RETURN(mine[at], HashOf(*p, context));
    mine[size + at] = ~mine[at];
  }
  std::vector<int64_t> most = mine;
  MOE_RETURN_IF_ERROR(
      world.AllReduce<int64_t>(absl::MakeSpan(most), ReduceOp::kMax, *context.host, site));
  MOE_RETURN_IF_ERROR(context.host->Synchronize());
  for (int64_t i = 0; i < size; ++i) {
    if (most[i] == ~most[size + i]) continue;
    const int64_t rank = world.rank(), none = std::numeric_limits<int64_t>::max();
    const int64_t has[] = {mine[i] == most[i] ? rank : none,
                           mine[size + i] == most[size + i] ? rank : none};
    MOE_ASSIGN_OR_RETURN(const auto ranks, ExtremesOverRanks(has, world, *context.host, site));
    return absl::DataLossError(absl::StrCat("tensor '", names[i], "' differs between ranks ",
                                            std::min(ranks[0].least, ranks[1].least), " and ",
                                            std::max(ranks[0].least, ranks[1].least),
                                            ", expected the same bits on all that hold it"));
  }
  return absl::OkStatus();
}

absl::Status SumOverModel(absl::Span<int64_t> counts, const Context& context, const Site& site) {
  Mesh& mesh = *context.mesh;
  for (const MeshGroup group : {MeshGroup::kExpertBlock, MeshGroup::kPipeline}) {
    if (group == MeshGroup::kPipeline && mesh.size(group) == 1) continue;
    MOE_RETURN_IF_ERROR(
        mesh.group(group).AllReduce<int64_t>(counts, ReduceOp::kSum, *context.host, site));
    MOE_RETURN_IF_ERROR(context.host->Synchronize());
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> CountParameters(const ParameterStore& store, const Context& context,
                                        const Site& site) {
  int64_t count = 0;
  for (const auto& p : store.parameters()) {
    if (!SpeaksFor(*p, context)) continue;
    for (const CanonicalTensor& tensor : p->parts()) count += tensor.size();
  }
  MOE_RETURN_IF_ERROR(SumOverModel({&count, 1}, context, site));
  return count;
}

}  // namespace moe
