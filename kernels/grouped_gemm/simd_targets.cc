#include "kernels/grouped_gemm/simd_targets.h"

#include <cstdint>
#include <cstdlib>

#include <absl/algorithm/container.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <hwy/targets.h>

#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/gemm_dot_avx512.h"
#include "kernels/grouped_gemm/gemm_tile_amx.h"

namespace moe::gemm {
namespace {

constexpr int64_t kFused[] = {HWY_AVX3, HWY_AVX2, HWY_NEON};
constexpr char kWithTiles[] = "AVX3_AMX";
constexpr char kWithDot[] = "AVX3_BF16";

}  // namespace

std::vector<std::string> SimdTargets() {
  std::vector<std::string> names;
  if (UsesAmx()) names.emplace_back(kWithTiles);
  if (DotsBFloat16()) names.emplace_back(kWithDot);
  for (const int64_t target : kFused) {
    if (hwy::SupportedTargets() & target) names.emplace_back(hwy::TargetName(target));
    if (target == HWY_AVX3 && MayDotBFloat16() && !DotsBFloat16()) names.emplace_back(kWithDot);
  }
  names.emplace_back(hwy::TargetName(HWY_EMU128));
  return names;
}

void UseSimdTarget(absl::string_view name) {
  UseAmx(name == kWithTiles || name.empty());
  UseBFloat16Dot(name == kWithDot                     ? DotUse::kAlways
                 : name == kWithTiles || name.empty() ? DotUse::kWhereFaster
                                                      : DotUse::kNever);
  if (name == kWithTiles || name == kWithDot) name = hwy::TargetName(HWY_AVX3);
  int64_t chosen = 0;  // no restriction
  for (const int64_t target : {HWY_AVX3, HWY_AVX2, HWY_NEON, HWY_EMU128}) {
    if (name == hwy::TargetName(target)) chosen = target;
  }
  MOE_CHECK(chosen != 0 || name.empty());
  hwy::SetSupportedTargetsForTest(chosen);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

BFloat16Order FastestBFloat16Order() {
  return UsesAmx() ? BFloat16Order::kTile : BFloat16Order::kDot;
}

absl::Status UseSimdTargetOfEnvironment() {
  const char* const name = std::getenv(kSimdVariable);
  if (name == nullptr) return absl::OkStatus();
  const std::vector<std::string> targets = SimdTargets();
  if (!absl::c_linear_search(targets, name)) {
    return absl::InvalidArgumentError(
        absl::StrCat(kSimdVariable, " is '", name,
                     "', expected one of this CPU's: ", absl::StrJoin(targets, ", ")));
  }
  UseSimdTarget(name);
  return absl::OkStatus();
}

}  // namespace moe::gemm
