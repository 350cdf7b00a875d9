#include "moe/checkpoint/training_state.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/parameter_hash.h"
#include "moe/unit_grid.h"

namespace moe {
namespace {

constexpr char kMaster[] = "master", kMean[] = "m", kMeanSquare[] = "v", kValue[] = "value",
               kShare[] = "share";

// Rows of a tensor whose first element is `offset` in a list of tensors that is cut at `cut`: those
// before the cut, which falls between row groups. The same for all that share the list.
int64_t RowsBefore(int64_t cut, int64_t offset, const CanonicalTensor& tensor) {
  if (tensor.cols == 0) return 0;
  const int64_t rows = (cut - offset + tensor.cols - 1) / tensor.cols;
  return UnitGrid(tensor).FirstRowOfGroup(std::clamp<int64_t>(rows, 0, tensor.rows));
}

}  // namespace

// A canonical tensor that this rank holds, and its states, in memory of the parameter's device.
struct TrainingState::Held {
  const CanonicalTensor* tensor;
  ParameterGroup group;
  std::vector<std::pair<const char*, float*>> states;
};

auto TrainingState::AllHeld() -> std::vector<Held> {
  std::vector<Held> all;
  for (const auto& p : parameters_.parameters()) {
    if (p->frozen()) continue;  // it stays what it was made or loaded as
    int64_t offset = 0;
    for (const CanonicalTensor& part : p->parts()) {
      Held held = {&part, p->spec().group, {}};
      float* const master = p->master().data() + offset;
      held.states = {{p->spec().trainable ? kMaster : kValue, master}};
      if (p->spec().trainable && optimizer_ != nullptr) {
        held.states.push_back({kMean, optimizer_->first_moment(*p).data() + offset});
        held.states.push_back({kMeanSquare, optimizer_->second_moment(*p).data() + offset});
      }
      all.push_back(std::move(held));
      offset += part.size();
    }
  }
  return all;
}

absl::StatusOr<absl::Span<const StatePart>> TrainingState::PartsToWrite() {
  const std::vector<Held> all = AllHeld();
  parts_.clear();
  for (const ParameterGroup group : {ParameterGroup::kReplicated, ParameterGroup::kExpert}) {
    const Communicator& holders = group == ParameterGroup::kReplicated
                                      ? context_.mesh->world()
                                      : context_.mesh->expert_data_parallel();
    int64_t total = 0, offset = 0;
    for (const Held& held : all) total += held.group == group ? held.tensor->size() : 0;
    const int64_t begin = total * holders.rank() / holders.size(),
                  end = total * (holders.rank() + 1) / holders.size();
    for (const Held& held : all) {
      if (held.group != group) continue;
      const CanonicalTensor& tensor = *held.tensor;
      const TensorBox box = {RowsBefore(begin, offset, tensor), RowsBefore(end, offset, tensor), 0,
                             tensor.cols};
      offset += tensor.size();
      if (box.rows() == 0) continue;
      for (const auto& [state, data] : held.states) {
        parts_.push_back({.tensor = &tensor,
                          .state = state,
                          .box = box,
                          .data = MatrixView<const float>(data + box.row_begin * tensor.cols,
                                                          box.rows(), tensor.cols)});
      }
    }
  }
  if (OnCuda(context_)) MOE_RETURN_IF_ERROR(CopyToHost());
  if (context_.mesh->world().rank() != 0) return parts_;
  for (const RouterShare& share : shares_) {
    if (share.values->empty()) continue;  // before the first step
    parts_.push_back(
        {.tensor = &share.tensor,
         .state = kShare,
         .box = {0, 1, 0, share.tensor.cols},
         .data = MatrixView<const double>(share.values->data(), 1, share.tensor.cols)});
  }
  return parts_;
}

absl::Status TrainingState::CopyToHost() {
  int64_t elements = 0;
  for (const StatePart& part : parts_) elements += part.box.rows() * part.box.cols();
  host_.resize(static_cast<size_t>(elements));
  float* to = host_.data();
  for (StatePart& part : parts_) {
    auto& data = std::get<MatrixView<const float>>(part.data);
    const int64_t size = data.rows() * data.cols();
    MOE_RETURN_IF_ERROR(
        context_.compute->CopyBytes(data.data(), to, size * static_cast<int64_t>(sizeof(float))));
    data = {to, data.rows(), data.cols()};
    to += size;
  }
  return context_.compute->Synchronize();
}

absl::Status TrainingState::Restore(CheckpointReader& reader, int64_t steps_taken) {
  MOE_RETURN_IF_ERROR(CheckTensors(reader));
  for (const Held& held : AllHeld()) MOE_RETURN_IF_ERROR(Read(reader, held));
  for (const auto& p : parameters_.parameters()) {
    MOE_RETURN_IF_ERROR(parameters_.RefreshCompute(*p, StreamOf(*p, context_)));
  }
  MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
  for (const RouterShare& share : shares_) {
    share.values->clear();
    if (reader.Find(share.tensor.name) == nullptr) continue;
    share.values->resize(static_cast<size_t>(share.tensor.cols));
    MOE_RETURN_IF_ERROR(
        reader.ReadBox(share.tensor.name, kShare, {0, 1, 0, share.tensor.cols},
                       MatrixView<double>(share.values->data(), 1, share.tensor.cols)));
  }
  if (optimizer_ != nullptr) optimizer_->set_steps_taken(steps_taken);
  return CheckHashes(reader);
}

// Whether the checkpoint is of this model: the same tensors over all ranks, in the same shapes.
absl::Status TrainingState::CheckTensors(const CheckpointReader& reader) {
  int64_t mine = 0, stored = 0;
  for (const auto& p : parameters_.parameters()) {
    if (p->frozen()) continue;
    for (const CanonicalTensor& part : p->parts()) {
      const ManifestTensor* const found = reader.Find(part.name);
      if (found == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat(reader.path(), ": there is no tensor '",
                                                       part.name, "', which this model has"));
      }
      if (found->rows != part.rows || found->cols != part.cols) {
        return absl::InvalidArgumentError(
            absl::StrCat(reader.path(), ": '", part.name, "' is [", found->rows, ", ", found->cols,
                         "], expected [", part.rows, ", ", part.cols, "], which this model has"));
      }
      if (SpeaksFor(*p, context_)) ++mine;
    }
  }
  for (const ManifestTensor& tensor : reader.manifest().tensors) {
    if (tensor.type == SafetensorsType::kF32) ++stored;
  }
  MOE_RETURN_IF_ERROR(context_.mesh->expert_parallel().AllReduce<int64_t>(
      {&mine, 1}, ReduceOp::kSum, *context_.host));
  MOE_RETURN_IF_ERROR(context_.host->Synchronize());
  if (mine == stored) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      reader.path(), ": ", stored, " tensors, expected the ", mine, " that this model has"));
}

