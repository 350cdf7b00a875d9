#include "moe/cli/base/fault_settings.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "kernels/base/status_macros.h"

namespace moe::cli {
namespace {

// A place that ranks of `moe train` come to (Communicator::Mark, Site::name).
struct FaultPhase {
  const char* name;
  bool in_steps;  // in every step of any run
  // Whether one of the values that it makes can be replaced (ReplacementOf).
  bool has_values = false;
};
constexpr FaultPhase kPhases[] = {
    {"start", false},
    {"data", true},
    {"embedding", true, true},
    {"attention", true, true},
    {"gate", true, true},
    {"plan", true},
    {"dispatch", true},
    {"experts", true, true},
    {"combine", true, true},
    {"loss", true, true},
    {"combine backward", true, true},
    {"experts backward", true, true},
    {"dispatch backward", true, true},
    {"gate backward", true, true},
    {"attention backward", true, true},
    {"embedding backward", true, true},
    {"all-reduce", false},  // with --zero 2 or 3, and with one replica, there is none
    {"pipeline send", false},
    {"pipeline receive", false},
    {"tensor rows", false},  // are gathered, and sums shared, by ranks with --tp
    {"tensor sum", false},
    {"expert rows", false},  // with --etp
    {"expert sum", false},
    {"gather weights", false},  // with --zero 3
    {"step totals", true},
    {"optimiser", true, true},
    {"step metrics", true},
    {"ckpt-write", false},
    {"ckpt-commit", false},
    {"end report", false},
    {"finalize", false},
};

// Faults of Megatron's injector that have a kind here, in lower case.
constexpr Choice<FaultKind> kMegatronWords[] = {{"workload_exc", FaultKind::kThrow},
                                                {"segfault", FaultKind::kSegv},
                                                {"sigkill", FaultKind::kKill}};

bool Fits(FaultKind kind, const FaultPhase& phase) {
  return phase.has_values || !ReplacementOf(kind).has_value();
}

// Those where a fault of that kind may be.
std::string PhaseList(FaultKind kind = FaultKind::kThrow) {
  std::vector<absl::string_view> names;
  for (const FaultPhase& phase : kPhases) {
    if (Fits(kind, phase)) names.emplace_back(phase.name);
  }
  return absl::StrJoin(names, ", ");
}
std::string KindList() {
  return absl::StrJoin(kFaultKindWords, ", ",
                       [](std::string* out, const auto& kind) { out->append(kind.word); });
}

absl::StatusOr<FaultKind> KindOf(absl::string_view where, absl::string_view word) {
  const std::string lower = absl::AsciiStrToLower(word);
  if (const auto kind = ValueOf(lower, kFaultKindWords)) return *kind;
  if (const auto kind = ValueOf(lower, kMegatronWords)) return *kind;
  return WrongFlag(where, absl::StrCat("'", word, "'"), absl::StrCat("one of ", KindList()));
}

absl::StatusOr<int> RankOf(absl::string_view where, absl::string_view text, int ranks) {
  int rank = 0;
  if (absl::SimpleAtoi(text, &rank) && rank >= 0 && rank < ranks) return rank;
  return WrongFlag(where, absl::StrCat("'", text, "'"), absl::StrCat("a rank, 0 to ", ranks - 1));
}

// "rank=1,step=5,phase=dispatch,kind=hang".
absl::StatusOr<Fault> FaultOfText(const std::string& where, absl::string_view text, int ranks) {
  Fault fault;
  const FaultPhase* phase = nullptr;
  bool kind_given = false;
  std::vector<absl::string_view> keys;
  for (const absl::string_view item : absl::StrSplit(text, ',')) {
    const std::pair<absl::string_view, absl::string_view> both =
        absl::StrSplit(item, absl::MaxSplits('=', 1));
    const absl::string_view key = both.first, value = both.second;
    const std::string at = absl::StrCat(where, ": ", key);
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) {
      return WrongFlag(where, absl::StrCat("'", text, "'"), absl::StrCat(key, "= once"));
    }
    keys.push_back(key);
    if (key == "rank") {
      MOE_ASSIGN_OR_RETURN(const int rank, RankOf(at, value, ranks));
      fault.ranks.push_back(rank);
    } else if (key == "step") {
      if (!absl::SimpleAtoi(value, &fault.step) || fault.step < 1) {
        return WrongFlag(at, absl::StrCat("'", value, "'"), "a step, from 1");
      }
    } else if (key == "micro-batch") {
      if (!absl::SimpleAtoi(value, &fault.micro_batch) || fault.micro_batch < 0) {
        return WrongFlag(at, absl::StrCat("'", value, "'"), "a micro-batch of a step, from 0");
      }
    } else if (key == "phase") {
      phase = std::find_if(std::begin(kPhases), std::end(kPhases),
                           [&](const FaultPhase& each) { return value == each.name; });
      if (phase == std::end(kPhases)) {
        return WrongFlag(at, absl::StrCat("'", value, "'"), absl::StrCat("one of ", PhaseList()));
      }
      fault.phase = std::string(value);
    } else if (key == "kind") {
      MOE_ASSIGN_OR_RETURN(fault.kind, KindOf(at, value));
      kind_given = true;
    } else {
      return WrongFlag(where, absl::StrCat("'", text, "'"),
                       "rank=R,step=N,micro-batch=N,phase=NAME,kind=NAME");
    }
  }
  if (!fault.ranks.empty() && phase != nullptr && kind_given) {
    if (Fits(fault.kind, *phase)) return fault;
    return WrongFlag(absl::StrCat(where, ": phase"), absl::StrCat("'", fault.phase, "'"),
                     absl::StrCat("with kind=", NameOf(fault.kind, kFaultKindWords), " one of ",
                                  PhaseList(fault.kind)));
  }
  return WrongFlag(where, absl::StrCat("'", text, "'"),
                   absl::StrCat("rank=R,phase=NAME,kind=NAME and, if wanted, step=N and, in "
                                "pipelines, micro-batch=N; phases: ",
                                PhaseList(), "; kinds: ", KindList()));
}

// In the step after --fault-injector-delay-start-iteration; the seed draws what and where.
absl::StatusOr<Fault> FaultOfMegatron(const Settings& settings, int ranks) {
  Fault fault;
  const std::string& list = settings.text("fault-injector-ranks");
  for (const absl::string_view text : absl::StrSplit(list, ',')) {
    MOE_ASSIGN_OR_RETURN(const int rank, RankOf("--fault-injector-ranks", text, ranks));
    fault.ranks.push_back(rank);
  }
  std::vector<FaultKind> kinds;
  const std::string& types = settings.text("fault-injector-fault-types");
  for (const absl::string_view word : absl::StrSplit(types, ',')) {
    MOE_ASSIGN_OR_RETURN(const FaultKind kind, KindOf("--fault-injector-fault-types", word));
    kinds.push_back(kind);
  }
  std::mt19937_64 draw(settings.seed("fault-injector-seed"));
  fault.kind = kinds[draw() % kinds.size()];
  std::vector<const char*> phases;
  for (const FaultPhase& phase : kPhases) {
    if (phase.in_steps && Fits(fault.kind, phase)) phases.push_back(phase.name);
  }
  fault.phase = phases[draw() % phases.size()];
  fault.step = int64_t{settings.integer("fault-injector-delay-start-iteration")} + 1;
  return fault;
}

}  // namespace

