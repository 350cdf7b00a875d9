// Capture and launch of graphs by the fake CUDA runtime.
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cusim/fake_memory.h"
#include "tests/cusim/fake_streams.h"

namespace cusim {
namespace {

std::atomic<int64_t> graph_launches = 0;

}  // namespace

int64_t GraphLaunches() {
  return graph_launches;
}
size_t LiveGraphs() {
  return Streams::Get().graphs();
}

// What is left of one launch.
struct Streams::GraphRun {
  explicit GraphRun(std::shared_ptr<std::vector<Node>> of) : nodes(std::move(of)) {
    waits_for.reserve(nodes->size());
    for (size_t n = 0; n < nodes->size(); ++n) {
      waits_for.push_back((*nodes)[n].after.size());
      if (waits_for[n] == 0) ready.push_back(n);
    }
  }
  const std::shared_ptr<std::vector<Node>> nodes;
  std::vector<size_t> waits_for;  // nodes, of each node
  std::vector<size_t> ready;
};

cudaError_t Streams::BeginCapture(const char* function, cudaStream_t stream) {
  const Lock lock(mu_);
  Queue& queue = Find(function, stream);
  if (queue.capture != nullptr) return cudaErrorIllegalState;
  queue.capture =
      captures_.emplace_back(new Capture{.thread = std::this_thread::get_id(), .origin = stream});
  queue.after.clear();
  return cudaSuccess;
}

cudaError_t Streams::EndCapture(const char* function, cudaStream_t stream, cudaGraph_t* graph) {
  const Lock lock(mu_);
  *graph = nullptr;
  const std::shared_ptr<Capture> capture = Find(function, stream).capture;
  if (capture == nullptr) return cudaErrorIllegalState;
  if (capture->origin != stream) return cudaErrorStreamCaptureUnmatched;
  if (capture->thread != std::this_thread::get_id()) return cudaErrorStreamCaptureWrongThread;
  // Every node must be before what would come next in the origin.
  std::vector<bool> joined(capture->nodes.size());
  for (const size_t n : Find(function, stream).after) joined[n] = true;
  for (size_t n = capture->nodes.size(); n-- > 0;) {
    if (!joined[n]) continue;
    for (const size_t before : capture->nodes[n].after) joined[before] = true;
  }
  for (const auto& [handle, queue] : queues_) {
    if (queue->capture != capture) continue;
    queue->capture = nullptr;
    queue->after.clear();
  }
  std::erase(captures_, capture);
  if (capture->spoilt) return cudaErrorStreamCaptureInvalidated;
  if (!std::all_of(joined.begin(), joined.end(), [](bool is) { return is; })) {
    return cudaErrorStreamCaptureUnjoined;
  }
  const uintptr_t handle = next_handle_++;
  graphs_.emplace(handle, std::make_shared<std::vector<Node>>(std::move(capture->nodes)));
  *graph = reinterpret_cast<cudaGraph_t>(handle);
  return cudaSuccess;
}

cudaError_t Streams::Spoil() {
  const Lock lock(mu_);
  bool found = false;
  for (const auto& capture : captures_) {
    if (capture->thread == std::this_thread::get_id()) found = capture->spoilt = true;
  }
  return found ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t Streams::Spoil(const char* function, cudaStream_t stream) {
  const Lock lock(mu_);
  const Queue& queue = Find(function, stream);
  if (queue.capture == nullptr) return cudaSuccess;
  queue.capture->spoilt = true;
  return cudaErrorStreamCaptureUnsupported;
}

const std::shared_ptr<std::vector<Streams::Node>>& Streams::FindGraph(const char* function,
                                                                      const void* graph) {
  const auto found = graphs_.find(reinterpret_cast<uintptr_t>(graph));
  if (found == graphs_.end()) Misuse(function, "unknown graph, or one that was destroyed");
  return found->second;
}

cudaGraphExec_t Streams::Instantiate(const char* function, cudaGraph_t graph) {
  const Lock lock(mu_);
  const uintptr_t handle = next_handle_++;
  graphs_.emplace(handle, FindGraph(function, graph));
  return reinterpret_cast<cudaGraphExec_t>(handle);
}

void Streams::DestroyGraph(const char* function, const void* graph) {
  const Lock lock(mu_);
  FindGraph(function, graph);
  graphs_.erase(reinterpret_cast<uintptr_t>(graph));
}

size_t Streams::graphs() {
  const Lock lock(mu_);
  return graphs_.size();
}

void Streams::LaunchGraph(const char* function, cudaGraphExec_t graph, cudaStream_t stream) {
  const Lock lock(mu_);
  Push(function, stream,
       {.kind = Operation::Kind::kGraph,
        .graph = std::make_shared<GraphRun>(FindGraph(function, graph))});
  ++graph_launches;
}

// Runs one node; true: it was the last.
bool Streams::StepGraph(GraphRun& run) {
  if (run.ready.empty()) return true;  // no nodes
  std::swap(run.ready[random_() % run.ready.size()], run.ready.back());
  const size_t now = run.ready.back();
  run.ready.pop_back();
  const std::vector<Node>& nodes = *run.nodes;
  {
    const DeviceAccess access(nodes[now].device);
    nodes[now].work();
  }
  for (size_t n = now + 1; n < nodes.size(); ++n) {
    const auto& after = nodes[n].after;
    const auto edges = static_cast<size_t>(std::count(after.begin(), after.end(), now));
    if (edges == 0) continue;
    run.waits_for[n] -= edges;
    if (run.waits_for[n] == 0) run.ready.push_back(n);
  }
  return run.ready.empty();
}

}  // namespace cusim
