// Settings of a run by name: the field that holds each, its text, and what follows when a run
// resumes with another value.
#ifndef MOE_MOE_RUN_SETTINGS_H_
#define MOE_MOE_RUN_SETTINGS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <absl/strings/string_view.h>

#include "kernels/base/choice.h"
#include "kernels/base/dtype.h"
#include "kernels/grouped_gemm/gemm_options.h"

namespace moe {

// What follows if a run resumes with another value.
enum class SettingKind : uint8_t {
  kLayout,     // nothing: the bits do not depend on it
  kNumerics,   // other bits from the next step on
  kModel,      // another model: the checkpoint does not fit
  kOptimizer,  // another training, as asked for
  kTrainer,
  kData,
};

// A field of an enumeration, and the words of its values.
struct EnumField {
  template <typename E, size_t N>
  EnumField(E* field, const Choice<E> (&table)[N]) : at(reinterpret_cast<uint8_t*>(field)) {
    static_assert(sizeof(E) == 1);  // so that the field may be read and written as a byte
    for (const Choice<E>& choice : table) {
      words.push_back({choice.word, static_cast<uint8_t>(choice.value)});
    }
  }
  uint8_t* at;
  std::vector<Choice<uint8_t>> words;
};

// A text that is compared only by whether it is empty. Files do not hold it.
struct GivenField {
  std::string* at;
};

// The place of a value. A const int is the program's own: reading accepts any number and keeps it.
using Field =
    std::variant<bool*, int*, const int*, int64_t*, uint64_t*, float*, double*, std::string*,
                 DType*, std::vector<int32_t>*, std::optional<bool>*, std::optional<int>*,
                 std::optional<int64_t>*, std::optional<float>*, std::optional<double>*,
                 std::optional<BFloat16Order>*, EnumField, GivenField>;

// The text in files and comparisons: whole numbers in decimal (unsigned ones as signed),
// enumerations as their number, a DType and a BFloat16Order as its name, real numbers in
// hexadecimal, an optional value that is left out as -1.
std::string FieldText(const Field& field);
// Sets the field to the value of such a text; false if it is none, and the field is then undefined.
bool SetField(const Field& field, const std::string& text);

struct SettingRow {
  const char* name;  // a flag, "--seq-length", or a field
  SettingKind kind;
  Field field;
  // Text assumed for a checkpoint without this row, which an older program wrote; empty: such a
  // checkpoint does not match.
  std::string before = {};
};

// Rows in the order in which differences are reported: a setting that presets others comes first.
class SettingRows {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): a list of rows
  SettingRows(std::vector<SettingRow> rows) : rows_(std::move(rows)) {}

  auto begin() const { return rows_.begin(); }
  auto end() const { return rows_.end(); }
  // The field of the row with this name, which must exist.
  const Field& operator[](absl::string_view name) const;

 private:
  std::vector<SettingRow> rows_;
};

}  // namespace moe

#endif  // MOE_MOE_RUN_SETTINGS_H_
