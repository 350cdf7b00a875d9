// Which text a training sweep was run on.
#ifndef MOE_MOE_SWEEP_TEXT_HASH_H_
#define MOE_MOE_SWEEP_TEXT_HASH_H_

#include <string>

#include "moe/lm/text_data.h"

namespace moe::sweep {

// XXH3 of the training text and the held-out text, sixteen hexadecimal digits.
std::string TextHash(const lm::Corpus& corpus);

}  // namespace moe::sweep

#endif  // MOE_MOE_SWEEP_TEXT_HASH_H_
