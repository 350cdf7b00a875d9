#include <algorithm>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "moe/cli/train_settings.h"

namespace moe::cli {
namespace {

constexpr char kHead[] =
    R"(usage: moe train --data PATH [flags]

Trains a byte-level mixture-of-experts language model on text files, expert-parallel x
data-parallel, on threads of this process or, under mpirun, on processes. Every 20th block of
16 KiB of the text is held out and measured before and after.

  moe train --data /usr/share/games/fortunes --ranks 4 --ep 2 --num-experts 8 --topk 2
  mpirun -n 4 moe train --data book.txt --ep 4 --out run
)";

constexpr char kTail[] =
    R"(
Settings: flags, then the environment (MOE_NAME: capitals, _ for -, without a leading moe-;
MOE_DATA splits at ':'), then --config, then defaults.

Progress and results
  tok/s    tokens of a step / time of its slowest rank
  a2a      dispatch + combine: time in exchanges, mean over ranks
  ar       gradient all-reduce, which overlaps backward
  drop     slots over capacity / slots; a slot is one (token, choice)
  maxvio   (largest expert load - mean load) / mean load, of the worst layer
  dead     experts without a token in the step, over all layers
  aux      balance loss with its coefficient, summed over layers
  gnorm    2-norm of the gradient before clipping
  bits per byte = loss in nats / ln 2
  GB = 1e9 bytes, MiB = 2^20 bytes

DIR/metrics.jsonl has one object per step, written as it ends; the last line holds weights_xxh3.
loss_hex is the loss in C's hexadecimal notation (%a): equal text means equal bits.

Exit codes: 0 ok, 2 usage or settings, 3 malformed input, 4 a write failed, 5 out of memory,
6 loss or gradients not finite, 7 a rank failed, 8 timeout, 9 rendezvous, 10 no such backend.
)";

constexpr size_t kWidth = 100;
constexpr size_t kIndent = 40;

// `text` in lines of at most kWidth - kIndent, the first after `lead`.
std::string Wrapped(const std::string& lead, const std::string& text) {
  std::string out = lead;
  size_t column = lead.size();
  if (column + 1 >= kIndent) {
    out += "\n";
    column = 0;
  }
  out += std::string(kIndent - column, ' ');
  column = kIndent;
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (column > kIndent && column + 1 + word.size() > kWidth) {
      absl::StrAppend(&out, "\n", std::string(kIndent, ' '));
      column = kIndent;
    }
    if (column > kIndent) {
      out += " ";
      ++column;
    }
    absl::StrAppend(&out, word);
    column += word.size();
  }
  return out + "\n";
}

std::string Line(const Setting& s) {
  std::string lead = "  ";
  if (s.letter != 0) absl::StrAppend(&lead, "-", std::string(1, s.letter), ", ");
  absl::StrAppend(&lead, "--", s.name);
  if (!s.alias.empty()) absl::StrAppend(&lead, ", --", s.alias);
  if (!s.value_name.empty()) absl::StrAppend(&lead, " ", s.value_name);
  std::string text = s.help;
  const auto append = [&](const std::string& part) {
    absl::StrAppend(&text, text.empty() ? "" : " ", part);
  };
  if (s.kind == Kind::kWord) append(absl::StrCat("(", absl::StrJoin(s.words, "|"), ")"));
  if (!s.fallback.empty()) append(absl::StrCat("[", s.fallback, "]"));
  return Wrapped(lead, text);
}

}  // namespace

std::string TrainHelp() {
  std::string out = kHead;
  std::string group;
  for (const Setting& s : TrainSettings()) {
    if (s.group != group) absl::StrAppend(&out, "\n", s.group, "\n");
    group = s.group;
    out += Line(s);
  }
  return out + kTail;
}

}  // namespace moe::cli
