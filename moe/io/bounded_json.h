// JSON from untrusted files: bounded in size, depth, values and memory, keys unique. Not installed:
// users of the package need no nlohmann-json.
#ifndef MOE_MOE_IO_BOUNDED_JSON_H_
#define MOE_MOE_IO_BOUNDED_JSON_H_

#include <cstdint>
#include <optional>
#include <string>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include <nlohmann/json_fwd.hpp>

namespace moe {

struct JsonLimits {
  int64_t max_bytes = int64_t{64} << 20;
  int64_t max_values = int64_t{1} << 19;  // scalars, objects and lists
  int max_depth = 32;                     // objects and lists around a scalar
  // A string or number, or the text between two of them, where an end of line or a tab counts as
  // eight bytes. The lexer buffers that much, so that this also bounds its memory.
  int64_t max_token_bytes = int64_t{2} << 20;
  // Whether NaN, Infinity and -Infinity, which Python writes for numbers that JSON lacks, are read
  // as texts of these names; malformed otherwise.
  bool non_finite_as_text = false;
};

// Receives a document's events in order. An error ends the reading; its message becomes the reason
// in the error of ReadJsonEvents.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual absl::Status BeginObject() = 0;
  virtual absl::Status BeginList() = 0;
  virtual absl::Status End() = 0;
  // A key may occur twice in one object: the receiver must refuse it.
  virtual absl::Status Key(std::string name) = 0;
  virtual absl::Status Scalar(nlohmann::json value) = 0;
};

// Reads `document` (RFC 8259, UTF-8) into `events`. `file` is the name used in messages. kDataLoss
// "<file>: <reason> (line L, column C)" for malformed JSON, anything beyond `limits`, and errors of
// `events`. kResourceExhausted without memory. Memory beside that of `events` is at most
// kJsonReaderTokens * limits.max_token_bytes + 64 KiB, whatever the document.
absl::Status ReadJsonEvents(absl::string_view file, absl::string_view document,
                            const JsonLimits& limits, JsonEvents& events);

// Two buffers of the lexer, each doubled while it grows, and copies of both in its message if a
// token is malformed.
inline constexpr int64_t kJsonReaderTokens = 12;

// The document as a value. Errors as above; a key that occurs twice in an object is kDataLoss.
absl::StatusOr<nlohmann::json> ParseBoundedJson(absl::string_view file, absl::string_view document,
                                                const JsonLimits& limits = {});

// Passes each row to `on_row` as it ends, so that errors in a row are reported at its position.
// Rows are the elements of a list, the lines of a document whose first one is a whole object, each
// within `limits`, or the document itself. Errors as above, and those of `on_row`.
absl::Status ReadJsonRows(absl::string_view file, absl::string_view document,
                          const JsonLimits& limits,
                          absl::FunctionRef<absl::Status(nlohmann::json row)> on_row);

// A whole number from `least` to `most`, else nullopt.
std::optional<int64_t> IntegerWithin(const nlohmann::json& value, int64_t least, int64_t most);

// Text as a JSON string, in quotes. kInvalidArgument unless it is UTF-8.
absl::StatusOr<std::string> JsonString(const std::string& text);

// Text of an untrusted file for a message: escaped, and cut to `max_bytes`.
std::string Shown(absl::string_view text, int64_t max_bytes = 120);

}  // namespace moe

#endif  // MOE_MOE_IO_BOUNDED_JSON_H_
