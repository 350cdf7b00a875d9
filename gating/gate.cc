#include "gating/gate.h"

#include <algorithm>
#include <numeric>

#include "gating/softmax_top_k.h"

namespace moe {
namespace {

constexpr GateEntry kGates[] = {
    {"switch", 1, MakeSwitchGate}, {"gshard", 2, MakeGshardGate}, {"mixtral", 0, MakeMixtralGate},
    {"olmoe", 0, MakeOlmoeGate},   {"qwen3", 0, MakeQwen3Gate},
};

// Levenshtein distance.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, replaced});
    }
  }
  return row.back();
}

}  // namespace

const GateEntry* FindGate(absl::string_view name) {
  for (const GateEntry& gate : kGates) {
    if (name == gate.name) return &gate;
  }
  return nullptr;
}

std::vector<std::string> GateNames() {
  std::vector<std::string> names;
  for (const GateEntry& gate : kGates) names.emplace_back(gate.name);
  return names;
}

std::string NearestGateName(absl::string_view name) {
  const GateEntry* const nearest =
      std::min_element(std::begin(kGates), std::end(kGates), [&](const auto& a, const auto& b) {
        return EditDistance(name, a.name) < EditDistance(name, b.name);
      });
  return nearest->name;
}

}  // namespace moe
