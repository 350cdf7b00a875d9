// The whole public models of tests/golden/models.
#ifndef MOE_TESTS_MOE_HF_GOLDEN_MODEL_H_
#define MOE_TESTS_MOE_HF_GOLDEN_MODEL_H_

#include <fstream>
#include <string>

#include <absl/strings/str_cat.h>

#include <nlohmann/json.hpp>

namespace moe::hf {

inline std::string GoldenFolder(const std::string& family) {
  return absl::StrCat(MOE_GOLDEN_MODELS, "/", family);
}

// The golden configuration of a family with changes: null removes a key.
inline std::string Changed(const std::string& family, const std::string& changes) {
  auto json = nlohmann::json::parse(std::ifstream(GoldenFolder(family) + "/config.json"));
  json.merge_patch(nlohmann::json::parse(changes));
  return json.dump();
}

}  // namespace moe::hf

#endif  // MOE_TESTS_MOE_HF_GOLDEN_MODEL_H_
