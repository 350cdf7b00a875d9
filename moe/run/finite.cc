#include "moe/run/finite.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <optional>

#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>

#include "comm/wait_report.h"
#include "comm/watch/rank_watch.h"
#include "kernels/base/finite.h"
#include "kernels/base/storage_type.h"
#include "moe/run/pass.h"

namespace moe {
namespace {

// Phases of backward that note, in their order within a round and a layer.
constexpr absl::string_view kBackwardPhases[] = {
    "loss backward", "combine backward",   "experts backward",  "dispatch backward",
    "gate backward", "dense FFN backward", "attention backward"};

// The first row with a value that is not finite; rows.rows(): all are finite.
template <typename T>
int64_t FirstRow(MatrixView<const T> rows, ThreadPool& threads) {
  std::atomic<int64_t> first{rows.rows()};
  threads.For(rows.rows(), RowGrain(rows.cols()), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (CountNonFinite<T>(rows.row(r), rows.cols()) == 0) continue;
      int64_t known = first.load();
      while (r < known && !first.compare_exchange_weak(known, r)) {
      }
      return;
    }
  });
  return first;
}

// "rank 1 on host a in experts (layer 0, step 3)".
std::string PlaceOf(const Pass& pass, const char* phase) {
  Mesh* const mesh = pass.context.mesh;
  return DescribePlace(mesh == nullptr ? 0 : mesh->world().rank(), phase, pass.site.Named(""));
}

// "<place>: the value at [5, 2] of [16, 8] is nan"; none where all are finite.
template <typename T>
std::optional<std::string> Find(const Pass& pass, const char* phase, MatrixView<const T> made) {
  const int64_t row = FirstRow(made, pass.context.compute->threads());
  if (row == made.rows()) return std::nullopt;
  int64_t col = 0;
  while (CountNonFinite<T>(made.row(row) + col, 1) == 0) ++col;
  return absl::StrCat(PlaceOf(pass, phase), ": the value at [", row, ", ", col, "] of [",
                      made.rows(), ", ", made.cols(), "] is ", static_cast<float>(made(row, col)));
}

int64_t OrderOf(const Site& site, absl::string_view phase) {
  constexpr int64_t kLayers = int64_t{1} << 24, kPhases = 16;
  const int64_t below = site.layer < 0 ? 0 : kLayers - 1 - site.layer;  // the loss comes first
  const int64_t in_layer =
      std::distance(std::begin(kBackwardPhases),
                    std::find(std::begin(kBackwardPhases), std::end(kBackwardPhases), phase));
  return (std::max(site.round, 0) * kLayers + below) * kPhases + in_layer;
}

}  // namespace

template <typename T>
void ReplaceValue(const Pass& pass, const char* phase, MatrixView<T> made) {
  const Context& context = pass.context;
  if (context.mesh == nullptr || made.rows() == 0 || OnCuda(context)) return;
  RankWatch* const watch = context.mesh->world().watch();
  if (watch == nullptr) return;
  const std::optional<float> value = watch->TakeValue(pass.site.Named(phase));
  if (value.has_value()) made(made.rows() / 2, made.cols() / 2) = T(*value);
}

template <typename T>
absl::Status CheckFinite(const Pass& pass, const char* phase, MatrixView<T> made) {
  if (OnCuda(pass.context)) return absl::OkStatus();
  ReplaceValue(pass, phase, made);
  const std::optional<std::string> found = Find<T>(pass, phase, made);
  if (!found.has_value()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(*found, ", expected a finite one"));
}

template <typename T>
void NoteNonFinite(const Pass& pass, const char* phase, MatrixView<T> made) {
  FirstNonFinite* const first = pass.context.non_finite;
  if (OnCuda(pass.context)) return;
  ReplaceValue(pass, phase, made);
  if (first == nullptr || first->order() != FirstNonFinite::kNone) return;
  std::optional<std::string> found = Find<T>(pass, phase, made);
  if (found.has_value()) first->Note(OrderOf(pass.site, phase), *std::move(found));
}

absl::Status AtPlace(const absl::Status& status, const Pass& pass, const char* phase) {
  if (!absl::IsDataLoss(status)) return status;
  return absl::DataLossError(absl::StrCat(PlaceOf(pass, phase), ": ", status.message()));
}

#define MOE_INSTANTIATE(T)                                                    \
  template void ReplaceValue(const Pass&, const char*, MatrixView<T>);        \
  template absl::Status CheckFinite(const Pass&, const char*, MatrixView<T>); \
  template void NoteNonFinite(const Pass&, const char*, MatrixView<T>);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
