#include "moe/cli/report/labels.h"

#include <algorithm>
#include <cmath>

#include <absl/algorithm/container.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "moe/cli/report/format.h"

namespace moe::report {

namespace {

// Appends to each label those texts of its entry that are not the same in all entries.
void AppendDistinct(const std::vector<Key>& entries, const std::vector<std::string*>& labels) {
  for (size_t i = 0; !entries.empty() && i < entries.front().size(); ++i) {
    const bool differs = std::any_of(entries.begin(), entries.end(), [&](const Key& entry) {
      return entry[i] != entries.front()[i];
    });
    for (size_t e = 0; differs && e < entries.size(); ++e) {
      if (entries[e][i].empty()) continue;
      absl::StrAppend(labels[e], labels[e]->empty() ? "" : " · ", entries[e][i]);
    }
  }
}

constexpr char kCapacityFlag[] = "moe-expert-capacity-factor", kExpertsFlag[] = "num-experts";

std::string Named(const char* name, double value) {
  return std::isfinite(value) ? absl::StrCat(name, ExactText(value)) : "";
}

std::string Named(const char* name, const std::string& text) {
  return text.empty() ? "" : absl::StrCat(name, text);
}

// "--a 1 --b=true --c 'x y'": "a 1", "b=true", "c 'x y'". Blanks within quotes do not separate
// flags.
std::vector<std::string> FlagsOf(const std::string& settings) {
  std::vector<std::string> flags(1);
  bool quoted = false;
  for (size_t i = 0; i < settings.size(); ++i) {
    const absl::string_view rest = absl::string_view(settings).substr(i);
    if (!quoted && absl::StartsWith(rest, " --")) {
      flags.emplace_back();
      continue;  // skips the blank; the dashes are stripped below
    }
    if (!quoted && absl::StartsWith(rest, "\\")) {
      absl::StrAppend(&flags.back(), rest.substr(0, 2));
      ++i;
      continue;
    }
    if (rest.front() == '\'') quoted = !quoted;
    flags.back().push_back(rest.front());
  }
  for (std::string& flag : flags) flag = std::string(absl::StripPrefix(flag, "--"));
  return flags;
}

std::string NameOfFlag(const std::string& flag) {
  return flag.substr(0, flag.find_first_of(" ="));
}

// `settings` but for these flags.
std::string Without(const std::string& settings, absl::Span<const char* const> names) {
  std::string rest;
  for (const std::string& flag : FlagsOf(settings)) {
    if (flag.empty() || absl::c_linear_search(names, NameOfFlag(flag))) continue;
    absl::StrAppend(&rest, rest.empty() ? "--" : " --", flag);
  }
  return rest;
}

// Flags by name; a flag that occurs more than once keeps all its occurrences.
std::map<std::string, std::string> FlagsByName(const std::string& settings) {
  std::map<std::string, std::string> flags;
  for (const std::string& flag : FlagsOf(settings)) {
    if (flag.empty()) continue;
    std::string& known = flags[NameOfFlag(flag)];
    absl::StrAppend(&known, known.empty() ? "" : " ", flag);
  }
  return flags;
}

// Of flags by name: token ids have a vocabulary of their own, the bytes of --data the default.
template <class Flags>
std::string TextOf(const Flags& by_name) {
  return by_name.contains("vocab-size") ? " --tokens ..." : " --data ...";
}

// Splits every settings text into the same number of texts: one for each flag that any of them has.
std::vector<Key> AlignedFlags(const std::vector<std::string>& settings) {
  std::vector<std::map<std::string, std::string>> each;
  std::map<std::string, std::string> all;
  for (const std::string& text : settings) {
    each.push_back(FlagsByName(text));
    all.insert(each.back().begin(), each.back().end());
  }
  std::vector<Key> aligned(settings.size());
  for (const auto& [name, unused] : all) {
    for (size_t i = 0; i < each.size(); ++i) {
      const auto at = each[i].find(name);
      aligned[i].push_back(at == each[i].end() ? name + " default" : at->second);
    }
  }
  return aligned;
}

}  // namespace

std::vector<std::string> DistinctLabels(const std::vector<Key>& parts) {
  std::vector<std::string> labels(parts.size());
  std::vector<std::string*> all;
  for (std::string& label : labels) all.push_back(&label);
  AppendDistinct(parts, all);
  for (size_t e = 0; e < parts.size(); ++e) {
    const auto first = std::find_if(parts[e].begin(), parts[e].end(),
                                    [](const std::string& text) { return !text.empty(); });
    if (labels[e].empty() && first != parts[e].end()) labels[e] = *first;
  }
  return labels;
}

Key PointKey(const SweepRow& r) {
  // Without stages the number of ranks is ep times dp, and is left out.
  const bool meshed = r.ep * r.dp == r.ranks;
  return {Named("E ", r.experts),
          Named("K ", r.top_k),
          std::isinf(r.capacity_factor) ? "dropless" : Named("cf ", r.capacity_factor),
          Named("ep ", r.ep),
          Named("dp ", r.dp),
          meshed ? "" : Named("ranks ", r.ranks),
          std::isfinite(r.tokens_per_rank) ? ExactText(r.tokens_per_rank) + " tokens" : "",
          Named("H ", r.hidden),
          Named("F ", r.ffn),
          Named("overlap ", r.overlap),
          r.dtype,
          r.router,
          r.routing,
          r.dispatch,
          r.backend,
          r.measure,
          Named("text ", r.text_hash),
          r.settings};
}

Key SeriesKey(const SweepRow& row, Along axis) {
  const bool capacity = axis == Along::kCapacity;
  SweepRow same = row;
  (capacity ? same.capacity_factor : same.experts) = kNone;
  same.settings = Without(row.settings, {capacity ? kCapacityFlag : kExpertsFlag});
  return PointKey(same);
}

std::string TrainLine(const SweepRow& row) {
  if (row.measure != "train") return "";
  const std::string flags = Without(row.settings, {"measure", "repetitions"});
  return absl::StrCat("moe train", TextOf(FlagsByName(row.settings)), flags.empty() ? "" : " ",
                      flags);
}

std::string SweepLine(absl::Span<const NamedRow<SweepRow>> rows) {
  std::map<std::string, std::vector<std::string>> values;  // of each flag, " 8" or "=true"
  std::map<std::string, size_t> given;
  for (const NamedRow<SweepRow>& r : rows) {
    for (const auto& [name, flag] : FlagsByName(r.row->settings)) {
      ++given[name];
      std::vector<std::string>& known = values[name];
      const std::string value = flag.substr(name.size());
      if (!absl::c_linear_search(known, value)) known.push_back(value);
    }
  }
  std::string measure, varied, same;
  for (auto& [name, known] : values) {
    std::string flag = absl::StrCat(" --", name, known.front());
    for (size_t i = 1; i < known.size(); ++i) absl::StrAppend(&flag, ",", known[i].substr(1));
    const bool defaults = given[name] < rows.size();
    if (defaults) flag += ",...";
    (name == "measure" ? measure : defaults || known.size() > 1 ? varied : same) += flag;
  }
  if (!measure.empty()) measure += TextOf(values);
  return absl::StrCat("moe sweep", measure, varied, same);
}

std::vector<std::string> PointLabels(const std::vector<Key>& keys) {
  std::vector<Key> parts = keys;
  for (Key& key : parts) key.pop_back();
  std::vector<std::string> labels = DistinctLabels(parts);
  std::map<std::string, std::vector<size_t>> of_label;
  for (size_t i = 0; i < labels.size(); ++i) of_label[labels[i]].push_back(i);
  for (const auto& [label, entries] : of_label) {
    std::vector<std::string> settings;
    std::vector<std::string*> of_entries;
    for (const size_t i : entries) {
      settings.push_back(keys[i].back());
      of_entries.push_back(&labels[i]);
    }
    AppendDistinct(AlignedFlags(settings), of_entries);
  }
  return labels;
}

}  // namespace moe::report
