// Flags, by Boost.Program_options.
#include <algorithm>
#include <exception>
#include <new>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/strip.h>

#include <boost/program_options.hpp>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/foreign_flags.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/base/terminal.h"

namespace moe::cli {
namespace {

namespace po = boost::program_options;

// llama-bench's name: two letters behind one dash, to Boost -o with the value "e".
constexpr char kShortOutputStderr[] = "-oe";
constexpr char kOutputStderr[] = "output-stderr";

po::options_description Describe(const Settings& settings) {
  po::options_description description;
  for (const Setting& s : settings.table()) {
    for (const std::string& name : {s.name, s.alias}) {
      if (name.empty()) continue;
      auto* const value = po::value<std::string>();
      if (s.kind == Kind::kSwitch) value->implicit_value("true");
      const std::string letter = s.letter != 0 ? absl::StrCat(",", std::string(1, s.letter)) : "";
      description.add_options()((name == s.name ? name + letter : name).c_str(), value, "");
    }
    for (const auto& [flag, value] : s.shorthands) {
      description.add_options()(flag.c_str(), po::value<std::string>()->implicit_value("true"), "");
    }
  }
  return description;
}

// `flag` is "--name".
std::string UnknownFlag(const std::string& flag, const Settings& settings) {
  absl::string_view name = flag;
  while (absl::ConsumePrefix(&name, "-")) {
  }
  // Boost reads the names of its flags from streams, which hide a lack of memory.
  for (const Setting& setting : settings.table()) {
    std::vector<std::string> spellings = Spellings(setting);
    for (const auto& [word, value] : setting.shorthands) spellings.push_back("--" + word);
    if (std::find(spellings.begin(), spellings.end(), flag) != spellings.end()) {
      throw std::bad_alloc();
    }
  }
  return absl::StrCat("unknown flag '", flag, "'",
                      DidYouMean(name, settings.Names(), "--", "; --help lists all flags"));
}

absl::Status MissingValue(const std::string& flag, const Settings& settings) {
  const Setting* const setting = settings.Find(absl::StripPrefix(flag, "--"));
  const std::string value_name = setting != nullptr ? setting->value_name : "VALUE";
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " has no value, expected ", flag, " ", value_name));
}

using Option = po::basic_option<char>;

std::string TokenOf(const Option& option) {
  return option.original_tokens.empty() ? option.string_key : option.original_tokens.front();
}

absl::Status Store(const Option& option, Settings& settings) {
  if (option.position_key >= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument '", TokenOf(option), "', expected flags: --name value"));
  }
  for (const Setting& s : settings.table()) {
    for (const auto& [flag, value] : s.shorthands) {
      if (option.string_key != flag) continue;
      if (option.value.empty() || option.value.front() == "true") {
        return settings.Set(s, {value}, Origin::kFlag, absl::StrCat("--", flag));
      }
      return WrongFlag(absl::StrCat("--", flag), option.value.front(),
                       absl::StrCat("no value: it is --", s.name, " ", value));
    }
  }
  // A letter comes back with its dash.
  const Setting* setting = settings.Find(absl::StripPrefix(option.string_key, "-"));
  for (const Setting& s : settings.table()) {
    if (s.letter != 0 && option.string_key == std::string{'-', s.letter}) setting = &s;
  }
  MOE_CHECK(setting != nullptr);
  std::vector<std::string> texts = option.value;
  if (texts.empty()) texts = {"true"};
  // Boost takes the next flag as the value.
  for (const std::string& text : texts) {
    if (absl::StartsWith(text, "--") && settings.Find(text.substr(2)) != nullptr) {
      return MissingValue(absl::StrCat("--", option.string_key), settings);
    }
  }
  return settings.Set(*setting, std::move(texts), Origin::kFlag,
                      absl::StrCat("--", option.string_key));
}

// Flags of other trainers are for commands that train.
bool Trains(const Settings& settings) {
  return settings.Find("lr") != nullptr;
}

// The flags as Boost is to read them.
std::vector<std::string> Prepared(absl::Span<const std::string> args, const Settings& settings) {
  std::vector<std::string> flags;
  for (size_t i = 0; i < args.size(); ++i) {
    flags.push_back(args[i]);
    if (args[i] == kShortOutputStderr && settings.Find(kOutputStderr) != nullptr) {
      flags.back() = absl::StrCat("--", kOutputStderr);
    }
    absl::string_view name = args[i];
    const Setting* const setting = absl::ConsumePrefix(&name, "--") ? settings.Find(name) : nullptr;
    const bool last = i + 1 == args.size() || absl::StartsWith(args[i + 1], "-");
    if (setting == nullptr || setting->alone.empty() || !last) continue;
    absl::StrAppend(&flags.back(), "=", setting->alone);
  }
  return flags;
}

// The words from options[begin] on, until the next flag.
std::vector<std::string> WordsFrom(size_t begin, const std::vector<Option>& options) {
  std::vector<std::string> words;
  for (; begin < options.size() && options[begin].position_key >= 0; ++begin) {
    words.push_back(TokenOf(options[begin]));
  }
  return words;
}

