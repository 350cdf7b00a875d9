#include "tests/cusim/fake_streams.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "tests/cusim/cusim.h"
#include "tests/cusim/fake_memory.h"

namespace cusim {
namespace {

int FirstDevices() {
  const char* const devices = std::getenv("CUSIM_DEVICES");
  return devices == nullptr ? Machine().devices : std::atoi(devices);
}

Machine machine = {.devices = FirstDevices()};
std::atomic<int64_t> launches = 0;
thread_local bool in_host_function = false;

template <typename Handle>
uintptr_t Number(Handle handle) {
  return reinterpret_cast<uintptr_t>(handle);
}

uint32_t FirstSeed() {
  const char* const seed = std::getenv("CUSIM_SEED");
  return seed == nullptr ? 1 : static_cast<uint32_t>(std::strtoul(seed, nullptr, 10));
}

}  // namespace

const Machine& TheMachine() {
  return machine;
}
// CUDA Programming Guide, "Compute Capabilities", table of technical specifications.
size_t MostSharedBytes(const Machine& of) {
  if (of.major == 12 || (of.major == 8 && (of.minor == 6 || of.minor == 9))) return 99 << 10;
  return of.major == 8 ? 163 << 10 : 227 << 10;
}
Machine Set(const Machine& now) {
  return std::exchange(machine, now);
}

void SeedStreams(uint32_t seed) {
  Streams::Get().Seed(seed);
}

void Misuse(const char* function, const std::string& what) {
  std::fprintf(stderr, "cusim: misuse of CUDA: %s: %s\n", function, what.c_str());
  std::abort();
}

// Never destroyed: objects that live as long as the process use it at the end.
Streams& Streams::Get() {
  static Streams* const streams = new Streams;
  if (in_host_function) Misuse("cudaLaunchHostFunc", "the host function calls CUDA");
  return *streams;
}

Streams::Streams() : random_(FirstSeed()) {}

void Streams::Seed(uint32_t seed) {
  const Lock lock(mu_);
  random_.seed(seed);
}

cudaStream_t Streams::Create(int device, int priority) {
  const Lock lock(mu_);
  const uintptr_t handle = next_handle_++;
  queues_.emplace(handle, new Queue{.device = device, .priority = priority});
  return reinterpret_cast<cudaStream_t>(handle);
}

cudaEvent_t Streams::CreateEvent(int device, bool timing) {
  const Lock lock(mu_);
  if (events_.size() >= most_events_) return nullptr;
  const uintptr_t handle = next_handle_++;
  events_.emplace(handle, new Event{.device = device, .timing = timing});
  return reinterpret_cast<cudaEvent_t>(handle);
}

Streams::Queue& Streams::Find(const char* function, cudaStream_t stream) {
  const auto found = queues_.find(Number(stream));
  if (found == queues_.end()) Misuse(function, "unknown stream, or one that was destroyed");
  return *found->second;
}

const std::shared_ptr<Streams::Event>& Streams::Find(const char* function, cudaEvent_t event) {
  const auto found = events_.find(Number(event));
  if (found == events_.end()) Misuse(function, "unknown event, or one that was destroyed");
  return found->second;
}

void Streams::Destroy(const char* function, cudaStream_t stream) {
  Lock lock(mu_);
  const Queue& queue = Find(function, stream);
  RunUntil(function, lock, [&] { return Idle(queue); });
  queues_.erase(Number(stream));
}

void Streams::DestroyEvent(const char* function, cudaEvent_t event) {
  const Lock lock(mu_);
  Find(function, event);
  events_.erase(Number(event));
}

size_t Streams::events() {
  const Lock lock(mu_);
  return events_.size();
}
size_t LiveEvents() {
  return Streams::Get().events();
}
int64_t Streams::overlaps() {
  const Lock lock(mu_);
  return overlaps_;
}
int64_t Overlaps() {
  return Streams::Get().overlaps();
}
void Streams::LimitEvents(size_t most) {
  const Lock lock(mu_);
  most_events_ = most;
}
void LimitEvents(size_t most) {
  Streams::Get().LimitEvents(most);
}

int Streams::DeviceOf(const char* function, cudaStream_t stream) {
  const Lock lock(mu_);
  return Find(function, stream).device;
}
int Streams::DeviceOf(const char* function, cudaEvent_t event) {
  const Lock lock(mu_);
  return Find(function, event)->device;
}

int Streams::PriorityOf(const char* function, cudaStream_t stream) {
  const Lock lock(mu_);
  return Find(function, stream).priority;
}

void Streams::Push(const char* function, cudaStream_t stream, Operation operation) {
  Queue& queue = Find(function, stream);
  queue.operations.push_back(std::move(operation));
  ++queue.enqueued;
  changed_.notify_all();
}

void Streams::Enqueue(const char* function, cudaStream_t stream, std::function<void()> work,
                      GridBlocks blocks) {
  const Lock lock(mu_);
  if (stream != nullptr) {
    return Push(function, stream,
                {.kind = Operation::Kind::kDevice,
                 .work = std::move(work),
                 .blocks = machine.room ? std::move(blocks) : GridBlocks()});
  }
  int device = 0;
  cudaGetDevice(&device);
  const DeviceAccess access(device);
  work();
}

void Streams::EnqueueExternal(const char* function, cudaStream_t stream,
                              std::shared_ptr<External> work) {
  const Lock lock(mu_);
  GridBlocks blocks = machine.room ? work->blocks() : GridBlocks();
  Push(function, stream,
       {.kind = Operation::Kind::kExternal,
        .external = std::move(work),
        .blocks = std::move(blocks)});
}

void EnqueueTransfer(cudaStream_t stream, int blocks) {
  class Transfer final : public External {
   public:
    explicit Transfer(int count) : count_(count) {}
    GridBlocks blocks() const override { return {.needs = kNcclBlock, .waiting = count_}; }
    bool Ready() override { return true; }
    bool Step() override { return true; }

   private:
    const int count_;
  };
  Streams::Get().EnqueueExternal("transfer", stream, std::make_shared<Transfer>(blocks));
}

int64_t Streams::Enqueued(const char* function, cudaStream_t stream) {
  const Lock lock(mu_);
  return Find(function, stream).enqueued;
}

void Streams::RunSome() {
  Lock lock(mu_);
  (void)Step(lock, What::kDevices);
  changed_.notify_all();
}

void Streams::EnqueueHost(const char* function, cudaStream_t stream, std::function<void()> work) {
  const Lock lock(mu_);
  Push(function, stream, {.kind = Operation::Kind::kHost, .work = std::move(work)});
}

void Streams::Record(const char* function, cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(mu_);
  Event& state = *Find(function, event);
  state.last = std::make_shared<Recorded>();
  Push(function, stream, {.kind = Operation::Kind::kRecord, .recorded = state.last});
}

void Streams::Wait(const char* function, cudaStream_t stream, cudaEvent_t event) {
  const Lock lock(mu_);
  Push(function, stream, {.kind = Operation::Kind::kWait, .recorded = Find(function, event)->last});
}

bool Streams::HasPassed(const Recorded* recorded) {
  return recorded == nullptr || recorded->passed;
}

bool Streams::Ready(const Operation& operation) {
  if (operation.kind == Operation::Kind::kExternal) return operation.external->Ready();
  return operation.kind != Operation::Kind::kWait || HasPassed(operation.recorded.get());
}

// Whether waiting blocks of the queue's first operation are the next that begin.
bool Streams::MayBegin(const Queue& queue) {
  Multiprocessors& room = multiprocessors_[queue.device];
  const auto waits = [&](const Queue& other) {
    if (other.device != queue.device || other.operations.empty()) return false;
    const Operation& first = other.operations.front();
    return first.blocks.waiting > 0 && Ready(first) && room.HasRoom(first.blocks.needs);
  };
  return waits(queue) && std::none_of(queues_.begin(), queues_.end(), [&](const auto& other) {
           return other.second->priority < queue.priority && waits(*other.second);
         });
}

// Blocks begin, or all that are on multiprocessors end; an External ends when all have begun.
bool Streams::MayStep(const Queue& queue) {
  const Operation& first = queue.operations.front();
  if (first.blocks.waiting == 0 || MayBegin(queue)) return true;
  return first.kind == Operation::Kind::kDevice && !first.blocks.on.empty();
}

bool Streams::BeginBlocks(Queue& queue) {
  if (!MayBegin(queue)) return false;
  Operation& first = queue.operations.front();
  multiprocessors_[queue.device].Begin(first.blocks);
  changed_.notify_all();
  // An External, or a kernel that counts, all of whose blocks are under way.
  const auto counts = [](const Operation& operation, Operation::Kind kind) {
    return operation.kind == kind && operation.blocks.all_on() &&
           (kind == Operation::Kind::kExternal || FillsSharedMemory(operation.blocks.needs));
  };
  if (!counts(first, first.kind)) return true;
  const auto kind = first.kind == Operation::Kind::kExternal ? Operation::Kind::kDevice
                                                             : Operation::Kind::kExternal;
  for (const auto& [handle, other] : queues_) {
    if (other->device != queue.device || other->operations.empty()) continue;
    if (counts(other->operations.front(), kind)) ++overlaps_;
  }
  return true;
}

Streams::Queue* Streams::Pick(What what) {
  std::vector<Queue*> ready;
  for (const auto& [handle, queue] : queues_) {
    multiprocessors_[queue->device].Resize(machine.multiprocessors);
    if (queue->busy || queue->operations.empty() || !Ready(queue->operations.front())) continue;
    if (!MayStep(*queue)) continue;
    // CUDA may run the host functions of all streams on one thread.
    const bool host_may_run = what == What::kAll && busy_ == 0;
    if (!host_may_run && queue->operations.front().kind == Operation::Kind::kHost) continue;
    ready.push_back(queue.get());
  }
  return ready.empty() ? nullptr : ready[random_() % ready.size()];
}

// Runs one operation of one stream; false if none can run.
bool Streams::Step(Lock& lock, What what) {
  Queue* const queue = Pick(what);
  if (queue == nullptr) return false;
  if (BeginBlocks(*queue)) return true;
  Operation operation = std::move(queue->operations.front());
  queue->operations.pop_front();
  Multiprocessors& room = multiprocessors_[queue->device];
  switch (operation.kind) {
    case Operation::Kind::kDevice: {
      room.End(operation.blocks);
      if (operation.blocks.waiting > 0) {
        queue->operations.push_front(std::move(operation));
        break;
      }
      const DeviceAccess access(queue->device);
      operation.work();
      break;
    }
    case Operation::Kind::kHost:
      queue->busy = true;
      ++busy_;
      lock.unlock();
      in_host_function = true;
      operation.work();
      in_host_function = false;
      lock.lock();
      --busy_;
      queue->busy = false;
      break;
    case Operation::Kind::kRecord:
      operation.recorded->passed = true;
      operation.recorded->passed_at = std::chrono::steady_clock::now();
      break;
    case Operation::Kind::kWait:
      break;
    case Operation::Kind::kExternal: {
      const DeviceAccess access(DeviceAccess::kEveryDevice);
      if (!operation.external->Step()) {
        queue->operations.push_front(std::move(operation));
        break;
      }
      room.End(operation.blocks);
      break;
    }
  }
  changed_.notify_all();
  return true;
}

// Whether some stream has reached an External, which host threads that are not here yet may
// complete.
bool Streams::WaitsForOthers() const {
  return std::any_of(queues_.begin(), queues_.end(), [](const auto& entry) {
    const auto& operations = entry.second->operations;
    return !operations.empty() && operations.front().kind == Operation::Kind::kExternal;
  });
}

void Streams::RunUntil(const char* function, Lock& lock, const std::function<bool()>& done) {
  while (!done()) {
    if (Step(lock)) continue;
    if (busy_ == 0 && !WaitsForOthers()) Misuse(function, "waits for work that can never run");
    changed_.wait(lock);
  }
}

void Streams::Synchronize(const char* function, cudaStream_t stream) {
  Lock lock(mu_);
  const Queue& queue = Find(function, stream);
  RunUntil(function, lock, [&] { return Idle(queue); });
}

void Streams::Synchronize(const char* function, cudaEvent_t event) {
  Lock lock(mu_);
  const std::shared_ptr<Recorded> last = Find(function, event)->last;
  RunUntil(function, lock, [&] { return HasPassed(last.get()); });
}

void Streams::SynchronizeAll(const char* function) {
  Lock lock(mu_);
  RunUntil(function, lock, [&] {
    for (const auto& [handle, queue] : queues_) {
      if (!Idle(*queue)) return false;
    }
    return true;
  });
}

bool Streams::Passed(const char* function, cudaEvent_t event) {
  const Lock lock(mu_);
  return HasPassed(Find(function, event)->last.get());
}

cudaError_t Streams::Elapsed(const char* function, cudaEvent_t start, cudaEvent_t stop, float* ms) {
  const Lock lock(mu_);
  const Event& from = *Find(function, start);
  const Event& to = *Find(function, stop);
  for (const Event* event : {&from, &to}) {
    if (!event->timing || event->last == nullptr) return cudaErrorInvalidResourceHandle;
    if (!event->last->passed) return cudaErrorNotReady;
  }
  *ms = std::chrono::duration<float, std::milli>(to.last->passed_at - from.last->passed_at).count();
  return cudaSuccess;
}

int64_t Launches() {
  return launches;
}

cudaError_t LaunchGrid(Grid grid, cudaStream_t stream) {
  const auto count = [](dim3 d) {
    return size_t{d.x} * d.y * d.z;
  };
  constexpr unsigned kMostX = 0x7fffffff, kMostYZ = 65535, kMostThreads = 1024, kMostThreadsZ = 64;
  const dim3 g = grid.grid, b = grid.block;
  if (count(g) == 0 || count(b) == 0 || g.x > kMostX || g.y > kMostYZ || g.z > kMostYZ ||
      b.z > kMostThreadsZ || count(b) > kMostThreads || g.x % grid.cluster_blocks != 0) {
    return cudaErrorInvalidConfiguration;
  }
  Options options = LaunchOptions();
  options.most_shared_bytes = MostSharedBytes(machine);
  if (grid.dynamic_shared_bytes > options.most_shared_bytes) return cudaErrorInvalidValue;
  if (machine.driver != cudaSuccess) return machine.driver;
  if (machine.kernel_image != cudaSuccess) return machine.kernel_image;
  Streams& streams = Streams::Get();
  int device = 0;
  cudaGetDevice(&device);
  if (stream != nullptr && streams.DeviceOf("kernel launch", stream) != device) {
    return cudaErrorInvalidResourceHandle;
  }
  ++launches;
  const GridBlocks blocks = {.needs = NeedsOf(grid), .waiting = static_cast<int>(count(g))};
  streams.Enqueue(
      "kernel launch", stream, [grid = std::move(grid), options] { RunGrid(grid, options); },
      blocks);
  return cudaSuccess;
}

}  // namespace cusim
