// What words of flags stand for, where several commands take them.
#ifndef MOE_MOE_CLI_BASE_CHOICES_H_
#define MOE_MOE_CLI_BASE_CHOICES_H_

#include "comm/ring_all_reduce.h"
#include "comm/world_plan.h"
#include "dispatch/dispatcher.h"
#include "kernels/activation/activation_kind.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "moe/cli/base/settings.h"
#include "moe/run/context.h"

namespace moe::cli {

inline constexpr Choice<Backend> kBackends[] = {
    {"local", Backend::kLocal}, {"mpi", Backend::kMpi}, {"nccl", Backend::kNccl}};
inline constexpr Choice<DeviceKind> kDevices[] = {{"cpu", DeviceKind::kCpu},
                                                  {"cuda", DeviceKind::kCuda}};
// Of activations and weights.
inline constexpr Choice<DType> kComputeTypes[] = {
    {"f32", DType::kFloat32}, {"bf16", DType::kBFloat16}, {"f16", DType::kFloat16}};
inline constexpr Choice<Activation> kActivations[] = {
    {"swiglu", Activation::kSwiGlu},        {"geglu", Activation::kGeGlu},
    {"geglu_tanh", Activation::kGeGluTanh}, {"relu", Activation::kRelu},
    {"relu2", Activation::kRelu2},          {"clamped_swiglu", Activation::kClampedSwiGlu}};
inline constexpr Choice<Numerics> kNumericsModes[] = {
    {"fast", Numerics::kFast}, {"layout-invariant", Numerics::kLayoutInvariant}};
inline constexpr Choice<DispatchAlgorithm> kDispatches[] = {
    {"staged", DispatchAlgorithm::kStaged},
    {"direct", DispatchAlgorithm::kDirect},
    {"hierarchical", DispatchAlgorithm::kHierarchical}};
inline constexpr Choice<AllReduceAlgorithm> kAllReduces[] = {
    {"ring", AllReduceAlgorithm::kRing},
    {"direct", AllReduceAlgorithm::kDirect},
    {"library", AllReduceAlgorithm::kLibrary}};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_CHOICES_H_
