#include "moe/io/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"

namespace moe {
namespace {

using Json = nlohmann::json;

absl::Status Bad(const std::string& name, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("tensor '", Shown(name), "': ", what));
}

std::string Quoted(absl::string_view text) {
  return absl::StrCat("'", Shown(text), "'");
}
std::string TextOf(const Json& scalar) {
  return scalar.is_string() ? Quoted(scalar.get_ref<const std::string&>()) : scalar.dump();
}

// The number of elements, or an error: zeros may not hide a product that overflows, since readers
// compute products of parts of a shape.
absl::StatusOr<int64_t> ElementsOf(const std::string& name, absl::Span<const int64_t> shape) {
  int64_t product = 1;
  bool empty = false;
  for (const int64_t dim : shape) {
    empty = empty || dim == 0;
    if (dim != 0 && __builtin_mul_overflow(product, dim, &product)) {
      return Bad(name, absl::StrCat("shape [", absl::StrJoin(shape, ","),
                                    "], expected a product below 2^63"));
    }
  }
  return empty ? 0 : product;
}

// Builds a header from its events.
class HeaderEvents : public JsonEvents {
 public:
  HeaderEvents(SafetensorsHeader& header, int64_t data_bytes)
      : header_(header), data_bytes_(data_bytes) {}

  absl::Status BeginObject() override;
  absl::Status BeginList() override;
  absl::Status End() override;
  absl::Status Key(std::string name) override;
  absl::Status Scalar(Json value) override;

 private:
  enum class Place : uint8_t { kOutside, kTensors, kMetadata, kTensor, kShape, kOffsets };
  enum Field : uint8_t { kNone = 0, kType = 1, kShapeField = 2, kOffsetsField = 4, kAll = 7 };

  SafetensorsTensor& tensor() { return header_.tensors.back(); }
  absl::Status Unexpected(absl::string_view what);
  absl::Status BeginTensor();
  absl::Status TensorKey(absl::string_view name);
  absl::Status TypeIs(const Json& value);
  absl::Status Number(const Json& value);
  absl::Status EndTensor();

