// gemm_bench: grouped products on the CPU against the peak of the cores they run on: of float32
// multiply-adds, or for bf16 of the dot products or multiply-adds that it is computed by.
//   gemm_bench --rows 8,32,128,512 --in 1024 --out 2816 --experts 4 --threads 1
// Every round measures the peak (a loop in registers) right before each case, so
// that both see the same clock and the same neighbours. peak% is the median over rounds of the
// ratio, with its 10th and 90th percentile. read% is the limit of few rows: bytes of weights, read
// (or, of their gradient, written) once, in the time of the product, against a loop that reads as
// many from front to back, right after the peak. wrong = sampled elements whose bits differ from a
// chain of std::fma. "packed forward" finds the weights packed; "pack" is what packing them costs.
// With --leaves above 1 forward products and input gradients are trees, and chain% is the speed of
// a tree beside one chain.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_split.h>
#include <absl/types/span.h>
#include <time.h>

#include <boost/program_options.hpp>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/fma_peak.h"
#include "kernels/grouped_gemm/gemm_problem.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/packed_weights.h"
#include "kernels/grouped_gemm/simd_targets.h"
#include "kernels/grouped_gemm/weight_gradient.h"

namespace moe::bench {

// The operands and outputs of every grouped product that is measured, and their check: `row_count`
// rows for each of the experts.
template <typename T>
struct GemmData {
  GemmData(int64_t row_count, int64_t in_features, int64_t out_features, int64_t expert_count)
      : rows(row_count), in(in_features), out(out_features), experts(expert_count) {
    std::minstd_rand engine(7);
    std::uniform_real_distribution<float> uniform(-1, 1);
    const auto fill = [&](absl::Span<T>& v, int64_t size) {
      v = Take<T>(size);
      for (T& e : v) e = T(uniform(engine));
    };
    fill(x, rows * experts * in);
    fill(dy, rows * experts * out);
    fill(w, experts * out * in);
    y = Take<T>(std::ssize(dy));
    packed_y = Take<T>(std::ssize(dy));
    dx = Take<T>(std::ssize(x));
    dw = Take<float>(std::ssize(w));
    for (int64_t e = 0; e <= experts; ++e) offsets.push_back(e * rows);
    for (int64_t e = 0; e < experts; ++e) weight.emplace_back(w.data() + e * out * in, out, in);
    read.resize(w.size() * sizeof(T) / sizeof(float), 1.0f);
  }

  absl::Status Pack(Workspace&, Stream& stream) {
    for (const MatrixView<const T>& one : weight) {
      const auto i = static_cast<size_t>(&one - weight.data());
      if (packed.size() <= i) {
        MOE_ASSIGN_OR_RETURN(auto made, PackedWeights<T>::Create(out, in));
        packed.push_back(std::move(made));
      }
      MOE_RETURN_IF_ERROR(packed[i].Pack(one, 0, stream));
    }
    return absl::OkStatus();
  }
  absl::Status PackedForward(Workspace& workspace, Stream& stream) {
    return GroupedGemm<T>({x.data(), rows * experts, in}, offsets, packed, 0,
                          {packed_y.data(), rows * experts, out}, workspace, stream, InTree());
  }

  absl::Status Forward(Workspace& workspace, Stream& stream) {
    return GroupedGemm<T>({x.data(), rows * experts, in}, offsets, weight,
                          {y.data(), rows * experts, out}, workspace, stream, {}, InTree());
  }
  absl::Status InputGradient(Workspace& workspace, Stream& stream) {
    return GroupedGemmInputGradient<T>({dy.data(), rows * experts, out}, offsets, weight,
                                       {dx.data(), rows * experts, in}, workspace, stream, {},
                                       OutTree());
  }
  absl::Status WeightGradient(Workspace& workspace, Stream& stream) {
    const auto empty = std::make_unique<bool[]>(experts);  // what is there is overwritten
    std::fill_n(empty.get(), experts, true);
    std::vector<GradAccumulator> grads;
    for (int64_t e = 0; e < experts; ++e) {
      grads.emplace_back(dw.subspan(e * out * in, out * in), &empty[e]);
    }
    return AddWeightGradients<T>({dy.data(), rows * experts, out}, {x.data(), rows * experts, in},
                                 offsets, grads, workspace, stream);
  }

