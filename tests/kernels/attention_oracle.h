// Causal attention and its gradients in float64, with bounds of roundings.
#ifndef MOE_TESTS_KERNELS_ATTENTION_ORACLE_H_
#define MOE_TESTS_KERNELS_ATTENTION_ORACLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/base/dtype.h"

namespace moe::testing {

// AttentionOracle allows 2 (D + n + 20) roundings of its bounds. On CUDA sums are also rescaled, by
// exp(scale * (max - new max)), once in 64 keys: one rounding for the product and four for an exp
// within 2 ulps. (Errors of the exponents are in the bounds: they are relative to scores, and the
// differences of a rising maximum add up to at most twice the largest score.)
inline double AttentionRoundings(int64_t depth, int64_t longest_sequence, bool is_cpu) {
  const int64_t rescales = is_cpu ? 0 : 5 * ((longest_sequence + 63) / 64);
  return 2 * static_cast<double>(depth + longest_sequence + 20 + rescales);
}
// The same for tensor cores: an addition counts two roundings, and a tile may have 32 keys.
inline double MmaAttentionRoundings(int64_t depth, int64_t longest_sequence) {
  return 2 * AttentionRoundings(depth, longest_sequence, false);
}

// The error of rounding a value to a storage type.
struct StorageRounding {
  double relative = 0, absolute = 0;  // absolute: near 0
  double Of(double x) const { return relative * std::abs(x) + absolute; }
};

template <typename T>
constexpr StorageRounding kStorageRounding = {};
template <>
constexpr StorageRounding kStorageRounding<BFloat16> = {.relative = 0x1p-8, .absolute = 0x1p-126};
template <>
constexpr StorageRounding kStorageRounding<Float16> = {.relative = 0x1p-11, .absolute = 0x1p-25};

// float64 attention in plain loops. It also computes a bound for every value x: the sum of the
// absolute values of the terms of x, where a probability counts 1 + |score| times. Every factor of
// a term is a chain of at most D or n additions and 20 more operations, so that float32 stays
// within 2 (D + n + 20) roundings of the bound.
//
// `stored`: the additional error of rounding to a storage type the operands of tensor-core products
// (probabilities, gradients of scores) and the results, including the output that backward reads.
struct AttentionOracle {
  struct Value {
    std::vector<double> value, bound, stored;
    explicit Value(size_t n) : value(n, 0.0), bound(n, 0.0), stored(n, 0.0) {}
    void Add(size_t i, double term, double magnitude, double rounding) {
      value[i] += term;
      bound[i] += magnitude;
      stored[i] += rounding;
    }
  };
  Value out, log_sum_exp, d_q, d_k, d_v;

  // Heads of k and v with their sizes.
  AttentionOracle(int heads, const std::vector<int64_t>& offsets, const std::vector<double>& q,
                  const std::vector<double>& k, const std::vector<double>& v,
                  const std::vector<double>& d_out, StorageRounding rounding = {})
      : out(q.size()),
        log_sum_exp(size_t(offsets.back() * heads)),
        d_q(q.size()),
        d_k(k.size()),
        d_v(k.size()),
        rounding_(rounding) {
    const int64_t cols = offsets.back() == 0 ? 0 : int64_t(q.size()) / offsets.back();
    for (size_t s = 1; s < offsets.size(); ++s) {
      for (int64_t i = offsets[s - 1]; i < offsets[s]; ++i) {
        for (int a = 0; a < heads; ++a) {
          Query(offsets[s - 1], i, a, heads, cols, q, k, v, d_out);
        }
      }
    }
    for (Value* const x : {&d_q, &d_k, &d_v}) {
      for (size_t i = 0; i < x->value.size(); ++i) x->stored[i] += rounding.Of(x->value[i]);
    }
  }

 private:
  void Query(int64_t begin, int64_t i, int head, int heads, int64_t cols,
             const std::vector<double>& q, const std::vector<double>& k,
             const std::vector<double>& v, const std::vector<double>& d_out) {
    const int64_t depth = cols / heads;
    const double scale = 1 / std::sqrt(static_cast<double>(depth));
    const auto at = [&](int64_t row, int64_t d) {
      return size_t(row * cols + head * depth + d);
    };
    const auto group = int64_t(q.size() / k.size());
    const auto at_key = [&](int64_t row, int64_t d) {
      return size_t(row * cols / group + head / group * depth + d);
    };
    std::vector<double> score, magnitude;
    double sum = 0, largest = 0;
    for (int64_t j = begin; j <= i; ++j) {
      score.push_back(0);
      magnitude.push_back(0);
      for (int64_t d = 0; d < depth; ++d) {
        score.back() += scale * q[at(i, d)] * k[at_key(j, d)];
        magnitude.back() += scale * std::abs(q[at(i, d)] * k[at_key(j, d)]);
      }
      sum += std::exp(score.back());
      largest = std::max(largest, magnitude.back());
    }
    log_sum_exp.Add(size_t(i * heads + head), std::log(sum), 1 + largest, 0);
    std::vector<double> p;
    for (int64_t j = begin; j <= i; ++j) {
      p.push_back(std::exp(score[j - begin]) / sum);
      for (int64_t d = 0; d < depth; ++d) {
        const double term = p.back() * v[at_key(j, d)];
        out.Add(at(i, d), term, (1 + largest) * std::abs(term),
                rounding_.Of(p.back()) * std::abs(v[at_key(j, d)]));
      }
    }
    double dot = 0, dot_bound = 0, dot_stored = 0;
    for (int64_t d = 0; d < depth; ++d) {
      out.stored[at(i, d)] += rounding_.Of(out.value[at(i, d)]);
      dot += d_out[at(i, d)] * out.value[at(i, d)];
      dot_bound += std::abs(d_out[at(i, d)]) * out.bound[at(i, d)];
      dot_stored += std::abs(d_out[at(i, d)]) * out.stored[at(i, d)];
    }
    for (int64_t j = begin; j <= i; ++j) {
      double product = 0, product_bound = 0;
      for (int64_t d = 0; d < depth; ++d) {
        product += d_out[at(i, d)] * v[at_key(j, d)];
        product_bound += std::abs(d_out[at(i, d)] * v[at_key(j, d)]);
      }
      const double weight = p[j - begin];
      const double slope = scale * weight * (product - dot);
      const double slope_bound = scale * weight * (1 + largest) * (product_bound + dot_bound);
      const double slope_stored =
          scale * (weight * dot_stored + rounding_.Of(weight * (product - dot)));
      for (int64_t d = 0; d < depth; ++d) {
        const double key = k[at_key(j, d)], query = q[at(i, d)], by_out = d_out[at(i, d)];
        d_q.Add(at(i, d), slope * key, slope_bound * std::abs(key), slope_stored * std::abs(key));
        d_k.Add(at_key(j, d), slope * query, slope_bound * std::abs(query),
                slope_stored * std::abs(query));
        d_v.Add(at_key(j, d), weight * by_out, weight * (1 + largest) * std::abs(by_out),
                rounding_.Of(weight) * std::abs(by_out));
      }
    }
  }

  const StorageRounding rounding_;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_ATTENTION_ORACLE_H_
