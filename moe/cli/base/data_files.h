// The text or the tokens that a model is trained or measured on.
#ifndef MOE_MOE_CLI_BASE_DATA_FILES_H_
#define MOE_MOE_CLI_BASE_DATA_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/settings.h"
#include "moe/lm/text_data.h"

namespace moe::cli {

struct DataFiles {
  std::vector<std::string> text, tokens;  // one of them is given
  lm::TokenType plain = lm::TokenType::kU16;

  const char* flag() const { return tokens.empty() ? "--data" : "--tokens"; }
  const char* unit() const { return tokens.empty() ? "byte" : "token"; }
  // Adds what ranks compare of `corpus`, which was read from these files.
  void AddTo(const lm::Corpus& corpus, ReadInputs& inputs) const;
};

// --data, --tokens and --tokens-dtype.
void AddDataSettings(DataFiles& files, Table& table);

// Called before any file is opened. kInvalidArgument: neither or both are given, or a vocabulary
// below the 256 bytes of text.
absl::Status CheckDataFiles(const DataFiles& files, int64_t vocab_size);

// Errors name the flag. Exit codes: kUsage for a path that is not there, too little, or an id
// outside the vocabulary; kBadInput for malformed files; kIo.
absl::StatusOr<lm::Corpus> ReadData(const DataFiles& files, int64_t vocab_size,
                                    int64_t sequence_length);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_DATA_FILES_H_