  // Elements of the four outputs, spread evenly, that do not have the bits of the specification.
  int64_t Wrong() const {
    constexpr int64_t kSamples = 97;
    int64_t wrong = 0;
    for (int64_t s = 0; s < kSamples; ++s) {
      const int64_t n = rows * experts * s / kSamples, e = n / rows;
      const int64_t o = out * (s * 31 % kSamples) / kSamples;
      const int64_t k = in * (s * 57 % kSamples) / kSamples;
      using gemm::Layout;
      const T* const we = w.data() + e * out * in;
      const float want_y = Element({x.data() + n * in, 1, in}, {we + o * in, 1, in}, Layout::kPlain,
                                   Layout::kTransposed, InTree());
      const float want_dx = Element({dy.data() + n * out, 1, out}, {we + k, out, 1, in},
                                    Layout::kPlain, Layout::kPlain, OutTree());
      const float want_dw =
          Element({dy.data() + e * rows * out + o, rows, 1, out},
                  {x.data() + e * rows * in + k, rows, 1, in}, Layout::kTransposed, Layout::kPlain);
      wrong += !(T(want_y) == y[n * out + o]) + !(T(want_y) == packed_y[n * out + o]) +
               !(T(want_dx) == dx[n * in + k]) + (want_dw != dw[(e * out + o) * in + k]);
    }
    return wrong;
  }
  // The one element of a product, by the specification.
  static float Element(MatrixView<const T> a, MatrixView<const T> b, gemm::Layout a_layout,
                       gemm::Layout b_layout, GemmTree tree = {}) {
    float element = 0;
    gemm::Reference(gemm::Problem<T, float>{.a = a,
                                            .b = b,
                                            .c = {&element, 1, 1},
                                            .a_layout = a_layout,
                                            .b_layout = b_layout,
                                            .tree = tree});
    return element;
  }

  // As a down projection has its inputs, and a fused gate and up projection its outputs.
  GemmTree InTree() const { return {{leaves, in, 16}}; }
  GemmTree OutTree() const { return {{leaves, out / 2, 16}, 2}; }

  // Memory as tensors have it.
  template <typename U>
  absl::Span<U> Take(int64_t size) {
    memory.push_back(Buffer::Allocate(size * int64_t{sizeof(U)}).value());
    return memory.back().template span<U>();
  }

  int64_t rows, in, out, experts;
  int leaves = 1;
  std::vector<Buffer> memory;
  absl::Span<T> x, dy, w, y, packed_y, dx;
  absl::Span<float> dw;
  std::vector<int64_t> offsets;
  std::vector<MatrixView<const T>> weight;
  std::vector<PackedWeights<T>> packed;
  std::vector<float> read;  // as many bytes as the weights
};
namespace {

struct Options {
  std::string rows = "8,32,128,512";
  int64_t in = 1024;   // K
  int64_t out = 2816;  // O
  int64_t experts = 4;
  int threads = 1;
  int leaves = 1;
  int rounds = 11;
  bool cpu_clock = false;
  std::string type = "both";
  bool json = false;
};

// Wall clock, or with `cpu` the CPU time of this process: the same for one thread that owns its
// core, and blind to the time that other programs take from it.
double Now(bool cpu) {
  timespec t{};
  clock_gettime(cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double Seconds(bool cpu, const std::function<void()>& work) {
  const double start = Now(cpu);
  work();
  return Now(cpu) - start;
}

using RunPeak = double (*)(int64_t steps);

// GFLOP/s of all threads together.
double Peak(bool cpu, ThreadPool& pool, RunPeak run) {
  constexpr int64_t kSteps = 400'000;
  std::vector<double> operations(static_cast<size_t>(pool.threads()));
  const double seconds = Seconds(cpu, [&] {
    pool.For(pool.threads(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) operations[static_cast<size_t>(i)] = run(kSteps);
    });
  });
  double total = 0;
  for (const double n : operations) total += n;
  return total / seconds / 1e9;
}

// GB/s at which all threads together read `data`.
double ReadSpeed(bool cpu, ThreadPool& pool, absl::Span<const float> data) {
  const auto n = static_cast<int64_t>(data.size());
  const int64_t part = (n + pool.threads() - 1) / pool.threads();
  std::vector<float> largest(static_cast<size_t>(pool.threads()));  // or nothing need be read
  const double seconds = Seconds(cpu, [&] {
    pool.For(n, part, [&](int64_t begin, int64_t end) {
      largest[static_cast<size_t>(begin / part)] =
          gemm::ReadFloats(data.data() + begin, end - begin);
    });
  });
  const double read = *std::max_element(largest.begin(), largest.end()) >= 0 ? 4e-9 : 0;
  return read * static_cast<double>(n) / seconds;
}

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::lround(q * static_cast<double>(values.size() - 1)))];
}

