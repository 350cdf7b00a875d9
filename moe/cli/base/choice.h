// The words of a flag, each beside what it stands for.
#ifndef MOE_MOE_CLI_BASE_CHOICE_H_
#define MOE_MOE_CLI_BASE_CHOICE_H_

#include <cstddef>
#include <string>
#include <vector>

#include <absl/strings/string_view.h>

namespace moe::cli {

// The first word of a value is its name.
template <typename T>
struct Choice {
  const char* word;
  T value;
};

template <typename T, size_t N>
std::vector<std::string> WordsOf(const Choice<T> (&choices)[N]) {
  std::vector<std::string> words;
  for (const Choice<T>& choice : choices) words.emplace_back(choice.word);
  return words;
}
template <typename T, size_t N>
const char* NameOf(T value, const Choice<T> (&choices)[N]) {
  for (const Choice<T>& choice : choices) {
    if (choice.value == value) return choice.word;
  }
  return "";
}
template <typename T, size_t N>
T ValueOf(absl::string_view word, const Choice<T> (&choices)[N]) {
  for (const Choice<T>& choice : choices) {
    if (choice.word == word) return choice.value;
  }
  return choices[0].value;
}

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_CHOICE_H_
