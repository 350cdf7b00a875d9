// What tests do less of under sanitizers, where everything takes ten times as long.
#ifndef MOE_TESTS_SANITIZERS_H_
#define MOE_TESTS_SANITIZERS_H_

namespace moe::testing {

// Durations mean nothing then: sanitizers slow computing ten times and sleeping not at all. Cases
// that repeat the structure of threads and memory of others are left out; what is computed in them
// is compared in the other builds.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace moe::testing

#endif  // MOE_TESTS_SANITIZERS_H_
