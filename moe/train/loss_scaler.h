// The factor that keeps float16 gradients off the type's lower end.
#ifndef MOE_MOE_TRAIN_LOSS_SCALER_H_
#define MOE_MOE_TRAIN_LOSS_SCALER_H_

#include <cstdint>

#include <absl/status/status.h>

namespace moe {

struct LossScaleOptions {
  double constant = 0;  // 0: dynamic, by the fields below
  double initial = 65536;
  double minimum = 1;
  int64_t window = 1000;  // steps taken in a row before the scale doubles
  int hysteresis = 2;     // overflows that it takes to halve the scale, since it last doubled
};

// kInvalidArgument, naming the flag: scales are powers of two from 2^-24 to 2^32 (so that scaling
// rounds nothing), minimum <= initial, window and hysteresis at least 1.
absl::Status ValidateLossScale(const LossScaleOptions& options);

// The scale of the steps of one run. Every rank keeps its own and reports the same events to it, so
// that all hold the same scale without an exchange. Source: Micikevicius et al., "Mixed precision
// training" (2018), arXiv:1710.03740; hysteresis as in Megatron's DynamicGradScaler.
class LossScaler {
 public:
  // options: valid.
  explicit LossScaler(const LossScaleOptions& options);

  // Multiplies the loss of the next step; divides its gradients.
  double scale() const { return scale_; }
  int scale_log2() const;
  int64_t skipped() const { return skipped_; }

  // What a run resumes with; the options are the run's own.
  struct State {
    int scale_log2 = 0;
    int64_t taken_in_a_row = 0;
    int overflows_left = 0;
    int64_t skipped = 0;
  };
  State state() const { return {scale_log2(), taken_in_a_row_, overflows_left_, skipped_}; }
  void Restore(const State& state);

  // The gradients of the step were finite and the weights have moved.
  void StepTaken();
  // They were not, and the weights have stayed. kDataLoss where the dynamic scale was at its
  // minimum and can mend nothing any more.
  absl::Status StepSkipped();

 private:
  const LossScaleOptions options_;
  double scale_;
  int64_t taken_in_a_row_ = 0;
  int overflows_left_;  // before the scale is halved
  int64_t skipped_ = 0;
};

}  // namespace moe

#endif  // MOE_MOE_TRAIN_LOSS_SCALER_H_
