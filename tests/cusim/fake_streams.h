// The streams and events of the fake CUDA runtime (fake_cudart.cc), and settings for tests.
//
// A stream is a queue. Nothing in it runs before a host thread waits for something: a stream, an
// event, the device. Then, until what it waits for has happened, one of the streams whose next work
// may run is picked at random, by a seed. So each seed is one order that CUDA allows, and some seed
// exposes a missing event edge. Work on the null stream runs at once.
//
// With Machine::room blocks wait for room on multiprocessors: a kernel begins where some of its
// blocks have room, others may begin beside it before it ends, and waiting blocks of a stream of
// higher priority come first. Without it kernels are over at once, in every order that edges allow.
//
// Work of a library that involves several streams (NCCL's kernels) is an External: it may wait for
// others, in streams of other host threads, and does not block the rest meanwhile.
//
// Misuse (an unknown stream or event, memory that was freed, a host function that calls CUDA,
// waiting for what can never happen) is printed and aborts the process.
#ifndef MOE_TESTS_CUSIM_FAKE_STREAMS_H_
#define MOE_TESTS_CUSIM_FAKE_STREAMS_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "tests/cusim/cusim.h"
#include "tests/cusim/multiprocessors.h"

namespace cusim {

// The machine that the fake runtime emulates.
struct Machine {
  cudaError_t driver = cudaSuccess;        // result of every call if there is no driver
  cudaError_t kernel_image = cudaSuccess;  // result of a launch: no code for this architecture
  cudaError_t work = cudaSuccess;          // result of waiting: a kernel that failed
  int major = 9, minor = 0;                // compute capability
  int devices = 2;                         // at the program's start: CUSIM_DEVICES, if set
  int multiprocessors = 4;                 // per device
  bool room = false;                       // blocks wait for room on multiprocessors
  size_t memory_bytes = size_t{4} << 30;   // per device
  // Pairs (reader, owner of the memory) that cannot be peers; all others can.
  std::vector<std::pair<int, int>> no_peers = {};
};
const Machine& TheMachine();
// Shared memory that a block may have, static and dynamic together, by compute capability.
size_t MostSharedBytes(const Machine& machine);
size_t LiveEvents();
// Limits the number of events that exist at a time; creating one more is an error.
void LimitEvents(size_t most);
Machine Set(const Machine& now);
using ScopedMachine = Scoped<Machine>;

// Seeds the order of streams. At the start of the process: CUSIM_SEED, else 1.
void SeedStreams(uint32_t seed);

// How often all blocks of an External and all of a kernel, each of which fills the shared memory of
// a multiprocessor, have been under way on one device at the same time.
int64_t Overlaps();

// How often calls have blocked the calling thread since it began.
struct HostWaits {
  int64_t synchronizations = 0;  // on a stream, an event or the device
  int64_t copies = 0;            // to host memory that is not pinned

  bool operator==(const HostWaits&) const = default;
  HostWaits operator-(const HostWaits& before) const {
    return {synchronizations - before.synchronizations, copies - before.copies};
  }
};
HostWaits WaitsOfThisThread();

// A kernel that waits for kernels in other streams. Its functions are called one at a time, with
// the streams locked: they must not call CUDA.
class External {
 public:
  virtual ~External() = default;
  virtual GridBlocks blocks() const = 0;
  // Whether Step would make progress now.
  virtual bool Ready() = 0;
  // Makes progress. True: it has ended, and leaves the stream.
  virtual bool Step() = 0;
};

// Enqueues a transfer that ends once its blocks, of NCCL's size, have begun.
void EnqueueTransfer(cudaStream_t stream, int blocks);

[[noreturn]] void Misuse(const char* function, const std::string& what);

// Implements the C functions of fake_cudart.cc. `function` is the caller's name, for faults. May be
// called by any thread.
class Streams {
 public:
  static Streams& Get();

  cudaStream_t Create(int device, int priority);            // the lower number comes first
  void Destroy(const char* function, cudaStream_t stream);  // waits for its work
  cudaEvent_t CreateEvent(int device, bool timing);
  void DestroyEvent(const char* function, cudaEvent_t event);
  size_t events();
  int64_t overlaps();
  void LimitEvents(size_t most);

