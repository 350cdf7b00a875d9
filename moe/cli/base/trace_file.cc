#include "moe/cli/base/trace_file.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/program.h"

namespace moe::cli {
namespace {

constexpr char kName[] = "trace";
constexpr char kTraceFlag[] = "--trace";

}  // namespace

void AddTraceSetting(const char* what, Table& table) {
  table
      .Add("--trace FILE", Kind::kText,
           absl::StrCat("time line of ", what,
                        " for ui.perfetto.dev, a lane for each rank and stream"))
      .Roles(kInRow | kPerRank);  // given on all or none: CheckTraceOnAll
}

absl::Status CheckTraceWritable(const Settings& settings) {
  return settings.empty(kName) ? absl::OkStatus() : CheckWritable(kTraceFlag, settings.text(kName));
}

absl::Status TraceFile::Append(absl::string_view text) {
  if (!file_.has_value()) {
    auto file = WholeFile::Create(path_, deadline_ / 2);
    MOE_RETURN_IF_ERROR(WriteError(kTraceFlag, path_, file.status()));
    file_ = *std::move(file);
  }
  const absl::Status status = WriteError(kTraceFlag, path_, file_->Append(text));
  if (!status.ok()) file_.reset();  // an error may end the process without destructors
  return status;
}

absl::Status TraceFile::Commit() {
  const absl::Status status = WriteError(kTraceFlag, path_, file_->Commit());
  file_.reset();
  return status;
}

absl::StatusOr<std::unique_ptr<RankTrace>> RankTrace::Create(const std::string& path,
                                                             Communicator& world) {
  // Otherwise ranks with a path would wait in the split below for those without.
  MOE_RETURN_IF_ERROR(CheckTraceOnAll(!path.empty(), world));
  auto trace = std::unique_ptr<RankTrace>(new RankTrace(path.empty() ? 0 : kTraceEvents));
  if (path.empty()) return trace;
  trace->recorder_.Switch(true);
  trace->file_ = std::make_unique<TraceFile>(path, world.timeout());
  MOE_ASSIGN_OR_RETURN(trace->world_, world.Split(0, world.rank()));
  return trace;
}

absl::Status RankTrace::Write() {
  if (file_ == nullptr) return absl::OkStatus();
  const auto stream = MakeInlineStream();
  MOE_ASSIGN_OR_RETURN(const int64_t left_out,
                       ExportTrace(recorder_, file_.get(), *world_, *stream));
  if (world_->rank() == 0 && left_out > 0) {
    PrintWarnings("bench", {TraceWarning(left_out)});
  }
  return absl::OkStatus();
}

std::string TraceWarning(int64_t left_out) {
  if (left_out == 0) return {};
  return absl::StrCat("--trace: ", left_out,
                      " events did not fit into memory and are left out: trace less");
}

}  // namespace moe::cli
