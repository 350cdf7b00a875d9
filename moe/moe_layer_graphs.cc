// A layer's passes as CUDA graphs: what they need, and what tells one from another.
#include <bit>

#include <absl/strings/str_cat.h>

#include "gating/gate.h"
#include "kernels/base/status_macros.h"
#include "kernels/expert_sort/expert_sort.h"
#include "moe/moe_layer.h"

namespace moe {
namespace {

enum class Kind : uint64_t { kForward, kBackward };

// Numbers and addresses, one after the other.
class Key {
 public:
  explicit Key(std::vector<uint64_t>& words) : words_(words) {}

  void Add(const void* address) { words_.push_back(reinterpret_cast<uintptr_t>(address)); }
  void Add(uint64_t number) { words_.push_back(number); }
  template <typename T>
  void Add(MatrixView<T> matrix) {
    Add(matrix.data());
    for (const int64_t each : {matrix.rows(), matrix.cols(), matrix.stride()}) Number(each);
  }
  void Add(absl::Span<const int64_t> numbers) {
    Number(std::ssize(numbers));
    for (const int64_t number : numbers) Number(number);
  }
  void Add(const Workspace& workspace) {
    Add(&workspace);
    Add(workspace.mark().chunk);
    Number(workspace.mark().used);
  }
  void Add(const GradAccumulator& grad) {
    Add(grad.float_sum().data());
    Add(grad.exact_sum().data());
    Add(grad.tally());
    Number(grad.grid().unit_log2);
    Number(grad.grid().max_terms);
    Add(uint64_t{grad.empty()});
  }
  void Number(int64_t number) { Add(static_cast<uint64_t>(number)); }

 private:
  std::vector<uint64_t>& words_;
};

}  // namespace

absl::Status CheckCudaGraph(const MoeLayerConfig& config, DeviceKind device,
                            int expert_parallel_size, GroupedGemmKernel grouped_gemm) {
  const RouterConfig& router = config.router;
  const std::unique_ptr<const Gate> gate = FindGate(router.gate)->make(router);
  const auto jitter = gate->traits().input_jitter;
  const struct {
    bool fits;
    std::string what;
    const char* expected;
  } needs[] = {
      {device == DeviceKind::kCuda, "on the CPU", "a CUDA device"},
      {expert_parallel_size == 1,
       absl::StrCat("with ", expert_parallel_size, " expert-parallel ranks"),
       "1: the host reads the plan of several"},
      {router.pad_to_capacity, "without pad_to_capacity", "it: a graph has fixed shapes"},
      {router.num_zero_experts == 0,
       absl::StrCat("with num_zero_experts ", router.num_zero_experts),
       "0: their tokens are the host's"},
      {gate->RunsOn(DeviceKind::kCuda), absl::StrCat("with router ", router.gate),
       "one that runs on the device"},
      {jitter == 0, absl::StrCat("with input_jitter ", jitter), "0: the host makes its factors"},
      {grouped_gemm != GroupedGemmKernel::kCublas, "with grouped_gemm cublas",
       "auto or mma: its calls are one for each expert"},
      {config.dispatcher.algorithm == DispatchAlgorithm::kStaged, "with another dispatch",
       "staged: the others plan on the host"},
  };
  for (const auto& [fits, what, expected] : needs) {
    if (fits) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("MoeLayer: cuda_graph ", what, ", expected ", expected));
  }
  return absl::OkStatus();
}

template <typename T>
void MoeLayer<T>::AddPlaceToKey(const Context& kept) {
  Key key(key_);
  for (const Workspace* workspace :
       {kept.workspace, context_.workspace, context_.exchange_workspace}) {
    key.Add(*workspace);
  }
  for (const Parameter* const parameter : parameters_) {
    key.Add(parameter->master().data());
    if (!parameter->spec().host_state) key.Add(parameter->template view<T>().data());
  }
}

template <typename T>
absl::Span<const uint64_t> MoeLayer<T>::ForwardKey(MatrixView<const T> x, const Batch& batch,
                                                   MatrixView<T> y, const MoeLayerSaved<T>& saved,
                                                   const RouterStats* stats) {
  key_.clear();
  Key key(key_);
  key.Add(static_cast<uint64_t>(Kind::kForward));
  key.Add(x);
  key.Add(y);
  key.Add(batch.sequence_offsets);
  key.Add(batch.micro_batch_offsets);
  key.Add(static_cast<uint64_t>(batch.mode));
  key.Add(uint64_t{stats != nullptr});
  AddPlaceToKey(saved.memory.In(context_));
  return key_;
}

template <typename T>
absl::Span<const uint64_t> MoeLayer<T>::BackwardKey(MatrixView<const T> dy,
                                                    const MoeLayerSaved<T>& saved,
                                                    float d_router_loss, MatrixView<T> dx) {
  key_.clear();
  Key key(key_);
  key.Add(static_cast<uint64_t>(Kind::kBackward));
  key.Number(saved.pass);  // whose saved state is where that Forward's key says
  key.Add(dy);
  key.Add(dx);
  key.Add(uint64_t{std::bit_cast<uint32_t>(d_router_loss)});
  AddPlaceToKey(context_);
  for (const Parameter* const parameter : parameters_) {
    if (parameter->spec().trainable) key.Add(parameter->grad());
  }
  return key_;
}

template <typename T>
absl::StatusOr<int64_t> MoeLayer<T>::RunPass(const char* name,
                                             absl::FunctionRef<absl::Span<const uint64_t>()> key,
                                             absl::FunctionRef<absl::Status()> pass) {
  if (graphs_ == nullptr) {
    MOE_RETURN_IF_ERROR(pass());
    return 0;
  }
  int64_t number = 0;
  MOE_RETURN_IF_ERROR(Timed(whole_, {.name = name}, *whole_.compute, [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(number, graphs_->Run(key(), pass));
    return absl::OkStatus();
  }));
  return number;
}

#define MOE_INSTANTIATE(T)                                                       \
  template void MoeLayer<T>::AddPlaceToKey(const Context&);                      \
  template absl::Span<const uint64_t> MoeLayer<T>::ForwardKey(                   \
      MatrixView<const T>, const Batch&, MatrixView<T>, const MoeLayerSaved<T>&, \
      const RouterStats*);                                                       \
  template absl::Span<const uint64_t> MoeLayer<T>::BackwardKey(                  \
      MatrixView<const T>, const MoeLayerSaved<T>&, float, MatrixView<T>);       \
  template absl::StatusOr<int64_t> MoeLayer<T>::RunPass(                         \
      const char*, absl::FunctionRef<absl::Span<const uint64_t>()>,              \
      absl::FunctionRef<absl::Status()>);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
