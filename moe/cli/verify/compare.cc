#include "moe/cli/verify/compare.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include <absl/functional/function_ref.h>
#include <absl/strings/str_cat.h>

namespace moe::verify {
namespace {

// Below this float32 has no normal numbers, and relative bounds do not hold.
constexpr double kLeastNormal = 0x1p-126;

// Floats in their order, as integers: -0 and 0 are one.
int64_t Ordinal(float v) {
  const auto bits = static_cast<int64_t>(std::bit_cast<uint32_t>(v));
  return bits < 0x80000000 ? bits : 0x80000000 - bits;
}

Place PlaceOf(const Problem& problem, const TensorSpec& spec, int64_t i) {
  switch (spec.kind) {
    case TensorKind::kTokens: {
      Place place = {.token = i / spec.cols, .column = i % spec.cols};
      const std::vector<int32_t>& experts = problem.token_experts[place.token];
      if (!experts.empty()) place.expert = experts.front();
      return place;
    }
    case TensorKind::kPerMicroBatch:
      return {.micro_batch = i};
    case TensorKind::kPerExpert:
      return {.expert = i};
    case TensorKind::kPerStep:
      return {.step = 1 + i};
    case TensorKind::kPerStepExpert:
      return {.step = 1 + i / spec.cols / spec.rows_of_step,
              .layer = i / spec.cols % spec.rows_of_step,
              .expert = i % spec.cols};
    case TensorKind::kParameter:
      break;
  }
  return {.expert = spec.expert, .row = i / spec.cols, .column = i % spec.cols};
}

// One element against one value and its bound.
void Count(float got, const Bounded& expected, absl::FunctionRef<Place()> place,
           TensorReport& report) {
  ++report.elements;
  const double error = std::fabs(static_cast<double>(got) - expected.value);
  const auto rounded = static_cast<float>(expected.value);
  const bool differs = std::bit_cast<uint32_t>(got) != std::bit_cast<uint32_t>(rounded);
  // Negated, so that a NaN is wrong.
  const bool wrong = report.measure == Measure::kBits ? differs : !(error <= expected.error);
  const bool first = wrong ? report.wrong == 0 : differs && report.differing == 0;
  if (first) {
    report.first = place();
    report.got = got;
    report.expected = expected.value;
    report.allowed = expected.error;
  }
  report.differing += differs ? 1 : 0;
  report.wrong += wrong ? 1 : 0;
  if (!differs) return;
  report.max_ulp = std::max(report.max_ulp, UlpDistance(got, rounded));
  const auto grow = [](double& most, double value) {
    if (!(value <= most)) most = value;  // a NaN stays
  };
  if (error != 0) grow(report.max_relative_error, error / std::fabs(expected.value));
  if (expected.error > 0) grow(report.max_of_bound, error / expected.error);
}

// expected(tensor, i) is an element's value and bound.
template <typename Expected>
std::vector<TensorReport> Compare(const Problem& problem, const RunResult& got, Measure measure,
                                  Expected expected) {
  std::vector<TensorReport> reports;
  for (size_t n = 0; n < problem.tensors.size(); ++n) {
    const TensorSpec& spec = problem.tensors[n];
    auto report = std::find_if(reports.begin(), reports.end(),
                               [&](const TensorReport& r) { return r.tensor == spec.family; });
    if (report == reports.end()) {
      reports.push_back({.tensor = spec.family, .measure = measure});
      report = reports.end() - 1;
    }
    for (int64_t i = 0; i < spec.size(); ++i) {
      const auto place = [&] {
        return PlaceOf(problem, spec, i);
      };
      Count(got.tensors[n][i], expected(n, i), place, *report);
    }
  }
  return reports;
}

}  // namespace

int64_t UlpDistance(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) {
    return std::isnan(a) && std::isnan(b) ? 0 : std::numeric_limits<int64_t>::max();
  }
  return std::abs(Ordinal(a) - Ordinal(b));
}

const char* NameOf(Measure measure) {
  constexpr const char* kNames[] = {"0 ulp", "2 x bound", "bound"};
  return kNames[static_cast<int>(measure)];
}

std::string Describe(const Place& place) {
  std::string text;
  const auto append = [&](const char* name, int64_t value) {
    if (value >= 0) absl::StrAppend(&text, text.empty() ? "" : " ", name, " ", value);
  };
  append("step", place.step);
  append("layer", place.layer);
  append("token", place.token);
  append("micro-batch", place.micro_batch);
  append("row", place.row);
  append("column", place.column);
  append("expert", place.expert);
  return text.empty() ? "-" : text;
}

std::vector<TensorReport> CompareWithReference(const Problem& problem, const RunResult& got) {
  return Compare(problem, got, Measure::kBound, [&](size_t tensor, int64_t i) {
    const Bounded& e = problem.reference[tensor][i];
    return Bounded(e.value, e.error == 0 ? 0 : e.error + kLeastNormal);
  });
}

std::vector<TensorReport> CompareResults(const Problem& problem, const RunResult& got,
                                         const RunResult& expected, Measure measure) {
  return Compare(problem, got, measure, [&](size_t tensor, int64_t i) {
    const double error = measure == Measure::kBits ? 0 : problem.reference[tensor][i].error;
    const double allowed = error == 0 ? 0 : 2 * error + kLeastNormal;
    return Bounded(static_cast<double>(expected.tensors[tensor][i]), allowed);
  });
}

}  // namespace moe::verify
