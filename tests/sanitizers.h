// What tests do less of under sanitizers, where everything takes ten times as long.
#ifndef MOE_TESTS_SANITIZERS_H_
#define MOE_TESTS_SANITIZERS_H_

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace moe::testing {

// Durations mean nothing then: sanitizers slow computing ten times and sleeping not at all. Cases
// that repeat the structure of threads and memory of others are left out; what is computed in them
// is compared in the other builds.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
// Sizes and SIMD targets repeat the structure of threads.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif

// All of `gates` without those that are rows of one table with mixtral, deepseek-v3 and llama4, and
// run the same code.
inline std::vector<std::string> GatesUnlike(std::vector<std::string> gates) {
  std::erase_if(gates, [](const std::string& gate) {
    const char* const kAlike[] = {"switch",      "topk",    "qwen2",   "qwen3",
                                  "deepseek-v2", "gpt-oss", "longcat", "olmoe"};
    return std::find(std::begin(kAlike), std::end(kAlike), gate) != std::end(kAlike);
  });
  return gates;
}

// Under AddressSanitizer those. Under ThreadSanitizer two: a gate runs on the thread of its
// rank, but for counts of the whole step, which deepseek-v3 learns from.
inline std::vector<std::string> GatesHere(std::vector<std::string> gates) {
  if (kThreadSanitized) return {"mixtral", "deepseek-v3"};
  return kSanitized ? GatesUnlike(std::move(gates)) : gates;
}

}  // namespace moe::testing

#endif  // MOE_TESTS_SANITIZERS_H_
