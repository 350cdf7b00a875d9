// Runs CUDA kernels on the CPU, to test whether they are correct. Host side: called by tests.
//
// The host compiler compiles a kernel's source against device.h, which implements CUDA's names.
// Each CUDA thread is a fiber. The scheduler picks the next one at random, by a seed, and lets it
// run until it synchronises, yields or ends; so each seed is one schedule. docs/cuda.md lists what
// this finds and what it cannot find.
#ifndef MOE_TESTS_CUSIM_CUSIM_H_
#define MOE_TESTS_CUSIM_CUSIM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include <cuda_runtime_api.h>

namespace cusim {

// A setting of the simulation for the lifetime of an object. Set(setting), next to the setting's
// type, installs it and returns the previous one.
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
  // Blocks that run interleaved, at least one cluster; when one ends, another starts.
  int resident_blocks = 2;
  // That a block may have, static and dynamic together: of compute capability 9.0. Launches on a
  // stream take the machine's (fake_streams.h).
  size_t most_shared_bytes = 227 << 10;
};

// One kernel launch: `body` calls the kernel, once in every thread.
struct Grid {
  dim3 grid, block;
  size_t dynamic_shared_bytes = 0;
  std::function<void()> body;
  unsigned cluster_blocks = 1;  // neighbours in x that run together; divides grid.x
};

// Runs the grid to its end. A fault of the kernel is printed with its name, block, thread, file and
// line, and aborts the process.
void RunGrid(const Grid& grid, const Options& options);

// Enqueues the grid on a stream of the fake runtime (fake_streams.h), to run under the current
// LaunchOptions(). The null stream runs it before the call returns. Called by
// kernels/base/cuda_kernel.h; the errors are those of <<<>>>.
cudaError_t LaunchGrid(Grid grid, cudaStream_t stream);
// Enqueues a kernel of one thread.
inline cudaError_t LaunchOne(std::function<void()> body, cudaStream_t stream) {
  return LaunchGrid({.grid = dim3(1), .block = dim3(1), .body = std::move(body)}, stream);
}
// Number of launches since the program began, and of products by cuBLAS (fake_cublas.cc).
int64_t Launches();
int64_t CublasProducts();

// A hash of every choice that the scheduler made in the last run.
uint64_t LastScheduleHash();

// Options of launches by kernels' own launchers (kernels/base/cuda_kernel.h).
const Options& LaunchOptions();
Options Set(const Options& now);
using ScopedLaunchOptions = Scoped<Options>;

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_CUSIM_H_
