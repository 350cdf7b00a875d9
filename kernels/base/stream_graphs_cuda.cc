#include <algorithm>
#include <cstring>
#include <list>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include <cuda_runtime_api.h>

#include "kernels/base/caught.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream_graphs.h"

namespace moe {
namespace {

constexpr char kStreamGraphs[] = "StreamGraphs";

int64_t Aligned(int64_t bytes) {
  constexpr int64_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

absl::Status NotInAGraph(absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(kStreamGraphs, ": a pass that is a graph ",
                                                    what, ", expected work of the device alone"));
}

// A point of a pass that is replayed: the graph has the edges.
struct PassEvent final : public Event::State {
  absl::Status Wait() override { return NotInAGraph("has an event that the host waits for"); }
};

// A pass, from its first call on.
class Pass {
 public:
  Pass(int64_t number, absl::Span<const uint64_t> key)
      : number_(number), key_(key.begin(), key.end()) {}
  ~Pass() {
    if (launched_ != nullptr) {
      CudaStatus(cudaEventSynchronize(launched_), kStreamGraphs).IgnoreError();
      CudaStatus(cudaEventDestroy(launched_), kStreamGraphs).IgnoreError();
    }
    if (graph_ != nullptr) CudaStatus(cudaGraphExecDestroy(graph_), kStreamGraphs).IgnoreError();
    if (staging_ != nullptr) CudaStatus(cudaFreeHost(staging_), kStreamGraphs).IgnoreError();
  }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  int64_t number() const { return number_; }
  bool Is(absl::Span<const uint64_t> key) const { return key == key_; }
  bool captured() const { return graph_ != nullptr; }

  // The first call: what it uploads.
  void CountUpload(int64_t bytes) { staging_bytes_ += Aligned(bytes); }

  // The second: memory before the capture, since there can be none made in it; then operations,
  // each with what the host sees of it, and copies of what is uploaded.
  absl::Status MakeMemory() {
    MOE_RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&launched_, cudaEventDisableTiming), kStreamGraphs));
    if (staging_bytes_ == 0) return absl::OkStatus();
    void* data = nullptr;
    const auto bytes = static_cast<size_t>(staging_bytes_);
    MOE_RETURN_IF_ERROR(
        CudaStatus(cudaHostAlloc(&data, bytes, cudaHostAllocDefault), kStreamGraphs));
    staging_ = static_cast<std::byte*>(data);
    return absl::OkStatus();
  }
  void Add(const void* to, int64_t bytes) { operations_.push_back({to, bytes}); }
  absl::StatusOr<const std::byte*> AddUpload(const void* from, const void* to, int64_t bytes) {
    const int64_t begin = staged_;
    staged_ += Aligned(bytes);
    if (staged_ > staging_bytes_) return OtherWork();
    std::memcpy(staging_ + begin, from, static_cast<size_t>(bytes));
    operations_.push_back({to, bytes, begin});
    return staging_ + begin;
  }
  absl::Status Instantiate(cudaGraph_t graph) {
    return CudaStatus(cudaGraphInstantiate(&graph_, graph, 0), kStreamGraphs);
  }

  // Later ones.
  void Rewind() { next_ = 0; }
  absl::Status Repeat(const void* to, int64_t bytes) {
    if (next_ == operations_.size()) return OtherWork();
    const Operation& operation = operations_[next_++];
    return operation.to == to && operation.bytes == bytes ? absl::OkStatus() : OtherWork();
  }
  absl::Status RepeatUpload(const void* from, const void* to, int64_t bytes) {
    MOE_RETURN_IF_ERROR(Repeat(to, bytes));
    std::byte* const copy = staging_ + operations_[next_ - 1].staged;
    const auto size = static_cast<size_t>(bytes);
    if (std::memcmp(copy, from, size) == 0) return absl::OkStatus();
    MOE_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(launched_), kStreamGraphs));
    std::memcpy(copy, from, size);
    return absl::OkStatus();
  }
  absl::Status EndRepeat() const {
    return next_ == operations_.size() ? absl::OkStatus() : OtherWork();
  }

  absl::Status Launch(cudaStream_t stream) {
    MOE_RETURN_IF_ERROR(CudaStatus(cudaGraphLaunch(graph_, stream), kStreamGraphs));
    return CudaStatus(cudaEventRecord(launched_, stream), kStreamGraphs);
  }

 private:
  struct Operation {
    const void* to = nullptr;  // kernels: nullptr, and no bytes
    int64_t bytes = 0;
    int64_t staged = 0;  // an upload's first byte in staging_
  };
  absl::Status OtherWork() const {
    return absl::InternalError(absl::StrCat(kStreamGraphs, ": operation ", next_, " of ",
                                            operations_.size(),
                                            " of a pass is another than before, under the same "
                                            "key"));
  }

  const int64_t number_;
  const std::vector<uint64_t> key_;
  int64_t staging_bytes_ = 0, staged_ = 0;
  std::byte* staging_ = nullptr;
  std::vector<Operation> operations_;
  size_t next_ = 0;
  cudaGraphExec_t graph_ = nullptr;
  cudaEvent_t launched_ = nullptr;  // recorded after each launch
};

