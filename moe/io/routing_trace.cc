#include "moe/io/routing_trace.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"

namespace moe {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kSchema = "moe.routing/1";
constexpr int64_t kMostInt = std::numeric_limits<int>::max();

// Values of a line: an object and lists, two values each for keys and lists that are not numbers.
constexpr JsonLimits kLineLimits = {.max_bytes = kTraceMostLineBytes,
                                    .max_values = kTraceMostCells + 3 * kTraceMostRanks + 32,
                                    .max_depth = 4,
                                    .max_token_bytes = 4096};

absl::Status Bad(absl::string_view what) {
  return absl::DataLossError(what);
}

absl::StatusOr<int64_t> Whole(const Json& value, absl::string_view what, int64_t least,
                              int64_t most) {
  const std::optional<int64_t> number = IntegerWithin(value, least, most);
  if (number.has_value()) return *number;
  return Bad(absl::StrCat(what, " is ", Shown(value.dump(), 40), ", expected a whole number from ",
                          least, " to ", most));
}

// An object with these keys and no others.
absl::Status CheckKeys(const Json& object, std::initializer_list<const char*> keys) {
  if (!object.is_object()) return Bad("not a JSON object");
  for (const char* key : keys) {
    if (!object.contains(key)) return Bad(absl::StrCat("no '", key, "'"));
  }
  for (const auto& [key, value] : object.items()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    return Bad(
        absl::StrCat("unknown key '", Shown(key), "', expected ", absl::StrJoin(keys, ", ")));
  }
  return absl::OkStatus();
}

absl::StatusOr<RoutingTraceHeader> ReadHeader(const Json& line) {
  // Checked first, for the clearest message if the file is of another kind.
  if (!line.is_object() || !line.contains("schema") || line["schema"] != std::string(kSchema)) {
    return Bad(absl::StrCat("no recorded routing, expected {\"schema\":\"", kSchema, "\",...}"));
  }
  MOE_RETURN_IF_ERROR(CheckKeys(line, {"schema", "ranks", "expert_parallel_size", "num_experts",
                                       "topk", "hidden_size", "dtype", "moe_layers"}));
  RoutingTraceHeader header;
  const auto read = [&](const char* key, int64_t most, auto& field) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const int64_t number, Whole(line[key], key, 1, most));
    field = static_cast<std::remove_reference_t<decltype(field)>>(number);
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(read("ranks", kTraceMostRanks, header.ranks));
  MOE_RETURN_IF_ERROR(read("expert_parallel_size", header.ranks, header.expert_parallel_size));
  MOE_RETURN_IF_ERROR(read("num_experts", kTraceMostExperts, header.num_experts));
  MOE_RETURN_IF_ERROR(read("topk", header.num_experts, header.top_k));
  MOE_RETURN_IF_ERROR(read("hidden_size", kTraceMostHidden, header.hidden_size));
  MOE_RETURN_IF_ERROR(read("moe_layers", kMostInt, header.moe_layers));
  if (header.ranks % header.expert_parallel_size != 0) {
    return Bad(absl::StrCat("expert_parallel_size is ", header.expert_parallel_size,
                            ", expected a divisor of the ", header.ranks, " ranks"));
  }
  if (int64_t{header.ranks} * header.num_experts > kTraceMostCells) {
    return Bad(absl::StrCat(header.ranks, " ranks x ", header.num_experts,
                            " experts, expected at most ", kTraceMostCells, " counts"));
  }
  const Json& dtype = line["dtype"];
  if (dtype == "bf16") {
    header.dtype = DType::kBFloat16;
  } else if (dtype == "f16") {
    header.dtype = DType::kFloat16;
  } else if (dtype != "f32") {
    return Bad(absl::StrCat("dtype is ", Shown(dtype.dump(), 40),
                            ", expected \"f32\", \"bf16\" or \"f16\""));
  }
  return header;
}

absl::Status CheckLength(const Json& list, absl::string_view what, int64_t length) {
  if (list.is_array() && list.size() == static_cast<size_t>(length)) return absl::OkStatus();
  return Bad(absl::StrCat(what, " is ",
                          list.is_array() ? absl::StrCat("a list of ", list.size()) : "no list",
                          ", expected a list of ", length));
}

absl::StatusOr<RoutingTraceRecord> ReadRecord(const Json& line, const RoutingTraceHeader& header) {
  MOE_RETURN_IF_ERROR(CheckKeys(line, {"step", "layer", "tokens", "slots"}));
  RoutingTraceRecord record;
  MOE_ASSIGN_OR_RETURN(record.step,
                       Whole(line["step"], "step", 0, std::numeric_limits<int64_t>::max()));
  MOE_ASSIGN_OR_RETURN(const int64_t layer,
                       Whole(line["layer"], "layer", 0, header.moe_layers - 1));
  record.layer = static_cast<int>(layer);
  MOE_RETURN_IF_ERROR(CheckLength(line["tokens"], "tokens", header.ranks));
  MOE_RETURN_IF_ERROR(CheckLength(line["slots"], "slots", header.ranks));
  int64_t room = kTraceMostTokens;
  for (int r = 0; r < header.ranks; ++r) {
    MOE_ASSIGN_OR_RETURN(const int64_t tokens,
                         Whole(line["tokens"][r], absl::StrCat("tokens[", r, "]"), 0, room));
    room -= tokens;
    record.tokens.push_back(tokens);
    const Json& row = line["slots"][r];
    MOE_RETURN_IF_ERROR(CheckLength(row, absl::StrCat("slots[", r, "]"), header.num_experts));
    for (int e = 0; e < header.num_experts; ++e) {
      const std::optional<int64_t> slots = IntegerWithin(row[e], 0, tokens);
      // Names are only made for errors: there are millions of counts.
      if (!slots.has_value()) {
        return Whole(row[e], absl::StrCat("slots[", r, "][", e, "]"), 0, tokens).status();
      }
      record.slots.push_back(*slots);
    }
  }
  return record;
}

