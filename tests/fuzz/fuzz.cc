// Passes bytes to one of the readers of untrusted bytes.
//
//   FUZZ_TARGET=NAME fuzz [libFuzzer's flags] FOLDER...
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include <absl/strings/string_view.h>

#include "tests/fuzz/targets.h"

namespace moe::fuzz {
namespace {

const Target& Chosen() {
  const char* const name = std::getenv("FUZZ_TARGET");
  for (const auto targets : {ModelFiles(), RunFiles(), Words()}) {
    for (const Target& target : targets) {
      if (name != nullptr && absl::string_view(name) == target.name) return target;
    }
  }
  std::abort();
}

}  // namespace
}  // namespace moe::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const moe::fuzz::Target& target = moe::fuzz::Chosen();
  target.read({data, size});
  return 0;
}
