// Any bytes as a model's config.json: refused with a message, or sizes within their ranges, whose
// tensors' shapes can be multiplied out.
#include <cstddef>
#include <cstdint>

#include <absl/strings/match.h>

#include "gating/router_config.h"
#include "kernels/base/status_macros.h"
#include "moe/hf/family.h"
#include "moe/hf/hf_config.h"

namespace moe {

// The router's checks have tests of their own, and would bring every gate and kernel along.
absl::Status ValidateRouterConfig(const RouterConfig& /*config*/) {
  return absl::OkStatus();
}

}  // namespace moe

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto config = moe::hf::ParseHfConfig("f", {reinterpret_cast<const char*>(data), size});
  if (!config.ok()) {
    MOE_CHECK(absl::IsDataLoss(config.status()) || absl::IsUnimplemented(config.status()));
    MOE_CHECK(absl::StartsWith(config.status().message(), "f: "));
    return 0;
  }
  const moe::MoeLayerConfig& layer = config->moe;
  MOE_CHECK(config->family != nullptr && config->num_layers() >= 1);
  MOE_CHECK(layer.router.num_experts >= 1 && layer.router.top_k >= 1);
  MOE_CHECK(layer.router.hidden_size >= 1 && layer.ffn_hidden_size >= 1);
  for (const moe::hf::TensorRule& rule : config->family->tensors) {
    if (!moe::hf::IsPresent(rule, layer)) continue;
    int64_t elements = 1;
    for (const int64_t dim : moe::hf::TensorShape(rule, layer)) {
      MOE_CHECK(dim >= 1 && !__builtin_mul_overflow(elements, dim, &elements));
    }
    // CheckTotal's bound, twice over for gate and up.
    MOE_CHECK(elements <= int64_t{1} << 41);
  }
  return 0;
}