// What a body's calls are for.
enum class Call : uint8_t { kOutside, kFirst, kCapture, kReplay };
struct Now {
  Call call = Call::kOutside;
  Pass* pass = nullptr;
};

class PassStream final : public Stream {
 public:
  PassStream(Stream& stream, const Now& now) : stream_(stream), now_(now) {}

  Device device() const override { return stream_.device(); }
  ThreadPool& threads() const override { return stream_.threads(); }
  void Guard(const std::shared_ptr<StreamGuard>& guard) override { stream_.Guard(guard); }

  absl::StatusOr<Event> Record() override {
    if (now_.call == Call::kReplay) return Event(std::make_shared<PassEvent>());
    return stream_.Record();
  }
  absl::Status WaitFor(const Event& event) override {
    return now_.call == Call::kReplay ? event.CheckRecorded() : stream_.WaitFor(event);
  }
  absl::Status Synchronize() override {
    return InGraph() ? NotInAGraph("waits for its stream") : stream_.Synchronize();
  }
  absl::Status Launch(absl::FunctionRef<absl::Status(void*)> launch) override {
    return Put(nullptr, 0, [&] { return stream_.Launch(launch); });
  }
  absl::Status CopyBytes(const void* from, void* to, int64_t bytes) override {
    return Put(to, bytes, [&] { return stream_.CopyBytes(from, to, bytes); });
  }
  absl::Status Zero(void* to, int64_t bytes) override {
    return Put(to, bytes, [&] { return stream_.Zero(to, bytes); });
  }
  absl::Status Upload(const void* from, void* to, int64_t bytes) override {
    if (bytes == 0) return absl::OkStatus();
    if (now_.call == Call::kReplay) return now_.pass->RepeatUpload(from, to, bytes);
    if (now_.call == Call::kFirst) now_.pass->CountUpload(bytes);
    if (now_.call != Call::kCapture) return stream_.Upload(from, to, bytes);
    MOE_ASSIGN_OR_RETURN(const std::byte* const copy, now_.pass->AddUpload(from, to, bytes));
    return stream_.CopyBytes(copy, to, bytes);
  }

 private:
  bool InGraph() const { return now_.call == Call::kCapture || now_.call == Call::kReplay; }
  template <typename Enqueue>
  absl::Status Put(const void* to, int64_t bytes, Enqueue enqueue) {
    if (now_.call == Call::kReplay) return now_.pass->Repeat(to, bytes);
    if (now_.call == Call::kCapture) now_.pass->Add(to, bytes);
    return enqueue();
  }
  absl::Status DoEnqueue(const TaskOffer& task) override {
    return InGraph() ? NotInAGraph("has a task of the host") : stream_.Enqueue(task.take());
  }

  Stream& stream_;
  const Now& now_;
};

class CudaStreamGraphs final : public StreamGraphs {
 public:
  CudaStreamGraphs(absl::Span<Stream* const> streams, cudaStream_t first)
      : streams_(streams.begin(), streams.end()), first_(first) {
    for (Stream* const stream : streams_) pass_streams_.emplace_back(*stream, now_);
  }

  Stream& stream(size_t i) override {
    // The same one, where the same was given.
    const auto same = std::find(streams_.begin(), streams_.end(), streams_[i]);
    return *std::next(pass_streams_.begin(), same - streams_.begin());
  }

