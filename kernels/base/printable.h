// Text of files and systems, made safe to show.
#ifndef MOE_KERNELS_BASE_PRINTABLE_H_
#define MOE_KERNELS_BASE_PRINTABLE_H_

#include <string>

#include <absl/strings/string_view.h>

namespace moe {

// `text` with the bytes that control a terminal escaped: control bytes as "\x1b", and in UTF-8 the
// control characters U+0080 to U+009F as "\u009b". Line ends and tabs stay, as do bytes that are
// not UTF-8.
std::string Printable(absl::string_view text);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_PRINTABLE_H_
