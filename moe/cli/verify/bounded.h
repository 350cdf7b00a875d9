// Numbers of the reference: float64 values that carry a bound on what float32 arithmetic may make
// of them.
#ifndef MOE_MOE_CLI_VERIFY_BOUNDED_H_
#define MOE_MOE_CLI_VERIFY_BOUNDED_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace moe::verify {

// Unit roundoff of float32: a rounded result differs from the exact one by at most kUnit |result|.
inline constexpr double kUnit = 0x1p-24;
// exp, log, sigmoid and erf of the product are within a few ulp; eight units allow for it.
inline constexpr double kFunctionUnits = 8;

// A bound for programs that compute the same formula in float32, in any order of its sums: their
// result is within `error` of `value` (the reference's own float64 rounding is 2^29 times smaller).
// This is running error analysis (Higham, "Accuracy and Stability of Numerical Algorithms", section
// 3.3): every operation multiplies its operands' errors by its derivative, and adds kUnit |result|.
struct Bounded {
  double value = 0;
  double error = 0;

  Bounded() = default;
  // An input, exact in the product's storage type.
  Bounded(double exact) : value(exact) {}  // NOLINT(google-explicit-constructor): numbers mix
  Bounded(double v, double e) : value(v), error(e) {}

  double most() const { return std::fabs(value) + error; }
};

// `v`, known within e, after a float32 operation of `units` unit roundoffs.
inline Bounded Rounded(double v, double e, double units = 1) {
  return {v, e + units * kUnit * (std::fabs(v) + e)};
}

inline Bounded operator-(const Bounded& a) {
  return {-a.value, a.error};
}
inline Bounded operator+(const Bounded& a, const Bounded& b) {
  return Rounded(a.value + b.value, a.error + b.error);
}
inline Bounded operator-(const Bounded& a, const Bounded& b) {
  return Rounded(a.value - b.value, a.error + b.error);
}
inline Bounded operator*(const Bounded& a, const Bounded& b) {
  return Rounded(a.value * b.value,
                 std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + a.error * b.error);
}
inline Bounded operator/(const Bounded& a, const Bounded& b) {
  const double quotient = a.value / b.value;
  const double least = std::fabs(b.value) - b.error;
  if (!(least > 0)) return {quotient, std::numeric_limits<double>::infinity()};
  return Rounded(quotient, (a.error + std::fabs(quotient) * b.error) / least);
}

inline Bounded Exp(const Bounded& a) {
  const double v = std::exp(a.value);
  return Rounded(v, v * std::expm1(a.error), kFunctionUnits);
}
inline Bounded Log(const Bounded& a) {
  const double relative = a.error / std::fabs(a.value);
  if (!(relative < 1)) return {std::log(a.value), std::numeric_limits<double>::infinity()};
  return Rounded(std::log(a.value), -std::log1p(-relative), kFunctionUnits);
}
// The derivative s (1 - s) grows by at most e^d within d of a point.
inline Bounded Sigmoid(const Bounded& a) {
  const double s = 1 / (1 + std::exp(-a.value));
  return Rounded(s, s * (1 - s) * std::expm1(a.error), kFunctionUnits);
}
inline Bounded Softplus(const Bounded& a) {  // derivative at most 1
  return Rounded(std::max(a.value, 0.0) + std::log1p(std::exp(-std::fabs(a.value))), a.error,
                 kFunctionUnits);
}
inline Bounded NormalDensity(const Bounded& a) {  // derivative at most 1 / sqrt(2 pi e)
  const double v = std::exp(-0.5 * a.value * a.value) / std::sqrt(2 * M_PI);
  return Rounded(v, 0.25 * a.error, kFunctionUnits);
}
inline Bounded NormalCdf(const Bounded& a) {  // derivative at most 1 / sqrt(2 pi)
  return Rounded(0.5 * std::erfc(-a.value / std::sqrt(2.0)), 0.4 * a.error, kFunctionUnits);
}
inline Bounded Clamp(const Bounded& a, double least, double most) {
  return {std::clamp(a.value, least, most), a.error};
}
// 1 where least <= a <= most, else 0. Where rounding decides, either is right: the error is 1.
inline Bounded Inside(const Bounded& a, double least, double most) {
  const bool inside = a.value >= least && a.value <= most;
  const bool close = std::fabs(a.value - least) <= a.error || std::fabs(a.value - most) <= a.error;
  return {inside ? 1.0 : 0.0, close && a.error > 0 ? 1.0 : 0.0};
}

// The type that values are stored in: `bits` of significand, and numbers 2^least_log2 apart where
// that is more than their significand would say.
struct Storage {
  int bits = 24;
  int least_log2 = -149;

  double unit() const { return std::ldexp(1.0, -bits); }  // roundoff of normal numbers
  double underflow() const { return std::ldexp(1.0, least_log2 - 1); }  // and of those below them
};

// A sum whose order is the program's own choice. For n terms t_i, each addition rounds a partial
// sum that is at most sum |t_i|, in any order and with any grouping:
//   error <= sum error(t_i) + n kUnit sum (|t_i| + error(t_i))
class Sum {
 public:
  void Add(const Bounded& term) {
    value_ += term.value;
    error_ += term.error;
    magnitude_ += term.most();
    ++terms_;
  }
  // The same for a sum that is also stored some `stores` times on the way.
  Bounded Total(const Storage& storage = {}, int stores = 0) const {
    const double roundings = static_cast<double>(terms_) * kUnit + stores * storage.unit();
    return {value_, error_ + roundings * magnitude_ + stores * storage.underflow()};
  }

 private:
  double value_ = 0;
  double error_ = 0;
  double magnitude_ = 0;
  int64_t terms_ = 0;
};

inline Bounded Stored(const Bounded& a, const Storage& storage) {
  return {a.value, a.error + storage.unit() * a.most() + storage.underflow()};
}

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_BOUNDED_H_