void AddFaultSettings(Table& t) {
  t.Add("--fault SPEC", Kind::kText,
        absl::StrCat("for tests, rank=R,step=N,phase=NAME,kind=NAME: rank R, as it first comes to "
                     "the phase in step N or later, in pipelines with micro-batch=N, does what the "
                     "kind says: ",
                     KindList(), " (docs/reliability.md)"));
  t.Add("--fault-injector-ranks LIST", Kind::kText,
        "for tests, Megatron's: ranks of a fault, between commas");
  t.Add("--fault-injector-fault-types LIST", {Kind::kText, "throw"},
        "kinds of which the seed draws one");
  t.Add("--fault-injector-delay-start-iteration N", {Kind::kInteger, "0"},
        "the fault comes in the step after step N")
      .Least(0);
  t.Add("--fault-injector-seed N", {Kind::kSeed, "0"}, "draws the kind, and the phase of the step");
}

absl::StatusOr<Fault> FaultOf(const Settings& settings, int ranks) {
  const bool given = !settings.empty("fault"), megatron = !settings.empty("fault-injector-ranks");
  if (given && megatron) {
    return WrongValue(settings, "fault", "none beside --fault-injector-ranks");
  }
  if (given) {
    MOE_ASSIGN_OR_RETURN(const Fault fault,
                         FaultOfText(settings.value("fault").where, settings.text("fault"), ranks));
    if (!ReplacementOf(fault.kind).has_value() || settings.text("device") == "cpu") return fault;
    return WrongValue(settings, "fault", "values replaced with --device cpu alone");
  }
  for (const char* const name : {"fault-injector-fault-types", "fault-injector-seed",
                                 "fault-injector-delay-start-iteration"}) {
    // The settings of a run's first line, as --config, give the defaults.
    if (settings.text(name) != settings.Find(name)->fallback && !megatron) {
      return WrongValue(settings, name, "--fault-injector-ranks beside it");
    }
  }
  return megatron ? FaultOfMegatron(settings, ranks) : Fault();
}

}  // namespace moe::cli
