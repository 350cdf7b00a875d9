// Values of a pass that are NaN or infinite, found where they arise.
#ifndef MOE_MOE_RUN_FINITE_H_
#define MOE_MOE_RUN_FINITE_H_

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include <absl/status/status.h>

#include "kernels/base/tensor_view.h"
#include "moe/run/context.h"

namespace moe {

struct Pass;

// The first gradient of a step's backward passes that is not finite on this rank. Backward
// continues after it: a loss scale may be its cause, and the norm over all ranks decides what
// becomes of the step. One per rank, of its session.
class FirstNonFinite {
 public:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

  // Orders the notes of several ranks: by round, then as backward comes down the layers.
  int64_t order() const { return order_; }           // kNone: there is none
  const std::string& text() const { return text_; }  // names rank, phase, layer, step and position
  void Note(int64_t order, std::string text) {
    if (order_ == kNone) *this = FirstNonFinite(order, std::move(text));
  }
  void Clear() { *this = FirstNonFinite(); }

  FirstNonFinite() = default;

 private:
  FirstNonFinite(int64_t order, std::string text) : order_(order), text_(std::move(text)) {}

  int64_t order_ = kNone;
  std::string text_;
};

// Replaces a value of `made`, which phase `phase` of the pass has made, if a fault of a test asks
// for it there (RankWatch::TakeValue). CPU alone.
template <typename T>
void ReplaceValue(const Pass& pass, const char* phase, MatrixView<T> made);

// Both begin with ReplaceValue and then read all of `made`, on the threads of the rank. On a CUDA
// device they do nothing.
//
// For forwards: kDataLoss, naming rank, phase, layer, step and position, for the first value that
// is not finite.
template <typename T>
absl::Status CheckFinite(const Pass& pass, const char* phase, MatrixView<T> made);
// For backwards: a note of the same in context.non_finite.
template <typename T>
void NoteNonFinite(const Pass& pass, const char* phase, MatrixView<T> made);

// `status`, with rank, phase, layer and step before a kDataLoss.
absl::Status AtPlace(const absl::Status& status, const Pass& pass, const char* phase);

}  // namespace moe

#endif  // MOE_MOE_RUN_FINITE_H_
