#include "moe/sweep/text_hash.h"

#include <absl/strings/str_format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace moe::sweep {

std::string TextHash(const lm::Corpus& corpus) {
  const uint64_t train = XXH3_64bits(corpus.train.data(), corpus.train.size());
  return absl::StrFormat(
      "%016x", XXH3_64bits_withSeed(corpus.held_out.data(), corpus.held_out.size(), train));
}

}  // namespace moe::sweep