absl::Status TrainingState::Read(CheckpointReader& reader, const Held& held) {
  const CanonicalTensor& tensor = *held.tensor;
  const TensorBox whole = {0, tensor.rows, 0, tensor.cols};
  for (const auto& [state, data] : held.states) {
    if (!OnCuda(context_)) {
      MOE_RETURN_IF_ERROR(reader.ReadBox(tensor.name, state, whole,
                                         MatrixView<float>(data, tensor.rows, tensor.cols)));
      continue;
    }
    host_.resize(static_cast<size_t>(tensor.size()));
    MOE_RETURN_IF_ERROR(reader.ReadBox(tensor.name, state, whole,
                                       MatrixView<float>(host_.data(), tensor.rows, tensor.cols)));
    MOE_RETURN_IF_ERROR(context_.compute->CopyBytes(
        host_.data(), data, tensor.size() * static_cast<int64_t>(sizeof(float))));
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
  }
  return absl::OkStatus();
}

absl::Status TrainingState::CheckHashes(const CheckpointReader& reader) {
  const auto check = [&](const char* state, StateOf values) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const uint64_t hash, HashState(parameters_, context_, values));
    const std::string expected = reader.StateHash(state), read = HashHex(hash);
    if (read == expected || (expected.empty() && hash == 0)) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(reader.path(), ": all '", state, "' read have hash ",
                                            read, ", the manifest says ", expected));
  };
  const auto trained = [](const Parameter& p, absl::Span<const float> values) {
    return p.spec().trainable ? values : absl::Span<const float>();
  };
  MOE_RETURN_IF_ERROR(check(kMaster, [&](const Parameter& p) { return trained(p, p.vector()); }));
  if (optimizer_ != nullptr) {
    MOE_RETURN_IF_ERROR(
        check(kMean, [&](const Parameter& p) { return trained(p, optimizer_->first_moment(p)); }));
    MOE_RETURN_IF_ERROR(check(
        kMeanSquare, [&](const Parameter& p) { return trained(p, optimizer_->second_moment(p)); }));
  }
  return check(kValue, [](const Parameter& p) {
    return p.spec().host_state ? p.vector() : absl::Span<const float>();
  });
}

}  // namespace moe