  int DeviceOf(const char* function, cudaStream_t stream);
  int DeviceOf(const char* function, cudaEvent_t event);
  int PriorityOf(const char* function, cudaStream_t stream);

  // Work of the device: copies, and kernels, of `blocks`. It may access device memory.
  void Enqueue(const char* function, cudaStream_t stream, std::function<void()> work,
               GridBlocks blocks = {});
  void EnqueueExternal(const char* function, cudaStream_t stream, std::shared_ptr<External> work);
  // Number of operations enqueued in the stream since it was made.
  int64_t Enqueued(const char* function, cudaStream_t stream);
  // Runs one operation of the devices, as may happen at any time; wakes threads that wait for an
  // External that something outside the streams has changed.
  void RunSome();
  // A function on the host, which may block; it runs beside other work, but beside no other host
  // function.
  void EnqueueHost(const char* function, cudaStream_t stream, std::function<void()> work);
  void Record(const char* function, cudaEvent_t event, cudaStream_t stream);
  void Wait(const char* function, cudaStream_t stream, cudaEvent_t event);

  void Synchronize(const char* function, cudaStream_t stream);
  void Synchronize(const char* function, cudaEvent_t event);
  void SynchronizeAll(const char* function);
  bool Passed(const char* function, cudaEvent_t event);
  // Milliseconds of the host's clock between two events with timing.
  cudaError_t Elapsed(const char* function, cudaEvent_t start, cudaEvent_t stop, float* ms);

  void Seed(uint32_t seed);

 private:
  // Events are recorded repeatedly, in any stream: a wait is for the latest record when it began,
  // whether later ones have passed or not.
  struct Recorded {
    bool passed = false;
    std::chrono::steady_clock::time_point passed_at = {};
  };
  struct Event {
    int device;
    bool timing;
    std::shared_ptr<Recorded> last;  // nullptr: never recorded, which counts as passed
  };
  struct Operation {
    enum class Kind : uint8_t { kDevice, kHost, kRecord, kWait, kExternal } kind;
    std::function<void()> work;
    std::shared_ptr<Recorded> recorded;
    std::shared_ptr<External> external;
    GridBlocks blocks;  // where blocks wait for room
  };
  struct Queue {
    int device;
    int priority;
    int64_t enqueued = 0;
    bool busy = false;  // its host function is running
    std::deque<Operation> operations;
  };
  using Lock = std::unique_lock<std::mutex>;

  Streams();
  Queue& Find(const char* function, cudaStream_t stream);
  const std::shared_ptr<Event>& Find(const char* function, cudaEvent_t event);
  void Push(const char* function, cudaStream_t stream, Operation operation);
  enum class What : uint8_t { kAll, kDevices };
  Queue* Pick(What what);
  bool Step(Lock& lock, What what = What::kAll);
  void RunUntil(const char* function, Lock& lock, const std::function<bool()>& done);
  static bool HasPassed(const Recorded* recorded);
  static bool Ready(const Operation& operation);
  bool MayBegin(const Queue& queue);
  bool MayStep(const Queue& queue);
  bool BeginBlocks(Queue& queue);
  bool WaitsForOthers() const;
  static bool Idle(const Queue& queue) { return queue.operations.empty() && !queue.busy; }

  std::mutex mu_;
  std::condition_variable changed_;
  // All guarded by mu_. Ordered by number, so that an order of streams does not depend on
  // addresses.
  std::map<uintptr_t, std::unique_ptr<Queue>> queues_;
  std::map<uintptr_t, std::shared_ptr<Event>> events_;
  std::map<int, Multiprocessors> multiprocessors_;  // by device
  int64_t overlaps_ = 0;
  size_t most_events_ = SIZE_MAX;
  uintptr_t next_handle_ = 0x1000;
  int busy_ = 0;
  std::mt19937 random_;
};

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_FAKE_STREAMS_H_