  absl::StatusOr<int64_t> Run(absl::Span<const uint64_t> key,
                              absl::FunctionRef<absl::Status()> body) override {
    const bool is_new = Find(key);
    Pass& pass = passes_.front();
    const absl::Status status = is_new            ? RunBody(Call::kFirst, pass, body)
                                : pass.captured() ? Replay(pass, body)
                                                  : Capture(pass, body);
    if (status.ok()) return pass.number();
    passes_.pop_front();
    return status;
  }

 private:
  // Puts the pass in front, and makes it if there is none: true.
  bool Find(absl::Span<const uint64_t> key) {
    const auto found = std::find_if(passes_.begin(), passes_.end(),
                                    [key](const Pass& pass) { return pass.Is(key); });
    if (found != passes_.end()) {
      passes_.splice(passes_.begin(), passes_, found);
      called_twice_ = true;
      return false;
    }
    passes_.emplace_front(++last_number_, key);
    if (passes_.size() <= kMostPasses) return true;
    passes_.pop_back();
    if (!called_twice_) {
      LogOnce(LogLevel::kWarning,
              "StreamGraphs: no pass comes again, so that none becomes a graph: "
              "addresses or shapes differ from call to call");
    }
    return true;
  }

  absl::Status RunBody(Call call, Pass& pass, absl::FunctionRef<absl::Status()> body) {
    now_ = {call, &pass};
    const absl::Status status = Caught(body);
    now_ = {};
    return status;
  }

  // The other streams go on after the first, or the first after all others.
  absl::Status Fork() {
    for (size_t i = 1; i < streams_.size(); ++i) {
      MOE_RETURN_IF_ERROR(Order(*streams_[i], *streams_[0]));
    }
    return absl::OkStatus();
  }
  absl::Status Join() {
    for (size_t i = 1; i < streams_.size(); ++i) {
      MOE_RETURN_IF_ERROR(Order(*streams_[0], *streams_[i]));
    }
    return absl::OkStatus();
  }
  static absl::Status Order(Stream& later, Stream& earlier) {
    if (&later == &earlier) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(const Event event, earlier.Record());
    return later.WaitFor(event);
  }

  absl::Status Begin(Pass& pass) {
    MOE_RETURN_IF_ERROR(pass.MakeMemory());
    return CudaStatus(cudaStreamBeginCapture(first_, cudaStreamCaptureModeThreadLocal),
                      kStreamGraphs);
  }

  absl::Status Capture(Pass& pass, absl::FunctionRef<absl::Status()> body) {
    MOE_RETURN_IF_ERROR(streams_[0]->Launch([&](void*) { return Begin(pass); }));
    absl::Status status = Fork();
    if (status.ok()) status = RunBody(Call::kCapture, pass, body);
    if (status.ok()) status = Join();
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(first_, &graph);  // whatever came before it
    if (status.ok()) status = CudaStatus(ended, kStreamGraphs);
    if (status.ok()) status = pass.Instantiate(graph);
    if (graph != nullptr) CudaStatus(cudaGraphDestroy(graph), kStreamGraphs).IgnoreError();
    MOE_RETURN_IF_ERROR(status);
    return Launch(pass);
  }

  absl::Status Replay(Pass& pass, absl::FunctionRef<absl::Status()> body) {
    pass.Rewind();
    MOE_RETURN_IF_ERROR(RunBody(Call::kReplay, pass, body));
    MOE_RETURN_IF_ERROR(pass.EndRepeat());
    return Launch(pass);
  }

  absl::Status Launch(Pass& pass) {
    MOE_RETURN_IF_ERROR(Join());
    MOE_RETURN_IF_ERROR(streams_[0]->Launch([&](void*) { return pass.Launch(first_); }));
    return Fork();
  }

  const std::vector<Stream*> streams_;
  const cudaStream_t first_;  // streams_[0]'s
  Now now_;
  std::list<PassStream> pass_streams_;
  std::list<Pass> passes_;  // the latest first
  int64_t last_number_ = 0;
  bool called_twice_ = false;  // some pass
};

}  // namespace

absl::StatusOr<std::unique_ptr<StreamGraphs>> MakeStreamGraphs(absl::Span<Stream* const> streams) {
  void* first = nullptr;
  MOE_RETURN_IF_ERROR(streams[0]->Launch([&](void* native) {
    first = native;
    return absl::OkStatus();
  }));
  return std::make_unique<CudaStreamGraphs>(streams, static_cast<cudaStream_t>(first));
}

}  // namespace moe
