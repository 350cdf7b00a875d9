// Runs CUDA kernels on the CPU, to find out whether they are correct. Host side: what a test calls.
//
// A kernel's source is compiled by the host compiler against device.h, which gives CUDA's names
// their meaning here. Each CUDA thread is a fiber. The scheduler picks the next one at random, by
// a seed, and lets it run until it synchronises, yields or ends; so one seed is one schedule, and
// several seeds are several. See docs/cuda.md for what this finds and what it cannot find.
#ifndef MOE_TESTS_CUSIM_CUSIM_H_
#define MOE_TESTS_CUSIM_CUSIM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include <cuda_runtime_api.h>

namespace cusim {

// A setting of the simulation as long as an object lives: Set(setting), beside the setting's type,
// makes it the one in force and returns the one before.
template <typename Setting>
class Scoped {
 public:
  explicit Scoped(const Setting& setting) : before_(Set(setting)) {}
  ~Scoped() { Set(before_); }
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 private:
  const Setting before_;
};

struct Options {
  uint32_t seed = 1;
  // Blocks that run interleaved; a new one starts when one ends.
  int resident_blocks = 2;
};

// One kernel launch: `body` is the kernel's call, which every thread makes.
struct Grid {
  dim3 grid, block;
  size_t dynamic_shared_bytes = 0;
  std::function<void()> body;
};

// Runs the grid to its end. A fault of the kernel is printed with its name, block, thread, file and
// line, and aborts the process.
void RunGrid(const Grid& grid, const Options& options);

// Enqueues the grid on a stream of the fake runtime (fake_streams.h), to be run under the options
// that LaunchOptions() has now. The null stream runs it before the call returns. What
// kernels/base/cuda_kernel.h calls; the errors are those of <<<>>>.
cudaError_t LaunchGrid(Grid grid, cudaStream_t stream);
// A kernel of one thread.
inline cudaError_t LaunchOne(std::function<void()> body, cudaStream_t stream) {
  return LaunchGrid({.grid = dim3(1), .block = dim3(1), .body = std::move(body)}, stream);
}
// How many were enqueued since the program began, and how many products by cuBLAS (fake_cublas.cc).
int64_t Launches();
int64_t CublasProducts();

// A hash of every choice that the scheduler made in the last run.
uint64_t LastScheduleHash();

// Options of the launches that kernels' own launchers make (kernels/base/cuda_kernel.h).
const Options& LaunchOptions();
Options Set(const Options& now);
using ScopedLaunchOptions = Scoped<Options>;

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_CUSIM_H_
