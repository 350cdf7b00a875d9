#include "moe/cli/base/data_files.h"

#include <absl/strings/str_cat.h>

#include "moe/cli/base/program.h"
#include "moe/io/file.h"

namespace moe::cli {
namespace {

constexpr int64_t kBytes = 256;
constexpr Choice<lm::TokenType> kPlainTypes[] = {{"uint16", lm::TokenType::kU16},
                                                 {"uint32", lm::TokenType::kU32},
                                                 {"int64", lm::TokenType::kI64}};

}  // namespace

void DataFiles::AddTo(const lm::Corpus& corpus, ReadInputs& inputs) const {
  const bool ids = !tokens.empty();
  inputs.AddHash(ids ? "tokens" : "text", ids ? "tokens" : "data", corpus.xxh3);
}

void AddDataSettings(DataFiles& files, Table& table) {
  table
      .Add("--data, --data-path PATH", &files.text,
           "text file, or folder read in name order without hidden files, symbolic links and what "
           "is no text; repeatable; this or --tokens")
      .Roles(kByContent);
  table
      .Add("--tokens FILE", &files.tokens,
           "token ids made elsewhere: PREFIX of Megatron's PREFIX.bin and PREFIX.idx, or a plain "
           "array of ids; repeatable")
      .Roles(kByContent);
  table.Add("--tokens-dtype TYPE", {&files.plain, kPlainTypes}, "ids of --tokens without an .idx");
}

absl::Status CheckDataFiles(const DataFiles& files, int64_t vocab_size) {
  if (files.text.empty() && files.tokens.empty()) {
    return absl::InvalidArgumentError(
        "--data is missing, expected a text file or a folder, or --tokens");
  }
  if (!files.text.empty() && !files.tokens.empty()) {
    return absl::InvalidArgumentError("--data and --tokens, expected one of them");
  }
  if (!files.text.empty() && vocab_size < kBytes) {
    return WrongFlag("--vocab-size", absl::StrCat(vocab_size),
                     "at least 256, one for every byte of --data");
  }
  return absl::OkStatus();
}

absl::StatusOr<lm::Corpus> ReadData(const DataFiles& files, int64_t vocab_size,
                                    int64_t sequence_length) {
  if (!files.tokens.empty()) {
    auto corpus = lm::ReadTokenFiles(
        {.paths = files.tokens, .plain = files.plain, .vocab_size = vocab_size}, sequence_length);
    if (!corpus.ok()) return InputError("--tokens", corpus.status());
    return corpus;
  }
  auto corpus = lm::ReadCorpus(files.text, sequence_length);
  if (!corpus.ok()) return InputError("--data", corpus.status());
  return corpus;
}

}  // namespace moe::cli
