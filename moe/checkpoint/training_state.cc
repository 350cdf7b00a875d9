#include "moe/checkpoint/training_state.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include <absl/strings/str_cat.h>

#include "comm/agreed_status.h"
#include "kernels/base/finite.h"
#include "kernels/base/status_macros.h"
#include "moe/state/parameter_hash.h"
#include "moe/state/unit_grid.h"

namespace moe {
namespace {

constexpr char kMaster[] = "master", kMean[] = "m", kMeanSquare[] = "v", kValue[] = "value",
               kShare[] = "share";
// States of parameters, in the order of TrainingState::Hashes.
constexpr absl::string_view kStates[] = {kMaster, kMean, kMeanSquare, kValue};

size_t PlaceOf(absl::string_view state) {
  return static_cast<size_t>(std::find(std::begin(kStates), std::end(kStates), state) - kStates);
}

}  // namespace

// A box of a canonical tensor that this rank keeps, and its states, each from the box's first
// element on, in memory of the parameter's device; nullptr while it is in a file alone.
struct TrainingState::Held {
  const CanonicalTensor* tensor;
  TensorBox box;
  bool own;  // this rank writes and hashes the box
  std::vector<std::pair<const char*, float*>> states;
};

auto TrainingState::HeldOf(absl::Span<const OptimizerState::Slice> slices) const
    -> std::vector<Held> {
  std::vector<Held> all;
  for (const OptimizerState::Slice& slice : slices) {
    const ElementRange range = slice.piece.range, own = slice.own;
    for (const auto& [part, is_own] :
         {std::pair(ElementRange{range.begin, own.begin}, false), std::pair(own, true),
          std::pair(ElementRange{own.end, range.end}, false)}) {
      for (const BoxInMemory& held : BoxesOf(*slice.piece.parameter, part)) {
        const int64_t at = held.first - range.begin;
        const auto from = [at](float* values) {
          return values == nullptr ? nullptr : values + at;
        };
        all.push_back({held.tensor,
                       held.box,
                       is_own,
                       {{kMaster, from(slice.master())},
                        {kMean, from(slice.mean.data())},
                        {kMeanSquare, from(slice.mean_square.data())}}});
      }
    }
  }
  return all;
}

auto TrainingState::HeldByStore() const -> std::vector<Held> {
  std::vector<Held> all;
  for (const auto& p : parameters_.parameters()) {
    // A frozen parameter keeps the values it was made or loaded with.
    if (p->frozen() || IsSliced(*p)) continue;
    const bool own = context_.mesh->index(p->spec().holders) == 0;
    const char* const state = p->spec().trainable ? kMaster : kValue;
    for (const BoxInMemory& held : BoxesOf(*p)) {
      all.push_back({held.tensor, held.box, own, {{state, p->master().data() + held.first}}});
    }
  }
  return all;
}

absl::Status TrainingState::ForEachHeld(std::optional<StateUse> use, VisitHeld visit) {
  if (optimizer_ != nullptr) {
    OptimizerState& state = optimizer_->state();
    const auto visit_slices = [&](absl::Span<const OptimizerState::Slice> slices) {
      return visit(HeldOf(slices));
    };
    MOE_RETURN_IF_ERROR(use.has_value() ? state.ForEach(*use, visit_slices)
                                        : visit_slices(state.slices()));
  }
  return visit(HeldByStore());
}

int64_t TrainingState::BytesToWrite() {
  int64_t bytes = 0;
  const absl::Status counted = ForEachHeld(std::nullopt, [&](absl::Span<const Held> all) {
    for (const Held& held : all) {
      if (held.own) bytes += held.box.size() * std::ssize(held.states) * int64_t{sizeof(float)};
    }
    return absl::OkStatus();
  });
  MOE_CHECK(counted.ok());
  if (context_.mesh->index(MeshGroup::kStage) != 0) return bytes;
  for (const ModuleState& share : shares_) {
    bytes += share.tensor.size() * int64_t{sizeof(double)};
  }
  return bytes;
}

absl::StatusOr<absl::Span<const StatePart>> TrainingState::PartsToWrite() {
  MOE_RETURN_IF_ERROR(CollectParts(kStates));
  AddShares();
  return parts_;
}

absl::Status TrainingState::ReadParts(VisitParts visit) {
  if (AllInMemory()) return visit(parts_);
  MOE_RETURN_IF_ERROR(VisitPages(kStates, visit));
  parts_.clear();
  AddShares();
  return visit(parts_);
}

void TrainingState::AddShares() {
  if (context_.mesh->index(MeshGroup::kStage) != 0) return;
  for (const ModuleState& share : shares_) {
    if (share.values->empty()) continue;  // before the first step
    parts_.push_back(
        {.tensor = &share.tensor,
         .state = kShare,
         .box = {0, 1, 0, share.tensor.cols},
         .data = MatrixView<const double>(share.values->data(), 1, share.tensor.cols)});
  }
}

void TrainingState::AddParts(absl::Span<const Held> all,
                             absl::Span<const absl::string_view> states) {
  for (const Held& held : all) {
    if (!held.own) continue;
    for (const auto& [state, data] : held.states) {
      if (std::find(states.begin(), states.end(), state) == states.end()) continue;
      parts_.push_back({.tensor = held.tensor,
                        .state = state,
                        .box = held.box,
                        .data = MatrixView<const float>(data, held.box.rows(), held.box.cols())});
    }
  }
}

absl::Status TrainingState::CollectParts(absl::Span<const absl::string_view> states) {
  parts_.clear();
  MOE_RETURN_IF_ERROR(ForEachHeld(std::nullopt, [&](absl::Span<const Held> all) {
    AddParts(all, states);
    return absl::OkStatus();
  }));
  return OnCuda(context_) ? CopyToHost() : context_.compute->Synchronize();
}

bool TrainingState::AllInMemory() const {
  return std::none_of(parts_.begin(), parts_.end(), [](const StatePart& part) {
    const auto* const data = std::get_if<MatrixView<const float>>(&part.data);
    return data != nullptr && data->data() == nullptr && part.box.size() > 0;
  });
}

absl::Status TrainingState::VisitPages(absl::Span<const absl::string_view> states,
                                       VisitParts visit) {
  return ForEachHeld(StateUse::kRead, [&](absl::Span<const Held> all) {
    parts_.clear();
    AddParts(all, states);
    return visit(parts_);
  });
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

absl::Status TrainingState::Restore(CheckpointReader& reader, int64_t steps_taken,
                                    const Site& site) {
  MOE_RETURN_IF_ERROR(CheckTensors(reader, site));
  Hashes hashes = {};  // hashes of what this rank owns; the rest is checked box by box
  // Other ranks receive an error that one rank finds before they wait for that rank.
  MOE_RETURN_IF_ERROR(Agreed(ReadAll(reader, hashes), site));
  MOE_RETURN_IF_ERROR(SumOverRanks(hashes, site));
  MOE_RETURN_IF_ERROR(Agreed(CheckHashes(reader, hashes), site));
  if (optimizer_ != nullptr) {
    MOE_RETURN_IF_ERROR(optimizer_->PublishMasters(site));
    optimizer_->set_steps_taken(steps_taken);
  }
  for (const auto& p : parameters_.parameters()) {
    if (p->frozen() || IsSliced(*p)) continue;
    MOE_RETURN_IF_ERROR(parameters_.RefreshCompute(*p, StreamOf(*p, context_)));
  }
  return context_.compute->Synchronize();
}

// Checks that the checkpoint is of this model: the same tensors over all ranks, in the same shapes.
absl::Status TrainingState::CheckTensors(const CheckpointReader& reader, const Site& site) {
  int64_t mine = 0, stored = 0;
  absl::Status fits;
  for (const auto& p : parameters_.parameters()) {
    if (p->frozen()) continue;
    for (const CanonicalTensor& part : p->parts()) {
      if (SpeaksFor(*p, context_)) ++mine;
      const ManifestTensor* const found = reader.Find(part.name);
      if (!fits.ok() ||
          (found != nullptr && found->rows == part.rows && found->cols == part.cols)) {
        continue;
      }
      fits = absl::InvalidArgumentError(
          found == nullptr ? absl::StrCat(reader.path(), ": there is no tensor '", part.name,
                                          "', which this model has")
                           : absl::StrCat(reader.path(), ": '", part.name, "' is [", found->rows,
                                          ", ", found->cols, "], expected [", part.rows, ", ",
                                          part.cols, "], which this model has"));
    }
  }
  for (const ManifestTensor& tensor : reader.manifest().tensors) {
    if (tensor.type == SafetensorsType::kF32) ++stored;
  }
  MOE_RETURN_IF_ERROR(SumOverModel({&mine, 1}, context_, site));
  if (fits.ok() && mine != stored) {
    fits = absl::InvalidArgumentError(absl::StrCat(
        reader.path(), ": ", stored, " tensors, expected the ", mine, " that this model has"));
  }
  return Agreed(fits, site);
}

absl::Status TrainingState::ReadAll(CheckpointReader& reader, Hashes& hashes) {
  const auto read = [&](absl::Span<const Held> all) -> absl::Status {
    for (const Held& held : all) MOE_RETURN_IF_ERROR(Read(reader, held, hashes));
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(ForEachHeld(StateUse::kOverwrite, read));
  for (const ModuleState& share : shares_) {
    share.values->clear();
    if (reader.Find(share.tensor.name) == nullptr) continue;
    share.values->resize(static_cast<size_t>(share.tensor.cols));
    MOE_RETURN_IF_ERROR(
        reader.ReadBox(share.tensor.name, kShare, {0, 1, 0, share.tensor.cols},
                       MatrixView<double>(share.values->data(), 1, share.tensor.cols)));
  }
  return absl::OkStatus();
}

absl::Status TrainingState::Read(CheckpointReader& reader, const Held& held, Hashes& hashes) {
  const CanonicalTensor& tensor = *held.tensor;
  const UnitGrid grid(tensor);
  for (const auto& [state, data] : held.states) {
    uint64_t& hash = hashes[PlaceOf(state)];
    TensorBox box = held.box;  // the band that is read next
    for (; box.row_begin < held.box.row_end; box.row_begin = box.row_end) {
      box.row_end = std::min(held.box.row_end, grid.EndOfBand(box.row_begin));
      const int64_t size = box.size();
      float* const to = data + (box.row_begin - held.box.row_begin) * box.cols();
      if (OnCuda(context_)) host_.resize(static_cast<size_t>(size));
      const MatrixView<float> rows(OnCuda(context_) ? host_.data() : to, box.rows(), box.cols());
      if (held.own) {
        MOE_RETURN_IF_ERROR(reader.ReadUnchecked(tensor.name, state, box, rows));
        hash += HashUnits(tensor, box, rows);
      } else {
        MOE_RETURN_IF_ERROR(reader.ReadBox(tensor.name, state, box, rows));
      }
      if (const int64_t bad = CountNonFinite(rows.data(), size); bad > 0) {
        return absl::DataLossError(absl::StrCat(reader.path(), ": '", tensor.name, "' ", state,
                                                " has ", bad,
                                                " values that are not finite, expected none"));
      }
      if (!OnCuda(context_)) continue;
      MOE_RETURN_IF_ERROR(context_.compute->CopyBytes(host_.data(), to,
                                                      size * static_cast<int64_t>(sizeof(float))));
      MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
    }
  }
  return absl::OkStatus();
}

absl::Status TrainingState::Agreed(const absl::Status& mine, const Site& site) {
  return AgreedStatus(mine, context_.mesh->world(), *context_.host, site);
}

absl::Status TrainingState::SumOverRanks(Hashes& hashes, const Site& site) {
  int64_t sums[std::tuple_size_v<Hashes>];
  std::transform(hashes.begin(), hashes.end(), sums,
                 [](uint64_t hash) { return static_cast<int64_t>(hash); });
  MOE_RETURN_IF_ERROR(context_.mesh->world().AllReduce<int64_t>(
      absl::MakeSpan(sums), ReduceOp::kSum, *context_.host, site));
  MOE_RETURN_IF_ERROR(context_.host->Synchronize());
  std::transform(std::begin(sums), std::end(sums), hashes.begin(),
                 [](int64_t sum) { return static_cast<uint64_t>(sum); });
  return absl::OkStatus();
}

// Each rank adds the units that it owns.
absl::StatusOr<uint64_t> TrainingState::HashWeights(const Site& site) {
  MOE_RETURN_IF_ERROR(CollectParts({kMaster, kValue}));
  Hashes hashes = {};
  const auto add = [&](absl::Span<const StatePart> parts) {
    for (const StatePart& part : parts) {
      hashes[PlaceOf(part.state)] +=
          HashUnits(*part.tensor, part.box, std::get<MatrixView<const float>>(part.data));
    }
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(AllInMemory() ? add(parts_) : VisitPages({kMaster, kValue}, add));
  MOE_RETURN_IF_ERROR(SumOverRanks(hashes, site));
  return hashes[PlaceOf(kMaster)] + hashes[PlaceOf(kValue)];
}

absl::Status TrainingState::CheckHashes(CheckpointReader& reader, const Hashes& hashes) {
  for (size_t i = 0; i < hashes.size(); ++i) {
    if (optimizer_ == nullptr && kStates[i] != kMaster && kStates[i] != kValue) continue;
    const std::string expected = reader.StateHash(kStates[i]), read = HashHex(hashes[i]);
    if (read == expected || (expected.empty() && hashes[i] == 0)) continue;
    MOE_RETURN_IF_ERROR(reader.Verify(/*threads=*/1));  // Verify names the damaged box
    return absl::DataLossError(absl::StrCat(reader.path(), ": all '", kStates[i],
                                            "' read have hash ", read, ", the manifest says ",
                                            expected));
  }
  return absl::OkStatus();
}

}  // namespace moe