  SafetensorsHeader& header_;
  const int64_t data_bytes_;
  Place place_ = Place::kOutside;
  std::string key_;  // key of the tensor or metadata
  Field field_ = kNone;
  bool has_metadata_ = false;
  int fields_ = 0;  // fields of this tensor seen so far
  std::vector<int64_t> numbers_;
};

absl::Status HeaderEvents::Unexpected(absl::string_view what) {
  switch (place_) {
    case Place::kOutside:
      return absl::DataLossError(
          absl::StrCat("the header is ", what, ", expected an object of tensors"));
    case Place::kTensors:
      return Bad(key_, absl::StrCat(what, ", expected an object"));
    case Place::kMetadata:
      return absl::DataLossError(
          absl::StrCat("metadata '", Shown(key_), "': ", what, ", expected a string"));
    case Place::kTensor:
      if (field_ == kType) return Bad(key_, absl::StrCat("dtype ", what, ", expected a string"));
      return Bad(key_, absl::StrCat(field_ == kShapeField ? "shape " : "data_offsets ", what,
                                    ", expected a list of whole numbers"));
    case Place::kShape:
      return Bad(key_, absl::StrCat("shape with ", what, ", expected whole numbers below 2^63"));
    case Place::kOffsets:
      break;
  }
  return Bad(key_, absl::StrCat("data_offsets with ", what, ", expected whole numbers below 2^63"));
}

absl::Status HeaderEvents::BeginObject() {
  if (place_ == Place::kOutside) {
    place_ = Place::kTensors;
    return absl::OkStatus();
  }
  if (place_ != Place::kTensors) return Unexpected("an object");
  if (key_ != kSafetensorsMetadataKey) return BeginTensor();
  place_ = Place::kMetadata;
  return absl::OkStatus();
}

absl::Status HeaderEvents::BeginList() {
  if (place_ != Place::kTensor || field_ == kType) return Unexpected("a list");
  numbers_.clear();
  place_ = field_ == kShapeField ? Place::kShape : Place::kOffsets;
  return absl::OkStatus();
}

absl::Status HeaderEvents::BeginTensor() {
  if (static_cast<int64_t>(header_.tensors.size()) == kMaxSafetensorsTensors) {
    return absl::DataLossError(
        absl::StrCat("more than ", kMaxSafetensorsTensors, " tensors, expected at most that"));
  }
  header_.tensors.push_back({.name = key_});
  fields_ = 0;
  place_ = Place::kTensor;
  return absl::OkStatus();
}

absl::Status HeaderEvents::End() {
  switch (place_) {
    case Place::kShape:
      tensor().shape = numbers_;
      place_ = Place::kTensor;
      return absl::OkStatus();
    case Place::kOffsets:
      if (numbers_.size() != 2) {
        return Bad(key_, absl::StrCat("data_offsets of ", numbers_.size(), " numbers, expected 2"));
      }
      tensor().begin_bytes = numbers_[0];
      // The end for now; EndTensor checks it.
      tensor().size_bytes = numbers_[1];
      place_ = Place::kTensor;
      return absl::OkStatus();
    case Place::kTensor:
      place_ = Place::kTensors;
      return EndTensor();
    case Place::kMetadata:
      place_ = Place::kTensors;
      return absl::OkStatus();
    case Place::kTensors:
    case Place::kOutside:
      break;
  }
  place_ = Place::kOutside;
  return absl::OkStatus();
}

absl::Status HeaderEvents::Key(std::string name) {
  if (place_ == Place::kTensor) return TensorKey(name);
  if (place_ == Place::kTensors) {
    if (static_cast<int64_t>(name.size()) > kMaxSafetensorsNameBytes) {
      return Bad(name, absl::StrCat("a name of ", name.size(), " bytes, expected at most ",
                                    kMaxSafetensorsNameBytes));
    }
    if (name == kSafetensorsMetadataKey && std::exchange(has_metadata_, true)) {
      return absl::DataLossError("__metadata__ stands there twice, expected once");
    }
  }
  if (place_ == Place::kMetadata && header_.metadata.contains(name)) {
    return absl::DataLossError(
        absl::StrCat("metadata ", Quoted(name), " stands there twice, expected once"));
  }
  key_ = std::move(name);
  return absl::OkStatus();
}

absl::Status HeaderEvents::TensorKey(absl::string_view name) {
  field_ = name == "dtype"          ? kType
           : name == "shape"        ? kShapeField
           : name == "data_offsets" ? kOffsetsField
                                    : kNone;
  if (field_ == kNone) {
    return Bad(key_,
               absl::StrCat("key ", Quoted(name), ", expected dtype, shape and data_offsets"));
  }
  if ((fields_ & field_) != 0)
    return Bad(key_, absl::StrCat(name, " stands there twice, expected once"));
  fields_ |= field_;
  return absl::OkStatus();
}

absl::Status HeaderEvents::Scalar(Json value) {
  if (place_ == Place::kShape || place_ == Place::kOffsets) return Number(value);
  if (place_ == Place::kTensor && field_ == kType && value.is_string()) return TypeIs(value);
  if (place_ != Place::kMetadata || !value.is_string()) {
    return Unexpected(TextOf(value));
  }
  if (static_cast<int64_t>(header_.metadata.size()) == kMaxSafetensorsMetadata) {
    return absl::DataLossError(
        absl::StrCat("more than ", kMaxSafetensorsMetadata, " metadata, expected at most that"));
  }
  header_.metadata.emplace(std::move(key_), std::move(value.get_ref<std::string&>()));
  return absl::OkStatus();
}

absl::Status HeaderEvents::TypeIs(const Json& value) {
  const auto& name = value.get_ref<const std::string&>();
  std::string names;
  for (int i = 0; i < kNumSafetensorsTypes; ++i) {
    const auto type = static_cast<SafetensorsType>(i);
    if (name == NameOf(type)) {
      tensor().type = type;
      return absl::OkStatus();
    }
    absl::StrAppend(&names, " ", NameOf(type));
  }
  return Bad(key_, absl::StrCat("dtype ", Quoted(name), ", expected one of", names));
}

absl::Status HeaderEvents::Number(const Json& value) {
  if (!value.is_number_unsigned() ||
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return Unexpected(TextOf(value));
  }
  // Offsets have 2 numbers: this list, too, may not grow with the file.
  if (static_cast<int64_t>(numbers_.size()) == kMaxSafetensorsRank) {
    return Bad(key_, absl::StrCat(place_ == Place::kShape ? "shape" : "data_offsets",
                                  " of more than ", kMaxSafetensorsRank, " numbers, expected ",
                                  place_ == Place::kShape ? "at most that" : "2"));
  }
  numbers_.push_back(static_cast<int64_t>(value.get<uint64_t>()));
  return absl::OkStatus();
}

absl::Status HeaderEvents::EndTensor() {
  if (fields_ != kAll) {
    return Bad(key_, absl::StrCat((fields_ & kType) == 0         ? "no dtype"
                                  : (fields_ & kShapeField) == 0 ? "no shape"
                                                                 : "no data_offsets",
                                  ", expected dtype, shape and data_offsets"));
  }
  SafetensorsTensor& t = tensor();
  const int64_t end_bytes = t.size_bytes;
  if (t.begin_bytes > end_bytes || end_bytes > data_bytes_) {
    return Bad(t.name,
               absl::StrCat("data_offsets [", t.begin_bytes, ",", end_bytes,
                            "], expected a range in the ", data_bytes_, " bytes after the header"));
  }
  t.size_bytes = end_bytes - t.begin_bytes;
  MOE_ASSIGN_OR_RETURN(t.num_elements, ElementsOf(t.name, t.shape));
  int64_t bits = 0;
  const bool fits = !__builtin_mul_overflow(t.num_elements, BitsOf(t.type), &bits);
  if (fits && bits % 8 == 0 && bits / 8 == t.size_bytes) return absl::OkStatus();
  return Bad(t.name, absl::StrCat("data of ", t.size_bytes, " bytes, expected ", t.num_elements,
                                  " elements of ", BitsOf(t.type), " bits (", NameOf(t.type), " [",
                                  absl::StrJoin(t.shape, ","), "])"));
}

// Checks that names are unique and data is contiguous.
absl::Status CheckTogether(const std::vector<SafetensorsTensor>& tensors, int64_t data_bytes) {
  const auto same = [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    return a.name == b.name;
  };
  const auto twice = std::adjacent_find(tensors.begin(), tensors.end(), same);
  if (twice != tensors.end()) return Bad(twice->name, "stands there twice, expected once");
  std::vector<int32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    // Among tensors with the same begin the empty ones come first.
    return std::pair(tensors[a].begin_bytes, tensors[a].size_bytes) <
           std::pair(tensors[b].begin_bytes, tensors[b].size_bytes);
  });
  int64_t end_bytes = 0;
  for (const int32_t i : order) {
    const SafetensorsTensor& t = tensors[i];
    if (t.begin_bytes != end_bytes) {
      return Bad(t.name, absl::StrCat("data from byte ", t.begin_bytes, ", expected from byte ",
                                      end_bytes, ", where the tensor before it ends"));
    }
    end_bytes += t.size_bytes;
  }
  if (end_bytes == data_bytes) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(data_bytes, " bytes after the header, expected ",
                                          end_bytes, ", where the last tensor ends"));
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view file,
                                                         absl::string_view text,
                                                         int64_t data_bytes) {
  if (text.empty() || text.front() != '{') {
    return absl::DataLossError(absl::StrCat(file, ": the header starts with '",
                                            Shown(text.substr(0, 1)), "', expected '{'"));
  }
  // Trailing padding may be long; gaps inside may not.
  text = text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
  SafetensorsHeader header;
  HeaderEvents events(header, data_bytes);
  const JsonLimits limits = {.max_bytes = kMaxSafetensorsHeaderBytes,
                             // The grammar has tighter bounds: see Number, BeginTensor, Scalar.
                             .max_values = std::numeric_limits<int64_t>::max(),
                             .max_depth = 4};
  MOE_RETURN_IF_ERROR(ReadJsonEvents(file, text, limits, events));
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  if (absl::Status status = CheckTogether(header.tensors, data_bytes); !status.ok()) {
    return absl::DataLossError(absl::StrCat(file, ": ", status.message()));
  }
  return header;
}

}  // namespace moe