struct Case {
  const char* product;
  std::function<absl::Status()> run;
  double weight_bytes = 0;
  double operations = 0;  // 0: a copy, which has no share of the peak
  std::vector<double> seconds, gflops, ratio, read, of_chain;
};

// Measures the products on `rows` rows per expert. False if an element is wrong.
template <typename T>
absl::StatusOr<bool> Measure(const char* type, int64_t rows, const Options& options,
                             ThreadPool& pool) {
  GemmData<T> data(rows, options.in, options.out, options.experts);
  Workspace workspace;
  const auto stream = MakeInlineStream(&pool);
  const double operations = 2.0 * static_cast<double>(rows * options.experts) *
                            static_cast<double>(options.in) * static_cast<double>(options.out);
  const auto made = [&](const char* product, auto function, size_t element) {
    return Case{
        product,
        [&workspace, &stream, &data, function] { return (data.*function)(workspace, *stream); },
        static_cast<double>(data.w.size() * element), operations};
  };
  Case cases[] = {made("pack", &GemmData<T>::Pack, 2 * sizeof(T)),
                  made("forward", &GemmData<T>::Forward, sizeof(T)),
                  made("packed forward", &GemmData<T>::PackedForward, sizeof(T)),
                  made("input gradient", &GemmData<T>::InputGradient, sizeof(T)),
                  made("weight gradient", &GemmData<T>::WeightGradient, sizeof(float))};
  cases[0].operations = 0;
  for (int round = -1; round < options.rounds; ++round) {
    for (Case& c : cases) {
      const double peak = Peak(options.cpu_clock, pool,
                               std::is_same_v<T, float> ? gemm::RunFma : gemm::RunBFloat16Peak);
      const double read = ReadSpeed(options.cpu_clock, pool, data.read);
      absl::Status status;
      double seconds = 0, chain = 0;
      const bool tree_first = (options.rounds - round) % 2 == 0;  // by turns; not in the last round
      for (const bool tree : {tree_first, !tree_first}) {
        data.leaves = tree ? options.leaves : 1;
        (tree ? seconds : chain) = Seconds(options.cpu_clock, [&] { status = c.run(); });
        MOE_RETURN_IF_ERROR(status);
      }
      if (round < 0) continue;  // warm-up: the workspace grows, pages are touched
      c.seconds.push_back(seconds);
      c.of_chain.push_back(100 * chain / seconds);
      c.gflops.push_back(c.operations / seconds / 1e9);
      c.ratio.push_back(100 * c.gflops.back() / peak);
      c.read.push_back(100 * c.weight_bytes / seconds / 1e9 / read);
    }
  }
  const int64_t wrong = data.Wrong();
  for (const Case& c : cases) {
    if (options.json) {
      std::printf(
          "{\"type\":\"%s\",\"product\":\"%s\",\"rows\":%lld,\"time_us\":%.3f,\"peak_pct\":%.2f,"
          "\"read_pct\":%.2f,\"chain_pct\":%.2f,\"nwrong\":%lld}\n",
          type, c.product, static_cast<long long>(rows), 1e6 * Quantile(c.seconds, 0.5),
          Quantile(c.ratio, 0.5), Quantile(c.read, 0.5), Quantile(c.of_chain, 0.5),
          static_cast<long long>(wrong));
      continue;
    }
    std::printf("%-5s %-16s %6lld %9.1f %7.1f %6.1f %6.1f %7.1f %7.1f %6lld\n", type, c.product,
                static_cast<long long>(rows), Quantile(c.gflops, 0.5), Quantile(c.ratio, 0.5),
                Quantile(c.ratio, 0.1), Quantile(c.ratio, 0.9), Quantile(c.read, 0.5),
                Quantile(c.of_chain, 0.5), static_cast<long long>(wrong));
  }
  std::fflush(stdout);
  return wrong == 0;
}

