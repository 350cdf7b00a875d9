// Repeated measurements of one quantity, and differences beyond their noise.
#ifndef MOE_MOE_REPORT_SAMPLE_H_
#define MOE_MOE_REPORT_SAMPLE_H_

#include <absl/types/span.h>

#include "moe/report/rows.h"

namespace moe::report {

struct Sample {
  double mean = kNone;
  double error = kNone;    // standard error of the mean; kNone: unknown
  double degrees = kNone;  // of freedom, of `error`
};

// n > 1 independent values: error = s / sqrt(n), s over n - 1. One value: its error is unknown.
Sample SampleOf(absl::Span<const double> values);

// One mean of calls that vary by `cv_pct` percent of it. Calls of one run share that run's
// conditions, so that many of them say little about the next run: the spread of a single call
// stands for the error of the mean, not that over sqrt(calls).
Sample SampleOf(double mean, double cv_pct);

// Of a series in time whose neighbours resemble each other: the error of the mean from the means of
// ten stretches (batch means). Fewer than 20 values: unknown.
Sample SampleOfSeries(absl::Span<const double> values);

// Half the width of the interval that holds b - a with probability 0.95 (Welch 1947), kNone where
// an error is unknown.
double NoiseOfDifference(const Sample& a, const Sample& b);

// The 0.975 quantile of Student's t with `degrees` of freedom, at least 1; within 1 % of the exact.
double StudentT975(double degrees);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_SAMPLE_H_
