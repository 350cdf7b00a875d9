#include "gating/gate.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>

#include "gating/builtin_gates.h"

namespace moe {
namespace {

// A deque: definitions keep their address while others are added.
struct GateTable {
  std::mutex mu;
  std::deque<GateDefinition> gates;  // guarded by mu

  const GateDefinition* Find(absl::string_view name) const {
    const auto at = std::find_if(gates.begin(), gates.end(), [&](const GateDefinition& gate) {
      return absl::string_view(gate.name) == name;
    });
    return at == gates.end() ? nullptr : &*at;
  }
};

GateTable& Table() {
  static GateTable& table = []() -> GateTable& {
    auto& built_in = *new GateTable;
    for (GateDefinition& gate : BuiltinGates()) built_in.gates.push_back(std::move(gate));
    return built_in;
  }();
  return table;
}

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

absl::Status RegisterGate(GateDefinition definition) {
  if (definition.name.empty() || !definition.make) {
    return absl::InvalidArgumentError(absl::StrCat("RegisterGate: name '", definition.name, "', ",
                                                   definition.make ? "a" : "no",
                                                   " make function, expected both"));
  }
  GateTable& table = Table();
  const std::lock_guard<std::mutex> lock(table.mu);
  if (table.Find(definition.name) != nullptr) {
    return absl::AlreadyExistsError(
        absl::StrCat("RegisterGate: there is a gate '", definition.name, "' already"));
  }
  table.gates.push_back(std::move(definition));
  return absl::OkStatus();
}

const GateDefinition* FindGate(absl::string_view name) {
  GateTable& table = Table();
  const std::lock_guard<std::mutex> lock(table.mu);
  return table.Find(name);
}

std::vector<std::string> GateNames() {
  GateTable& table = Table();
  const std::lock_guard<std::mutex> lock(table.mu);
  std::vector<std::string> names;
  for (const GateDefinition& gate : table.gates) names.push_back(gate.name);
  return names;
}

std::string NearestGateName(absl::string_view name) {
  const std::vector<std::string> names = GateNames();
  return *std::min_element(names.begin(), names.end(), [&](const auto& a, const auto& b) {
    return EditDistance(name, a) < EditDistance(name, b);
  });
}

}  // namespace moe
