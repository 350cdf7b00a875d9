// Shared by the peers of grouped products: operands, timing, check, and a line of JSON for each
// line "PRODUCT TYPE ROWS IN OUT EXPERTS CALLS" of the input, PRODUCT forward, input_gradient or
// weight_gradient, TYPE f32 or bf16. As in kernel_bench --cpu-clock, times are by the CPU clock of
// the process, and weights are read from memory.
#ifndef MOE_BENCHMARKS_PEERS_CPU_GEMM_PEER_H_
#define MOE_BENCHMARKS_PEERS_CPU_GEMM_PEER_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <exception>
#include <functional>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace moe::peers {

inline uint16_t ToBFloat16(float value) {  // to nearest, ties to even; never called for NaN
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float FromBFloat16(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// c = a b for each expert, [m, k] and [k, n]; in memory an operand may be transposed.
struct Problem {
  int64_t m = 0, n = 0, k = 0, experts = 0;
  bool a_transposed = false, b_transposed = false;
  bool b_is_weight = true;  // may be packed before the measurement
  bool bf16 = false;
  bool c_is_f32 = true;
  std::vector<float> a, b, c;           // f32; values of a and b for the check in both types
  std::vector<uint16_t> a16, b16, c16;  // bf16

  Problem(const std::string& product, bool is_bf16, int64_t rows, int64_t in, int64_t out,
          int64_t expert_count)
      : experts(expert_count), bf16(is_bf16) {
    if (product == "forward") {
      m = rows, n = out, k = in, b_transposed = true;  // y = x W^T
    } else if (product == "input_gradient") {
      m = rows, n = in, k = out;  // dx = dy W
    } else {
      m = out, n = in, k = rows, a_transposed = true, b_is_weight = false;  // dW = dy^T x
    }
    c_is_f32 = !bf16 || !b_is_weight;
    std::minstd_rand engine(7);
    Fill(a, a16, m * k, engine);
    Fill(b, b16, k * n, engine);
    const auto results = static_cast<size_t>(experts * m * n);
    if (c_is_f32) c.assign(results, NAN);
    if (!c_is_f32) c16.assign(results, ToBFloat16(1e30f));
  }

  // The largest error of sampled elements, in units of what the type allows: a rounding for each of
  // the k terms, and one of the result.
  double Error() const {
    constexpr int64_t kSamples = 97;
    double worst = 0;
    for (int64_t s = 0; s < kSamples; ++s) {
      const int64_t e = s % experts, i = m * s / kSamples, j = n * (s * 31 % kSamples) / kSamples;
      double sum = 0, size = 0;
      for (int64_t p = 0; p < k; ++p) {
        const double term =
            static_cast<double>(a[e * m * k + (a_transposed ? p * m + i : i * k + p)]) *
            b[e * k * n + (b_transposed ? j * k + p : p * n + j)];
        sum += term;
        size += std::abs(term);
      }
      const int64_t at = (e * m + i) * n + j;
      const double got = c_is_f32 ? c[at] : FromBFloat16(c16[at]);
      const double allowed =
          static_cast<double>(k) * 0x1p-24 * size + (c_is_f32 ? 0 : 0x1p-8 * std::abs(sum));
      const double error = std::abs(got - sum) / allowed;
      worst = error <= worst ? worst : error;  // NaN is worse than any number
    }
    return worst;
  }

 private:
  void Fill(std::vector<float>& values, std::vector<uint16_t>& values16, int64_t size,
            std::minstd_rand& engine) const {
    std::uniform_real_distribution<float> uniform(-1, 1);
    values.resize(static_cast<size_t>(experts * size));
    for (float& value : values) {
      value = uniform(engine);
      if (!bf16) continue;
      values16.push_back(ToBFloat16(value));
      value = FromBFloat16(values16.back());
    }
  }
};

inline double CpuSeconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Median microseconds of `calls` calls; before each, memory as large as the weights is read.
inline double MedianMicroseconds(const std::function<void()>& run, size_t weights, int calls) {
  std::vector<float> other(weights, 1.0f);
  std::vector<double> times;
  volatile float sink = 0;
  for (int call = -1; call < calls; ++call) {
    float largest = 0;
    for (const float value : other) largest = std::max(largest, value);
    sink = largest;
    const double begin = CpuSeconds();
    run();
    if (call >= 0) times.push_back(1e6 * (CpuSeconds() - begin));
  }
  static_cast<void>(sink);
  std::nth_element(times.begin(), times.begin() + calls / 2, times.end());
  return times[static_cast<size_t>(calls / 2)];
}

// A peer returns a function that multiplies all experts of a problem once; an empty function if it
// has no such product.
using Peer = std::function<std::function<void()>(Problem&)>;

inline std::string Answer(const std::string& line, const Peer& peer) {
  std::istringstream words(line);
  std::string product, type;
  int64_t rows = 0, in = 0, out = 0, experts = 0;
  int calls = 0;
  if (!(words >> product >> type >> rows >> in >> out >> experts >> calls) || calls < 1) {
    return R"("error":"expected PRODUCT TYPE ROWS IN OUT EXPERTS CALLS")";
  }
  Problem problem(product, type == "bf16", rows, in, out, experts);
  const std::function<void()> run = peer(problem);
  if (!run) return R"("time_us":null)";
  const auto weights = static_cast<size_t>(experts * in * out) / (problem.bf16 ? 2 : 1);
  const double microseconds = MedianMicroseconds(run, weights, calls);
  const double error = problem.Error();
  if (!(error <= 1)) {
    return R"("error":"wrong, by )" + std::to_string(error) + R"( of what rounding allows")";
  }
  return R"("time_us":)" + std::to_string(microseconds);
}

inline int Serve(const Peer& peer) {
  for (std::string line; std::getline(std::cin, line);) {
    std::string answer;
    try {
      answer = Answer(line, peer);
    } catch (const std::exception& problem) {
      answer = std::string(R"("error":")") + problem.what() + '"';
    }
    std::printf("{%s}\n", answer.c_str());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace moe::peers

#endif  // MOE_BENCHMARKS_PEERS_CPU_GEMM_PEER_H_
