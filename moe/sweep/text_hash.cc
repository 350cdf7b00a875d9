#include "moe/sweep/text_hash.h"

#include <absl/strings/str_format.h>

namespace moe::sweep {

std::string TextHash(const lm::Corpus& corpus) {
  return absl::StrFormat("%016x", lm::HashText(corpus));
}

}  // namespace moe::sweep
