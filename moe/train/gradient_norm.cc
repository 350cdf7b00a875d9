#include "moe/train/gradient_norm.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"
#include "kernels/exact_sum/square_sum.h"

namespace moe {
namespace {

// Digits of the sum of squares, followed by the number of partials that were rounded.
constexpr int64_t kTensorFields = kSquareSumSize + 1;

// Tensor with the largest grid loss; of several equal ones that whose name has the largest hash, at
// any layout.
struct Worst {
  double loss = 0;
  int64_t hash = 0;
  const std::string* name = nullptr;

  bool IsWorseThan(const Worst& other) const {
    return loss > other.loss || (loss == other.loss && hash > other.hash);
  }
};

double ValueOf(const int64_t* squares) {
  int64_t digits[kSquareSumSize];
  std::copy_n(squares, kSquareSumSize, digits);
  return std::sqrt(SquareSumValue(digits));
}

// fields: those of tensor `name`, summed over all ranks that hold it.
void Take(const int64_t* fields, const std::string& name, double unit, Worst& worst) {
  const int64_t inexact = fields[kSquareSumSize];
  if (inexact == 0) return;
  const double most = std::sqrt(static_cast<double>(inexact)) * unit / 2, norm = ValueOf(fields);
  Worst here = {.loss = most < norm ? most / norm : 1, .name = &name};
  if (here.loss < worst.loss) return;
  here.hash = static_cast<int64_t>(Xxh3(name.data(), name.size()) >> 1);
  if (here.IsWorseThan(worst)) worst = here;
}

// Tensors of experts, of stages, and of both ends of a pipeline are added up apart, over the ranks
// that hold them. Those of a stage may be held in parts by ranks of a tensor group.
bool AreHeldBy(const GradientSquares& each, MeshGroup holders) {
  const MeshGroup group = each.parameter->spec().holders;
  return group == holders || (group == MeshGroup::kData && holders == MeshGroup::kStage);
}

int64_t TensorsOf(absl::Span<const GradientSquares> gradients, MeshGroup holders) {
  return std::count_if(gradients.begin(), gradients.end(),
                       [holders](const GradientSquares& each) { return AreHeldBy(each, holders); });
}

// fields: [TensorsOf(gradients, holders)][kTensorFields].
void WriteFields(absl::Span<const GradientSquares> gradients, MeshGroup holders, int64_t* fields) {
  for (const GradientSquares& each : gradients) {
    if (!AreHeldBy(each, holders)) continue;
    fields = std::copy_n(each.sum, kSquareSumSize, fields);
    *fields++ = each.tally.inexact;
  }
}

Worst WorstOf(absl::Span<const GradientSquares> gradients, MeshGroup holders, const int64_t* fields,
              double unit) {
  Worst worst;
  for (const GradientSquares& each : gradients) {
    if (!AreHeldBy(each, holders)) continue;
    Take(fields, each.parameter->spec().name, unit, worst);
    fields += kTensorFields;
  }
  return worst;
}

absl::Status SumOver(Communicator& group, absl::Span<int64_t> fields, const Context& context,
                     const Site& site) {
  if (group.size() == 1) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(group.AllReduce<int64_t>(fields, ReduceOp::kSum, *context.host, site));
  return context.host->Synchronize();
}

// The tensor with the largest grid loss of this rank's that `holders` hold.
absl::StatusOr<Worst> WorstAmong(MeshGroup holders, absl::Span<const GradientSquares> gradients,
                                 double unit, const Context& context, const Site& site) {
  const int64_t size = TensorsOf(gradients, holders) * kTensorFields;
  if (size == 0) return Worst();  // as on the others of the group
  MOE_ASSIGN_OR_RETURN(const auto fields, context.host_workspace->Array<int64_t>(size));
  WriteFields(gradients, holders, fields.data());
  Mesh& mesh = *context.mesh;
  MOE_RETURN_IF_ERROR(SumOver(mesh.group(holders, MeshLane::kGradients), fields, context, site));
  if (holders == MeshGroup::kExpertData && mesh.size(MeshGroup::kExpertTensor) > 1) {
    Communicator& sharing = mesh.group(MeshGroup::kExpertTensor, MeshLane::kGradients);
    MOE_RETURN_IF_ERROR(SumOver(sharing, fields, context, site));
  }
  return WorstOf(gradients, holders, fields.data(), unit);
}

// Fields that each rank contributes to the sums over all ranks, at a place of its own.
enum OfRank : uint8_t { kLargest, kLoss, kHash, kNameBytes, kRankFields };

// Name of the worst tensor, sent by rank `root`.
absl::StatusOr<std::string> NameFrom(int root, int64_t bytes, const Worst& mine,
                                     const Context& context, const Site& site) {
  Communicator& world = context.mesh->world();
  std::string name = world.rank() == root ? *mine.name : std::string(bytes, '\0');
  const absl::Span<uint8_t> all(reinterpret_cast<uint8_t*>(name.data()), name.size());
  MOE_RETURN_IF_ERROR(world.Broadcast<uint8_t>(all, root, *context.host, site));
  MOE_RETURN_IF_ERROR(context.host->Synchronize());
  return name;
}

}  // namespace

absl::StatusOr<double> GradientNorm::ClipFactor(double most) const {
  if (!(most >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("clipping to a norm of ", most, ", expected >= 0"));
  }
  if (finite()) return value > most ? most / value : 1.0;
  return absl::DataLossError(absl::StrCat("the gradients are not finite (", non_finite,
                                          " elements are NaN, infinite or off the exact grid), "
                                          "expected finite ones: the weights have stayed"));
}

// The sums of experts' tensors travel first, then everything else at once; where each stage of a
// pipeline has other tensors, theirs travel like those of experts.
absl::StatusOr<GradientNorm> NormOverRanks(absl::Span<const GradientSquares> gradients, double unit,
                                           const Context& context, const Site& site) {
  Communicator& world = context.mesh->world();
  const WorkspaceScope scope(*context.host_workspace);
  const bool exact = unit > 0;
  // Order of fields: sums over all tensors and the number of non-finite partials; each rank's
  // fields; replicated tensors.
  constexpr int64_t kRanks = kSquareSumSize + 1;
  const int64_t replicated = kRanks + (exact ? world.size() * int64_t{kRankFields} : 0);
  const bool one_stage = context.mesh->size(MeshGroup::kPipeline) == 1;
  const int64_t tensors = exact && one_stage ? TensorsOf(gradients, MeshGroup::kStage) : 0;
  MOE_ASSIGN_OR_RETURN(const auto fields, context.host_workspace->Array<int64_t>(
                                              replicated + tensors * kTensorFields));
  std::fill_n(fields.begin(), replicated, int64_t{0});
  GridTally tally;
  for (const GradientSquares& each : gradients) {
    for (int i = 0; i < kSquareSumSize; ++i) fields[i] += each.sum[i];
    tally.Add(each.tally);
  }
  fields[kSquareSumSize] = tally.non_finite;
  Worst mine;
  if (exact) {
    for (const MeshGroup holders :
         {MeshGroup::kExpertData, MeshGroup::kExpertHolders, MeshGroup::kEnds, MeshGroup::kStage}) {
      if (one_stage && !HoldExperts(holders)) continue;
      MOE_ASSIGN_OR_RETURN(const Worst worst, WorstAmong(holders, gradients, unit, context, site));
      if (worst.IsWorseThan(mine)) mine = worst;
    }
    int64_t* const own = &fields[kRanks + world.rank() * int64_t{kRankFields}];
    own[kLargest] = tally.largest;
    own[kLoss] = std::bit_cast<int64_t>(mine.loss);
    own[kHash] = mine.hash;
    own[kNameBytes] = mine.name == nullptr ? 0 : std::ssize(*mine.name);
    if (one_stage) WriteFields(gradients, MeshGroup::kStage, fields.data() + replicated);
  }
  MOE_RETURN_IF_ERROR(SumOver(world, fields, context, site));

  GradientNorm norm = {.non_finite = fields[kSquareSumSize]};
  const bool finite = norm.non_finite == 0 && fields[kSquareSumDigits] == 0;
  norm.value = finite ? ValueOf(fields.data()) : std::numeric_limits<double>::infinity();
  if (!exact) return norm;
  Worst worst;
  if (one_stage) worst = WorstOf(gradients, MeshGroup::kStage, fields.data() + replicated, unit);
  // Rank whose own tensor is the worst; -1: a replicated tensor, known to every rank.
  int root = -1;
  int64_t name_bytes = 0, largest = 0;
  for (int r = 0; r < world.size(); ++r) {
    const int64_t* const theirs = &fields[kRanks + r * int64_t{kRankFields}];
    largest = std::max(largest, theirs[kLargest]);
    const Worst of_rank = {std::bit_cast<double>(theirs[kLoss]), theirs[kHash], nullptr};
    if (!of_rank.IsWorseThan(worst)) continue;
    worst = of_rank;
    root = r;
    name_bytes = theirs[kNameBytes];
  }
  norm.largest = std::bit_cast<float>(static_cast<uint32_t>(largest));
  norm.grid_loss = worst.loss;
  if (!norm.grid_loss_is_named()) return norm;
  if (root < 0) {
    norm.grid_loss_tensor = *worst.name;
    return norm;
  }
  MOE_ASSIGN_OR_RETURN(norm.grid_loss_tensor, NameFrom(root, name_bytes, mine, context, site));
  return norm;
}

}  // namespace moe