// Sets the values of `options`. Returns what is wrong with each option.
std::vector<std::string> StoreAll(const std::vector<Option>& options, Settings& settings,
                                  std::vector<std::string>& warnings) {
  std::vector<std::string> refused;
  std::vector<GivenFlag> foreign;
  for (size_t i = 0; i < options.size(); ++i) {
    const Option& option = options[i];
    absl::Status status;
    if (!option.unregistered) status = Store(option, settings);
    if (!option.unregistered && status.ok()) continue;
    // Words behind an unknown or wrong flag belong to it.
    const std::vector<std::string> words = WordsFrom(i + 1, options);
    i += words.size();
    if (!status.ok()) {
      refused.emplace_back(status.message());
      continue;
    }
    const std::string token = TokenOf(option);
    GivenFlag given = {.flag = token.substr(0, token.find('=')), .values = option.value};
    given.values.insert(given.values.end(), words.begin(), words.end());
    absl::string_view name = given.flag;
    if (Trains(settings) && absl::ConsumePrefix(&name, "--")) given.row = FindForeignFlag(name);
    if (given.row != nullptr) {
      foreign.push_back(std::move(given));
    } else {
      refused.push_back(UnknownFlag(given.flag, settings));
    }
  }
  TakeForeignFlags(foreign, settings, refused, warnings);
  return refused;
}

}  // namespace

std::vector<std::string> Spellings(const Setting& setting) {
  std::vector<std::string> spellings = {absl::StrCat("--", setting.name)};
  if (!setting.alias.empty()) spellings.push_back(absl::StrCat("--", setting.alias));
  if (setting.letter != 0) spellings.push_back({'-', setting.letter});
  if (setting.name == kOutputStderr) spellings.emplace_back(kShortOutputStderr);
  return spellings;
}

Arguments SplitOperands(absl::Span<const std::string> args, const Settings& settings) {
  const auto takes_next = [&](const std::string& flag) {
    return std::any_of(settings.table().begin(), settings.table().end(), [&](const Setting& s) {
      const std::vector<std::string> spellings = Spellings(s);
      return s.kind != Kind::kSwitch &&
             std::find(spellings.begin(), spellings.end(), flag) != spellings.end();
    });
  };
  Arguments split;
  for (size_t i = 0; i < args.size(); ++i) {
    if (!absl::StartsWith(args[i], "-")) {
      split.operands.push_back(args[i]);
      continue;
    }
    split.flags.push_back(args[i]);
    if (takes_next(args[i]) && i + 1 < args.size()) split.flags.push_back(args[++i]);
  }
  return split;
}

absl::Status LoadFlags(absl::Span<const std::string> args, Settings& settings,
                       std::vector<std::string>* warnings) {
  constexpr int kStyle =
      po::command_line_style::unix_style & ~po::command_line_style::allow_guessing;
  std::vector<std::string> refused, unheard;
  try {
    const po::options_description description = Describe(settings);
    const po::parsed_options parsed = po::command_line_parser(Prepared(args, settings))
                                          .options(description)
                                          .style(kStyle)
                                          .allow_unregistered()
                                          .run();
    refused = StoreAll(parsed.options, settings, warnings != nullptr ? *warnings : unheard);
  } catch (const po::invalid_command_line_syntax& e) {
    return MissingValue(e.get_option_name(), settings);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(e.what());
  }
  // Applies to the error, too, wherever the flag is.
  if (settings.Find("color") != nullptr) SetColor(settings.text("color"));
  if (refused.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(refused, "; "));
}

int EditDistance(absl::string_view a, absl::string_view b) {
  const size_t columns = b.size() + 1;
  std::vector<int> before(columns), last(columns), row(columns);
  for (size_t j = 0; j < columns; ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j < columns; ++j) {
      const int replace = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replace, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

std::string Nearest(absl::string_view word, const std::vector<std::string>& known) {
  int best = std::max<int>(2, static_cast<int>(word.size()) / 3) + 1;
  std::string nearest;
  for (const std::string& candidate : known) {
    // A short word is near everything: no more edits than half of what was meant.
    const int limit = std::min(best, static_cast<int>(candidate.size()) / 2 + 1);
    const int distance = EditDistance(word, candidate);
    // As near as the one found, but nothing of the word is wrong: --moe-ffn-hidden-size,
    // --hidden-size.
    const bool better_tie = !nearest.empty() && distance == best &&
                            absl::StrContains(candidate, word) && !absl::StrContains(nearest, word);
    if (distance < limit || better_tie) {
      best = distance;
      nearest = candidate;
    }
  }
  if (!nearest.empty() || word.size() < 3) return nearest;
  for (const std::string& candidate : known) {
    if (absl::StrContains(candidate, word)) return candidate;
  }
  return "";
}

std::string DidYouMean(absl::string_view word, const std::vector<std::string>& known,
                       absl::string_view prefix, absl::string_view otherwise) {
  const std::string nearest = Nearest(word, known);
  if (nearest.empty()) return std::string(otherwise);
  return absl::StrCat("; did you mean '", prefix, nearest, "'?");
}

}  // namespace moe::cli
