// Words for values: an enumeration has a table of them beside it, which flags, tables and messages
// read. No Abseil here: .cu files include this header.
#ifndef MOE_KERNELS_BASE_CHOICE_H_
#define MOE_KERNELS_BASE_CHOICE_H_

#include <cstddef>
#include <iterator>
#include <optional>

namespace moe {

// The first word of a value is its name.
template <typename T>
struct Choice {
  const char* word;
  T value;
};

// "" where the table has no such value.
template <typename T, size_t N>
constexpr const char* NameOf(T value, const Choice<T> (&choices)[N]) {
  for (const Choice<T>& choice : choices) {
    if (choice.value == value) return choice.word;
  }
  return "";
}

// The value of a word, a string or view, in an array or vector of choices; nullopt for other words.
template <typename Word, typename Choices>
constexpr auto ValueOf(const Word& word, const Choices& choices)
    -> std::optional<decltype(std::begin(choices)->value)> {
  for (const auto& choice : choices) {
    if (word == choice.word) return choice.value;
  }
  return std::nullopt;
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_CHOICE_H_