// Adds the record of a line.
class TraceReader {
 public:
  absl::Status Line(absl::string_view text) {
    auto parsed = ParseBoundedJson("JSON", text, kLineLimits);
    if (!parsed.ok()) return parsed.status();
    if (!header_.has_value()) {
      MOE_ASSIGN_OR_RETURN(header_, ReadHeader(*parsed));
      return absl::OkStatus();
    }
    if (static_cast<int64_t>(records_.size()) == kTraceMostRecords) {
      return Bad(absl::StrCat("more than ", kTraceMostRecords,
                              " records, expected fewer: keep a part of the steps"));
    }
    MOE_ASSIGN_OR_RETURN(RoutingTraceRecord record, ReadRecord(*parsed, *header_));
    if (!records_.empty() && std::pair(record.step, record.layer) <=
                                 std::pair(records_.back().step, records_.back().layer)) {
      return Bad(absl::StrCat("step ", record.step, ", layer ", record.layer, " after step ",
                              records_.back().step, ", layer ", records_.back().layer,
                              ", expected steps and their layers in ascending order"));
    }
    numbers_ += static_cast<int64_t>(record.slots.size() + record.tokens.size());
    if (numbers_ > kTraceMostNumbers) {
      return Bad(absl::StrCat("more than ", kTraceMostNumbers,
                              " counts in all, expected fewer: keep a part of the steps"));
    }
    records_.push_back(std::move(record));
    return absl::OkStatus();
  }

  absl::StatusOr<RoutingTrace> Finish() && {
    if (!header_.has_value()) return Bad("an empty file");
    if (records_.empty()) return Bad("no records after the header");
    return RoutingTrace{*header_, std::move(records_)};
  }

 private:
  std::optional<RoutingTraceHeader> header_;
  std::vector<RoutingTraceRecord> records_;
  int64_t numbers_ = 0;
};

absl::Status At(absl::string_view file, int64_t line, const absl::Status& status) {
  return {status.code(), absl::StrCat(file, ":", line, ": ", status.message())};
}

std::string ListText(absl::Span<const int64_t> values) {
  return absl::StrCat("[", absl::StrJoin(values, ","), "]");
}

}  // namespace

std::string HeaderLine(const RoutingTraceHeader& header) {
  return absl::StrCat("{\"schema\":\"", kSchema, "\",\"ranks\":", header.ranks,
                      ",\"expert_parallel_size\":", header.expert_parallel_size,
                      ",\"num_experts\":", header.num_experts, ",\"topk\":", header.top_k,
                      ",\"hidden_size\":", header.hidden_size, ",\"dtype\":\"",
                      NameOf(header.dtype), "\",\"moe_layers\":", header.moe_layers, "}\n");
}

absl::Status CheckRoutingTraceFits(const RoutingTraceHeader& header, int64_t steps,
                                   int64_t tokens_per_step) {
  const auto ranks = static_cast<double>(header.ranks);
  const auto cells = ranks * header.num_experts;
  const auto records = static_cast<double>(steps) * header.moe_layers;
  const struct {
    const char* what;
    double value;
    int64_t most;
  } limits[] = {{"ranks", ranks, kTraceMostRanks},
                {"experts", static_cast<double>(header.num_experts), kTraceMostExperts},
                {"counts a record, ranks x experts,", cells, kTraceMostCells},
                {"columns of a row", static_cast<double>(header.hidden_size), kTraceMostHidden},
                {"tokens a step", static_cast<double>(tokens_per_step), kTraceMostTokens},
                {"records, steps x MoE layers,", records, kTraceMostRecords},
                {"counts in all, records x ranks x (experts + 1),", records * (cells + ranks),
                 kTraceMostNumbers}};
  for (const auto& limit : limits) {
    if (limit.value <= static_cast<double>(limit.most)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(absl::StrFormat("%.0f ", limit.value), limit.what,
                     " is more than can be read back, expected at most ", limit.most));
  }
  return absl::OkStatus();
}

std::string RecordLine(const RoutingTraceRecord& record) {
  const auto ranks = static_cast<int>(record.tokens.size());
  const auto experts = ranks == 0 ? 0 : static_cast<int>(record.slots.size()) / ranks;
  std::string text = absl::StrCat("{\"step\":", record.step, ",\"layer\":", record.layer,
                                  ",\"tokens\":", ListText(record.tokens), ",\"slots\":[");
  for (int r = 0; r < ranks; ++r) {
    absl::StrAppend(&text, r == 0 ? "" : ",", ListText(record.of_rank(r, experts)));
  }
  absl::StrAppend(&text, "]}\n");
  return text;
}

absl::StatusOr<RoutingTrace> ParseRoutingTrace(absl::string_view file, absl::string_view text) {
  if (static_cast<int64_t>(text.size()) > kTraceMostBytes) {
    return Bad(absl::StrCat(file, ": ", text.size(), " bytes, expected at most ", kTraceMostBytes,
                            ": keep a part of the steps"));
  }
  TraceReader reader;
  int64_t number = 0;
  while (!text.empty()) {
    // A line that is too long is refused by its first bytes.
    const absl::string_view longest = text.substr(0, kTraceMostLineBytes + 1);
    const size_t end = std::min(longest.find('\n'), longest.size());
    ++number;
    if (const absl::Status read = reader.Line(text.substr(0, end)); !read.ok()) {
      return At(file, number, read);
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  auto trace = std::move(reader).Finish();
  if (!trace.ok()) return At(file, number + 1, trace.status());
  return trace;
}

}  // namespace moe