void PrintHead(const Options& options, double peak, double bf16_peak) {
  std::printf("K %lld, O %lld, %lld experts, %d threads; peak now %.1f GFLOP/s, of bf16 %.1f\n",
              static_cast<long long>(options.in), static_cast<long long>(options.out),
              static_cast<long long>(options.experts), options.threads, peak, bf16_peak);
  std::printf("%-5s %-16s %6s %9s %7s %6s %6s %7s %7s %6s\n", "type", "product", "rows", "GFLOP/s",
              "peak%", "p10", "p90", "read%", "chain%", "wrong");
}

absl::StatusOr<bool> Run(const Options& options) {
  ThreadPool pool(options.threads);
  if (!options.json) {
    PrintHead(options, Peak(options.cpu_clock, pool, gemm::RunFma),
              Peak(options.cpu_clock, pool, gemm::RunBFloat16Peak));
  }
  bool right = true;
  for (const absl::string_view text : absl::StrSplit(options.rows, ',')) {
    int64_t rows = 0;
    if (!absl::SimpleAtoi(text, &rows) || rows < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rows: '", text, "', expected positive numbers separated by commas"));
    }
    bool f32 = true, bf16 = true;
    if (options.type != "bf16") {
      MOE_ASSIGN_OR_RETURN(f32, Measure<float>("f32", rows, options, pool));
    }
    if (options.type != "f32") {
      MOE_ASSIGN_OR_RETURN(bf16, Measure<BFloat16>("bf16", rows, options, pool));
    }
    right = right && f32 && bf16;
  }
  return right;
}

}  // namespace
}  // namespace moe::bench

int main(int argc, char** argv) {
  namespace po = boost::program_options;
  moe::bench::Options options;
  po::options_description flags("gemm_bench");
  const auto value = [](auto& field) {
    return po::value(&field)->default_value(field);
  };
  flags.add_options()("help", "print this")                                        //
      ("rows", value(options.rows), "rows per expert, separated by commas")        //
      ("in", value(options.in), "columns of x (K)")                                //
      ("out", value(options.out), "columns of y (O)")                              //
      ("experts", value(options.experts), "experts, all of the same size")         //
      ("threads", value(options.threads), "threads of the products and the peak")  //
      ("leaves", value(options.leaves), "of trees: 1, 2, 4, 8 or 16")              //
      ("type", value(options.type), "f32, bf16 or both")                           //
      ("json", po::bool_switch(&options.json), "a JSON object per row")            //
      ("rounds", value(options.rounds), "timed rounds")                            //
      ("cpu-clock", po::bool_switch(&options.cpu_clock),
       "time by the CPU clock of the process: for one thread on a shared machine");
  try {
    po::variables_map vm;
    po::store(po::parse_command_line(argc, argv, flags), vm);
    po::notify(vm);
    if (vm.count("help")) {
      std::ostringstream text;
      text << flags;
      std::fputs(text.str().c_str(), stdout);
      return 0;
    }
  } catch (const po::error& e) {  // Boost throws; our code does not. Stop it here.
    std::fprintf(stderr, "gemm_bench: %s\n", e.what());
    return 2;
  }
  if (options.in < 1 || options.out < 1 || options.experts < 1 || options.threads < 1 ||
      options.rounds < 1) {
    std::fprintf(stderr, "gemm_bench: sizes, threads and rounds are expected to be positive\n");
    return 2;
  }
  if (options.type != "f32" && options.type != "bf16" && options.type != "both") {
    std::fprintf(stderr, "gemm_bench: --type is expected to be f32, bf16 or both\n");
    return 2;
  }
  if (!moe::IsTreeLeaves(options.leaves)) {
    std::fprintf(stderr, "gemm_bench: --leaves is expected to be 1, 2, 4, 8 or 16\n");
    return 2;
  }
  if (options.cpu_clock && options.threads > 1) {
    std::fprintf(stderr, "gemm_bench: --cpu-clock is expected with one thread\n");
    return 2;
  }
  if (const absl::Status status = moe::gemm::UseSimdTargetOfEnvironment(); !status.ok()) {
    std::fprintf(stderr, "gemm_bench: %s\n", status.ToString().c_str());
    return 2;
  }
  const absl::StatusOr<bool> right = moe::bench::Run(options);
  if (!right.ok()) {
    std::fprintf(stderr, "gemm_bench: %s\n", right.status().ToString().c_str());
    return 1;
  }
  return *right ? 0 : 1;
}
