// TrainedLayer of trainer.h: a layer in the rounds of its trainer.
#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/tensor/own_rows.h"
#include "moe/train/trainer.h"

namespace moe {
namespace {

absl::Span<const uint8_t> MaskAt(const uint8_t* padding_mask, int64_t rows) {
  if (padding_mask == nullptr) return {};
  return {padding_mask, static_cast<size_t>(rows)};
}

// `batch` as a call of `rows` rows, of all tensor-parallel ranks, uses it in `round`.
Batch InRound(const Round& round, int64_t rows, Batch batch) {
  if (batch.micro_batch_offsets.empty() && batch.first_global_token == 0 && !round.empty()) {
    batch.first_global_token = round.micro_batch() * rows;
  }
  batch.step = round.step();
  return batch;
}

}  // namespace

template <typename T>
absl::Status TrainedLayer<T>::CheckRound(const Round& round, int64_t rows,
                                         const Batch& batch) const {
  MOE_RETURN_IF_ERROR(trainer_.CheckCurrent(round));
  if (round.empty() && rows > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "TrainedLayer: ", rows, " tokens in a round without a micro-batch, expected none"));
  }
  if (batch.micro_batch_offsets.size() > 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("TrainedLayer: ", batch.micro_batch_offsets.size() - 1,
                     " micro-batches in a round, expected one"));
  }
  return absl::OkStatus();
}

template <typename T>
TensorShare TrainedLayer<T>::share() const {
  return ShareOf(trainer_.context());
}

template <typename T>
absl::Status TrainedLayer<T>::CheckAllRowsHere() const {
  if (!share().cut()) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      "TrainedLayer: rows without a batch on ", share().ranks,
      " tensor-parallel ranks, expected Forward with a batch that has the offsets of all rows"));
}

template <typename T>
absl::Status TrainedLayer<T>::TakeStats() {
  for (auto& [stats, counts] : calls_) {
    MOE_RETURN_IF_ERROR(stats.Wait());
    if (!std::exchange(counts, false)) continue;
    for (size_t e = 0; e < counts_.size(); ++e) counts_[e] += stats.expert_count[e];
  }
  calls_.erase(calls_.begin(), calls_.end() - 1);
  return absl::OkStatus();
}

template <typename T>
absl::Status TrainedLayer<T>::Forward(Pass pass, MatrixView<const T> x, MatrixView<T> y,
                                      bool counts) {
  constexpr size_t kMostCalls = 64;  // calls whose stats may be under way
  if (calls_.size() > kMostCalls) MOE_RETURN_IF_ERROR(TakeStats());
  // Routers of a tensor group decide about the same rows: one rank counts.
  Call call = {.counts = counts && share().index == 0};
  pass.router_stats = {&call.stats, 1};
  MOE_RETURN_IF_ERROR(layer_->Forward(pass, x, y));
  calls_.push_back(std::move(call));
  return absl::OkStatus();
}

template <typename T>
absl::Status TrainedLayer<T>::Forward(const Round& round, MatrixView<const T> x, MatrixView<T> y,
                                      Batch batch) {
  MOE_RETURN_IF_ERROR(CheckRound(round, x.rows(), batch));
  batch = InRound(round, share().cut() ? RowsOf(batch) : x.rows(), batch);
  if (trainer_.evaluates()) batch.mode = Mode::kEvaluation;
  return Forward(trainer_.PassOf(round, batch), x, y, /*counts=*/!trainer_.evaluates());
}

template <typename T>
absl::Status TrainedLayer<T>::Backward(const Round& round, MatrixView<const T> dy,
                                       MatrixView<T> dx) {
  MOE_RETURN_IF_ERROR(trainer_.CheckCurrent(round));
  return layer_->Backward(trainer_.PassOf(round), dy, dx, [&](Parameter& parameter) {
    return trainer_.MarkReady(round, parameter);
  });
}

template <typename T>
absl::Status TrainedLayer<T>::ForwardRows(const void* x, int64_t rows, const uint8_t* padding_mask,
                                          void* y) {
  MOE_RETURN_IF_ERROR(CheckAllRowsHere());
  rows_ = rows;
  return Forward(trainer_.round(), RowsAt(x, rows), RowsAt(y, rows),
                 {.padding_mask = MaskAt(padding_mask, rows)});
}

