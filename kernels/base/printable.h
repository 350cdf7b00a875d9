// Text of files and systems on its way to people.
#ifndef MOE_KERNELS_BASE_PRINTABLE_H_
#define MOE_KERNELS_BASE_PRINTABLE_H_

#include <string>

#include <absl/strings/string_view.h>

namespace moe {

// `text` without what steers a terminal: control bytes as "\x1b", and of UTF-8 the control
// characters U+0080 to U+009F as "\u009b". Ends of line and tabs stay, as do bytes that are no
// UTF-8.
std::string Printable(absl::string_view text);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_PRINTABLE_H_
