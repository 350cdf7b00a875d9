// Layouts of local ranks, trainers and lone layers in them, and what they compute put together.
#ifndef MOE_TESTS_MOE_LAYER_HARNESS_H_
#define MOE_TESTS_MOE_LAYER_HARNESS_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "moe/train/trainer.h"

namespace moe::testing {

// How the same work is laid out.
struct Layout {
  int ranks = 1;
  int expert_parallel = 1;
  DispatchAlgorithm dispatch = DispatchAlgorithm::kStaged;
  int node_size = 1;
  int overlap = 1;
  int threads = 1;
  AllReduceAlgorithm all_reduce = AllReduceAlgorithm::kRing;
  ZeroStage zero = ZeroStage::kNone;  // of RunSteps
  int tensor = 1, expert_tensor = 1;
};
std::ostream& operator<<(std::ostream& out, const Layout& layout);
inline constexpr Layout kOverlapping = {.ranks = 3, .expert_parallel = 3, .overlap = 2};

// `config` with those settings of `layout` that belong to a layer.
MoeLayerConfig LaidOut(MoeLayerConfig config, const Layout& layout);

// Where layers run: on CUDA devices, which ranks take in turn, if MOE_TEST_DEVICE is "cuda", else
// on the CPU.
DeviceKind LayerDevice();

// Calls body(session) on each of `ranks` ranks.
void RunSessions(int ranks, const SessionOptions& options,
                 absl::FunctionRef<absl::Status(Session&)> body);

// Calls body(trainer) on every rank of `layout`, which `options` takes the layout's settings from.
void RunTrainers(const Layout& layout, const TrainerOptions& options,
                 absl::FunctionRef<absl::Status(Trainer&)> body);

// Tensors by name, put together from all ranks.
using Tensors = std::map<std::string, std::vector<float>>;

// What `reducer` has summed of a parameter, on the host.
absl::StatusOr<std::vector<float>> GradientOf(const Parameter& parameter, GradientReducer& reducer,
                                              const Context& context);

// Adds the reduced gradients of this rank to `gradients`, guarded by `mu`; replicas must agree.
absl::Status CollectGradients(Trainer& trainer, std::mutex& mu, Tensors& gradients);

// Every element has the same bits.
void ExpectSameBits(const std::string& name, absl::Span<const float> got,
                    absl::Span<const float> expected);
void ExpectSameBits(const Tensors& got, const Tensors& expected);

// ---- one MoE layer, and rows for it

inline constexpr int64_t kTokens = 6, kHidden = 8, kMicroBatches = 5;

MoeLayerConfig LayerConfig(int overlap = 1);

// Values [rows, kHidden], different for every seed.
std::vector<float> RowValues(int64_t rows, int64_t seed);
// Rows of one micro-batch, whichever rank holds it.
std::vector<float> Rows(const Round& round);

inline MatrixView<float> View(std::vector<float>& rows) {
  return {rows.data(), static_cast<int64_t>(rows.size()) / kHidden, kHidden};
}

// Rows in memory of the device that `context` computes on.
class DeviceRows {
 public:
  static absl::StatusOr<DeviceRows> Create(int64_t rows, const Context& context) {
    DeviceRows made;
    made.rows_ = rows;
    MOE_ASSIGN_OR_RETURN(made.buffer_, Buffer::Allocate(made.bytes(), *context.memory));
    return made;
  }
  MatrixView<float> view() { return {buffer_.span<float>().data(), rows_, kHidden}; }
  absl::Status Write(const std::vector<float>& host, const Context& context) {
    MOE_RETURN_IF_ERROR(context.compute->CopyBytes(host.data(), view().data(), bytes()));
    return context.compute->Synchronize();
  }
  absl::Status Read(std::vector<float>& host, const Context& context) {
    MOE_RETURN_IF_ERROR(context.compute->CopyBytes(view().data(), host.data(), bytes()));
    return context.compute->Synchronize();
  }

 private:
  int64_t bytes() const { return rows_ * kHidden * static_cast<int64_t>(sizeof(float)); }
  Buffer buffer_;
  int64_t rows_ = 0;
};

// One layer of one rank without a trainer, with rows for several calls.
struct LayerRank {
  std::unique_ptr<Session> session;
  std::unique_ptr<ParameterStore> store;
  std::unique_ptr<MoeLayer<float>> layer;
  std::unique_ptr<GradientReducer> reducer;  // its step has begun
  std::vector<DeviceRows> x, y, dx;          // one entry per call

  // Enqueued work still uses the rows.
  ~LayerRank() {
    if (session != nullptr) context().compute->Synchronize().IgnoreError();
  }
  const Context& context() const { return session->context(); }

  // Experts are spread over `world`, and ranks take devices of `kind` in turn.
  absl::Status Create(const MoeLayerConfig& config, DeviceKind kind, SessionOptions options,
                      std::unique_ptr<Communicator> world, absl::Span<const int64_t> rows);
  StashHandle Take() const { return session->stashes().Take(); }
  // Backward of a call with dy = y.
  absl::Status Backward(int call, Stash* stash, float d_router_loss = 1);
  // y and dx of a call.
  absl::Status Read(int call, std::vector<std::vector<float>>& into);
  // Ends the reducer's step: sums of all gradients.
  absl::Status ReadGradients(std::vector<std::vector<float>>& into);
};

// ---- steps of such a layer through moe::Trainer: at every layout, on every backend and with ranks
// that die

TrainerOptions Options(const Layout& layout, DeviceKind device = DeviceKind::kCpu);

// Forward and backward of a round; the loss is half the sum of squares of y + x.
absl::Status RunRound(Trainer& trainer, TrainedLayer<float>& layer);

absl::Status RunStep(Trainer& trainer, TrainedLayer<float>& layer);

// Three steps, then look(trainer).
absl::Status RunSteps(const Layout& layout, std::unique_ptr<Communicator> world,
                      const std::function<void(const Trainer&)>& look,
                      DeviceKind kind = DeviceKind::kCpu);

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_LAYER_HARNESS_H_