template <typename T>
absl::Status TrainedLayer<T>::BackwardRows(const void* dy, void* dx) {
  return Backward(trainer_.round(), RowsAt(dy, rows_), RowsAt(dx, rows_));
}

template <typename T>
absl::StatusOr<TrainedLayerBase::GraphBackward> TrainedLayer<T>::ForwardInGraph(
    const GraphForward& call) {
  MOE_RETURN_IF_ERROR(CheckAllRowsHere());
  MOE_RETURN_IF_ERROR(trainer_.HaveWeights());
  const Round& round = trainer_.round();
  const MatrixView<const T> x(static_cast<const T*>(call.x), call.rows, call.cols);
  const MatrixView<T> y(static_cast<T*>(call.y), call.rows, call.cols);
  std::vector<int64_t> sequences;
  for (int64_t at = 0; call.sequence_length > 0 && at <= call.rows; at += call.sequence_length) {
    sequences.push_back(at);
  }
  Pass pass = trainer_.PassOf(round, InRound(round, call.rows,
                                             {.sequence_offsets = sequences,
                                              .padding_mask = MaskAt(call.padding_mask, call.rows),
                                              .mode = call.mode}));
  if (!call.backward) {
    MOE_RETURN_IF_ERROR(Forward(pass.WithoutStash(), x, y, /*counts=*/false));
    return GraphBackward([](const void*, float, void*) {
      return absl::FailedPreconditionError(
          "TrainedLayer: Backward of a Forward that kept nothing, expected one in training");
    });
  }
  MOE_RETURN_IF_ERROR(CheckRound(round, call.rows, pass.batch));
  // More than M terms could leave the exact sums.
  if (trainer_.evaluates() || forwards_ > round.index()) {
    return absl::FailedPreconditionError(
        absl::StrCat("TrainedLayer: ", forwards_, " Forwards in a graph until round ",
                     round.index(), trainer_.evaluates() ? " of an evaluation" : " of a step",
                     ", expected ", trainer_.evaluates() ? "none" : "one in each"));
  }
  auto stash =  // copies share it
      std::make_shared<StashHandle>(trainer_.session().stashes().Take());
  pass.stash = stash->get();
  MOE_RETURN_IF_ERROR(Forward(pass, x, y, /*counts=*/true));
  ++forwards_;
  return GraphBackward([this, here = std::weak_ptr<const bool>(here_), rows = call.rows, stash](
                           const void* dy, float d_router_loss, void* dx) -> absl::Status {
    if (here.expired()) {
      return absl::FailedPreconditionError(
          "TrainedLayer: Backward when the trainer is gone, expected it before");
    }
    if (*stash == nullptr) {
      return absl::FailedPreconditionError(
          "TrainedLayer: the stash was used by another Backward, expected one Backward for each "
          "Forward");
    }
    const bool last = forwards_ - backwards_ == 1;
    Pass backward = trainer_.PassOf(trainer_.round());
    backward.stash = stash->get();
    backward.d_loss = d_router_loss;
    MOE_RETURN_IF_ERROR(
        layer_->Backward(backward, RowsAt(dy, rows), RowsAt(dx, rows), [&](Parameter& parameter) {
          return last ? trainer_.MarkReady(parameter) : absl::OkStatus();
        }));
    ++backwards_;
    stash->reset();
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status TrainedLayer<T>::CheckPasses() const {
  if (forwards_ == backwards_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("TrainedLayer: the layer of ", layer_->parameters().front()->spec().name,
                   " has ", forwards_, " Forwards in a graph and ", backwards_,
                   " Backwards in a step, expected as many: other ranks may wait for one"));
}

template <typename T>
absl::Status TrainedLayer<T>::TakeCounts(absl::Span<int64_t> counts) {
  MOE_RETURN_IF_ERROR(TakeStats());
  std::copy(counts_.begin(), counts_.end(), counts.begin());
  return absl::OkStatus();
}

template <typename T>
absl::Status TrainedLayer<T>::EndStep(absl::Span<const int64_t> counts) {
  MOE_RETURN_IF_ERROR(layer_->EndStep(counts));
  forwards_ = backwards_ = 0;
  std::fill(counts_.begin(), counts_.end(), int64_t{0});
  return absl::OkStatus();
}

template class TrainedLayer<float>;
template class TrainedLayer<BFloat16>;
template class TrainedLayer<Float16>;

}  // namespace moe
