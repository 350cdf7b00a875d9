// ParseManifest: builds a manifest, or the reason for refusing it, from the events of its JSON.
#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/checkpoint/manifest.h"
#include "moe/checkpoint/manifest_format.h"
#include "moe/io/bounded_json.h"

namespace moe {
namespace {

using Json = nlohmann::json;

// Keys of the objects in the document, in their order.
constexpr std::array<const char*, 3> kTensorKeys = {"dtype", "shape", "states"};
constexpr std::array<const char*, 3> kFileKeys = {"name", "bytes", "header_xxh3"};
constexpr std::array<const char*, 5> kBoxKeys = {"tensor", "state", "box", "file", "xxh3"};

constexpr size_t kMaxStates = 8;  // states of one tensor
constexpr size_t kMaxStateBytes = 64;
constexpr size_t kMaxTensorNameBytes = 512;
constexpr size_t kMaxFileNameBytes = 255;
constexpr size_t kMaxCreatedBytes = 64;
constexpr int64_t kMaxStep = 1'000'000'000'000'000;

template <typename... Parts>
absl::Status Refused(const Parts&... parts) {
  return absl::DataLossError(absl::StrCat(parts...));
}

absl::StatusOr<int64_t> IntegerOf(const Json& value, absl::string_view what, int64_t least,
                                  int64_t most) {
  if (const auto number = IntegerWithin(value, least, most)) return *number;
  return Refused(what, ": ", Shown(value.dump()), ", expected an integer in [", least, ", ", most,
                 "]");
}

absl::StatusOr<std::string> TextOf(const Json& value, absl::string_view what, size_t most) {
  if (!value.is_string()) return Refused(what, ": ", Shown(value.dump()), ", expected text");
  std::string text = value.get<std::string>();
  if (text.size() > most) {
    return Refused(what, ": text of ", text.size(), " bytes, expected at most ", most);
  }
  return text;
}

absl::StatusOr<uint64_t> HashOf(const Json& value, absl::string_view what) {
  MOE_ASSIGN_OR_RETURN(const std::string text, TextOf(value, what, 16));
  uint64_t hash = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), hash, 16);
  if (error == std::errc() && end == text.data() + text.size() && HashHex(hash) == text) {
    return hash;
  }
  return Refused(what, ": '", Shown(text), "', expected 16 hexadecimal digits");
}

// Whether a name stays in the manifest's folder and is not hidden from shells and listings.
bool IsPlainName(absl::string_view name) {
  const auto plain = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '-' ||
           c == '_' || c == '.';
  };
  return name[0] != '.' && absl::EndsWith(name, ".safetensors") &&
         std::all_of(name.begin(), name.end(), plain);
}

// '|' and ',' are separators in BoxName.
bool IsTensorName(absl::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) > ' ' && c != '|' && c != '\x7f';
  });
}

bool IsState(absl::string_view state) {
  return !state.empty() && std::all_of(state.begin(), state.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
}

// Parser of the document, key by key in the only valid order.
class ManifestEvents : public JsonEvents {
 public:
  absl::Status BeginObject() override {
    if (InSection()) return section_.BeginObject();
    return Begin(/*object=*/true);
  }
  absl::Status BeginList() override {
    if (InSection()) return section_.BeginList();
    return Begin(/*object=*/false);
  }
  absl::Status Key(std::string name) override {
    if (InSection()) return section_.Key(std::move(name));
    auto& [place, next] = open_.back();
    if (place == Place::kTensors) return BeginTensor(std::move(name));
    const absl::Span<const char* const> keys = KeysOf(place);
    if (next == keys.size() || name != keys[next]) {
      return Refused("key '", Shown(name), "', expected ",
                     next == keys.size() ? "no more" : absl::StrCat("'", keys[next], "'"));
    }
    ++next;
    section_done_ = false;
    return absl::OkStatus();
  }
  absl::Status End() override;
  absl::Status Scalar(Json value) override;

  CheckpointManifest manifest;

 private:
  enum class Place : uint8_t {
    kDocument,
    kTensors,
    kTensor,
    kShape,
    kStates,
    kFiles,
    kFile,
    kBoxes,
    kBox,
    kBounds
  };
  // Where an object or list may open: as the value of a key, or as an element of a list.
  struct Opening {
    Place in;
    absl::string_view key;
    bool object;
    Place opens;
  };
  static constexpr Opening kOpenings[] = {{Place::kDocument, "tensors", true, Place::kTensors},
                                          {Place::kDocument, "files", false, Place::kFiles},
                                          {Place::kDocument, "boxes", false, Place::kBoxes},
                                          {Place::kTensors, "", true, Place::kTensor},
                                          {Place::kFiles, "", true, Place::kFile},
                                          {Place::kBoxes, "", true, Place::kBox},
                                          {Place::kTensor, "shape", false, Place::kShape},
                                          {Place::kTensor, "states", false, Place::kStates},
                                          {Place::kBox, "box", false, Place::kBounds}};

  static absl::Span<const char* const> KeysOf(Place place) {
    switch (place) {
      case Place::kDocument:
        return kManifestKeys;
      case Place::kTensor:
        return kTensorKeys;
      case Place::kFile:
        return kFileKeys;
      case Place::kBox:
        return kBoxKeys;
      default:
        return {};
    }
  }

  absl::string_view LastKey() const { return KeysOf(open_.back().place)[open_.back().next - 1]; }

  // Whether the value of a section is being read, or comes next.
  bool InSection() const {
    return open_.size() == 1 && open_[0].next > kFirstManifestSection &&
           open_[0].next <= kFirstManifestSection + kManifestSections.size() && !section_done_;
  }

  absl::Status Begin(bool object);
  absl::Status BeginTensor(std::string name);
  absl::Status CheckCounts() const;
  absl::Status EndTensor();
  absl::Status EndFile();
  absl::Status EndBox();
  absl::Status DocumentValue(const Json& value);
  absl::Status FileValue(const Json& value);
  absl::Status BoxValue(const Json& value);
  absl::Status StateName(const Json& value);

  struct Open {
    Place place;
    size_t next = 0;  // number of its keys read so far
  };
  std::vector<Open> open_;
  ManifestSectionText section_;
  bool section_done_ = false;     // whether the section of the document's last key was read
  std::vector<int64_t> numbers_;  // elements of the open shape or bounds
};

absl::Status ManifestEvents::Begin(bool object) {
  if (open_.empty()) {
    if (!object) return Refused("a list, expected an object");
    open_.push_back({Place::kDocument});
    return absl::OkStatus();
  }
  for (const auto& [in, key, is_object, opens] : kOpenings) {
    if (in != open_.back().place || is_object != object) continue;
    if (!key.empty() && key != LastKey()) continue;
    if (opens == Place::kFile) manifest.files.emplace_back();
    if (opens == Place::kBox) manifest.boxes.emplace_back();
    numbers_.clear();
    open_.push_back({opens});
    return CheckCounts();
  }
  return Refused(object ? "an object" : "a list", ", expected something else here");
}

absl::Status ManifestEvents::CheckCounts() const {
  const auto beyond = [](size_t size, int64_t most, const char* what) {
    return static_cast<int64_t>(size) > most ? Refused("more than ", most, " ", what)
                                             : absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(beyond(manifest.tensors.size(), kMaxManifestTensors, "tensors"));
  MOE_RETURN_IF_ERROR(beyond(manifest.files.size(), kMaxManifestFiles, "files"));
  return beyond(manifest.boxes.size(), kMaxManifestBoxes, "boxes");
}

absl::Status ManifestEvents::BeginTensor(std::string name) {
  if (name.size() > kMaxTensorNameBytes || !IsTensorName(name)) {
    return Refused("tensor '", Shown(name), "', expected a name of 1 to ", kMaxTensorNameBytes,
                   " bytes without spaces and '|'");
  }
  if (!manifest.tensors.empty() && manifest.tensors.back().name >= name) {
    return Refused("tensor '", Shown(name), "' after '", Shown(manifest.tensors.back().name),
                   "', expected each once, ascending");
  }
  manifest.tensors.push_back({.name = std::move(name), .states = {}});
  return absl::OkStatus();
}

absl::Status ManifestEvents::End() {
  if (InSection()) {
    MOE_RETURN_IF_ERROR(section_.End());
    if (!section_.done()) return absl::OkStatus();
    manifest.sections.*kManifestSections[open_[0].next - 1 - kFirstManifestSection] =
        section_.Take();
    section_done_ = true;
    return absl::OkStatus();
  }
  const auto [ended, next] = open_.back();
  const absl::Span<const char* const> keys = KeysOf(ended);
  if (next < keys.size()) return Refused("key '", keys[next], "' is missing");
  open_.pop_back();
  switch (ended) {
    case Place::kTensor:
      return EndTensor();
    case Place::kFile:
      return EndFile();
    case Place::kBox:
      return EndBox();
    case Place::kShape:
      return numbers_.size() == 2 ? absl::OkStatus() : Refused("shape, expected 2 extents");
    case Place::kBounds:
      return numbers_.size() == 4 ? absl::OkStatus() : Refused("box, expected 4 bounds");
    default:
      return absl::OkStatus();
  }
}

absl::Status ManifestEvents::EndTensor() {
  const ManifestTensor& tensor = manifest.tensors.back();
  int64_t bytes = 0;
  if (__builtin_mul_overflow(tensor.rows, tensor.cols, &bytes) ||
      __builtin_mul_overflow(bytes, BitsOf(tensor.type) / 8, &bytes)) {
    return Refused("tensor '", Shown(tensor.name), "': [", tensor.rows, ", ", tensor.cols,
                   "], expected less than 2^63 bytes");
  }
  if (tensor.states.empty()) return Refused("tensor '", Shown(tensor.name), "' has no states");
  return absl::OkStatus();
}

absl::Status ManifestEvents::EndFile() {
  const size_t count = manifest.files.size();
  if (count < 2 || manifest.files[count - 2].name < manifest.files[count - 1].name) {
    return absl::OkStatus();
  }
  return Refused("file '", manifest.files[count - 1].name, "' after '",
                 manifest.files[count - 2].name, "', expected each once, ascending");
}

absl::Status ManifestEvents::EndBox() {
  const ManifestBox& box = manifest.boxes.back();
  const ManifestTensor& tensor = manifest.tensors[box.tensor];
  const auto [row_begin, row_end, col_begin, col_end] = box.box;
  const std::string name = absl::StrCat("box '", Shown(tensor.name), "' ", tensor.states[box.state],
                                        " ", BoxText(box.box));
  if (row_begin >= row_end || row_end > tensor.rows || col_begin >= col_end ||
      col_end > tensor.cols) {
    return Refused(name, ", expected a part of [", tensor.rows, ", ", tensor.cols, "]");
  }
  const size_t count = manifest.boxes.size();
  if (count > 1 && BoxOrder(manifest.boxes[count - 2]) >= BoxOrder(box)) {
    return Refused(name, " stands too late, expected tensors, states, rows, columns ascending");
  }
  return absl::OkStatus();
}

absl::Status ManifestEvents::Scalar(Json value) {
  if (InSection()) return section_.Scalar(std::move(value));
  if (open_.empty()) return Refused("'", Shown(value.dump()), "', expected an object");
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  switch (open_.back().place) {
    case Place::kDocument:
      return DocumentValue(value);
    case Place::kFile:
      return FileValue(value);
    case Place::kBox:
      return BoxValue(value);
    case Place::kStates:
      return StateName(value);
    case Place::kShape: {
      if (numbers_.size() == 2) return Refused("shape of more than 2 extents");
      MOE_ASSIGN_OR_RETURN(const int64_t extent, IntegerOf(value, "shape", 1, kMost));
      numbers_.push_back(extent);
      (numbers_.size() == 1 ? manifest.tensors.back().rows : manifest.tensors.back().cols) = extent;
      return absl::OkStatus();
    }
    case Place::kBounds: {
      if (numbers_.size() == 4) return Refused("box of more than 4 bounds");
      MOE_ASSIGN_OR_RETURN(const int64_t bound, IntegerOf(value, "box", 0, kMost));
      TensorBox& box = manifest.boxes.back().box;
      int64_t* const bounds[] = {&box.row_begin, &box.row_end, &box.col_begin, &box.col_end};
      *bounds[numbers_.size()] = bound;
      numbers_.push_back(bound);
      return absl::OkStatus();
    }
    case Place::kTensor: {
      ManifestTensor& tensor = manifest.tensors.back();
      if (LastKey() != "dtype") break;
      MOE_ASSIGN_OR_RETURN(const std::string dtype, TextOf(value, "dtype", 16));
      tensor.type = dtype == "F64" ? SafetensorsType::kF64 : SafetensorsType::kF32;
      if (dtype != NameOf(tensor.type)) {
        return Refused("dtype '", Shown(dtype), "', expected F32 or F64");
      }
      return absl::OkStatus();
    }
    default:
      break;
  }
  return Refused("'", Shown(value.dump()), "', expected something else here");
}

absl::Status ManifestEvents::DocumentValue(const Json& value) {
  const absl::string_view key = LastKey();
  if (key == "format") {
    if (value == kManifestFormat) return absl::OkStatus();
    return Refused("format ", Shown(value.dump()), ", expected \"", kManifestFormat, "\"");
  }
  if (key == "version") {
    if (value == kManifestVersion) return absl::OkStatus();
    return Refused("version ", Shown(value.dump()), ", this program reads version ",
                   kManifestVersion);
  }
  if (key == "step") {
    MOE_ASSIGN_OR_RETURN(manifest.step, IntegerOf(value, key, 0, kMaxStep));
    return absl::OkStatus();
  }
  if (key == "created") {
    MOE_ASSIGN_OR_RETURN(manifest.created, TextOf(value, key, kMaxCreatedBytes));
    return absl::OkStatus();
  }
  if (key == "checksum") return TextOf(value, key, kManifestChecksumDigits).status();
  return Refused(key, ": ", Shown(value.dump()), ", expected an object or a list");
}

absl::Status ManifestEvents::FileValue(const Json& value) {
  ManifestFile& file = manifest.files.back();
  if (LastKey() == "name") {
    MOE_ASSIGN_OR_RETURN(file.name, TextOf(value, "name", kMaxFileNameBytes));
    if (!file.name.empty() && IsPlainName(file.name)) return absl::OkStatus();
    return Refused("file '", Shown(file.name),
                   "', expected a *.safetensors beside the manifest, of A-Z a-z 0-9 - _ .");
  }
  if (LastKey() == "bytes") {
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    MOE_ASSIGN_OR_RETURN(file.bytes, IntegerOf(value, "bytes", 8, kMost));
    return absl::OkStatus();
  }
  MOE_ASSIGN_OR_RETURN(file.header_xxh3, HashOf(value, "header_xxh3"));
  return absl::OkStatus();
}

absl::Status ManifestEvents::BoxValue(const Json& value) {
  ManifestBox& box = manifest.boxes.back();
  if (LastKey() == "tensor") {
    MOE_ASSIGN_OR_RETURN(const std::string name, TextOf(value, "tensor", kMaxTensorNameBytes));
    box.tensor = manifest.TensorIndex(name);
    if (box.tensor >= 0) return absl::OkStatus();
    return Refused("box of tensor '", Shown(name), "', which is none of 'tensors'");
  }
  if (LastKey() == "state") {
    MOE_ASSIGN_OR_RETURN(const std::string name, TextOf(value, "state", kMaxStateBytes));
    const ManifestTensor& tensor = manifest.tensors[box.tensor];
    box.state = tensor.StateIndex(name);
    if (box.state >= 0) return absl::OkStatus();
    return Refused("box of tensor '", Shown(tensor.name), "', state '", Shown(name),
                   "', which is none of its states");
  }
  if (LastKey() == "file") {
    const int64_t most = static_cast<int64_t>(manifest.files.size()) - 1;
    MOE_ASSIGN_OR_RETURN(const int64_t file, IntegerOf(value, "file", 0, most));
    box.file = static_cast<int32_t>(file);
    return absl::OkStatus();
  }
  if (LastKey() == "xxh3") {
    MOE_ASSIGN_OR_RETURN(box.xxh3, HashOf(value, "xxh3"));
    return absl::OkStatus();
  }
  return Refused("box: ", Shown(value.dump()), ", expected a list");
}

absl::Status ManifestEvents::StateName(const Json& value) {
  std::vector<std::string>& states = manifest.tensors.back().states;
  MOE_ASSIGN_OR_RETURN(std::string name, TextOf(value, "state", kMaxStateBytes));
  if (!IsState(name)) return Refused("state '", Shown(name), "', expected a-z, 0-9, _");
  if (!states.empty() && states.back() >= name) {
    return Refused("state '", name, "' after '", states.back(), "', expected each once, ascending");
  }
  if (states.size() == kMaxStates) return Refused("more than ", kMaxStates, " states");
  states.push_back(std::move(name));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CheckpointManifest> ParseManifest(absl::string_view file,
                                                 absl::string_view document) {
  constexpr size_t kTailBytes =
      sizeof(kManifestChecksumKey) - 1 + kManifestChecksumDigits + sizeof(kManifestChecksumEnd) - 1;
  if (static_cast<int64_t>(document.size()) > kMaxManifestBytes) {
    return Refused(file, ": ", document.size(), " bytes, expected at most ", kMaxManifestBytes);
  }
  const size_t body_bytes = document.size() - std::min(document.size(), kTailBytes);
  const absl::string_view tail = document.substr(body_bytes);
  if (tail.size() != kTailBytes || !absl::StartsWith(tail, kManifestChecksumKey) ||
      !absl::EndsWith(tail, kManifestChecksumEnd)) {
    return Refused(file, ": it does not end with a checksum: cut short, or no manifest");
  }
  const absl::string_view said =
      tail.substr(sizeof(kManifestChecksumKey) - 1, kManifestChecksumDigits);
  const std::string checksum = ManifestChecksum(document.substr(0, body_bytes));
  if (said != checksum) {
    return Refused(file, ": its checksum is ", checksum, ", it says ", Shown(said));
  }
  ManifestEvents events;
  constexpr JsonLimits kLimits = {.max_bytes = kMaxManifestBytes,
                                  .max_values = 13 * kMaxManifestBoxes};
  MOE_RETURN_IF_ERROR(ReadJsonEvents(file, document, kLimits, events));
  return std::move(events.manifest);
}

absl::StatusOr<StateHashes> ParseStateHashes(absl::string_view text) {
  const Json object = Json::parse(text.begin(), text.end(), nullptr, false);
  if (!object.is_object()) return Refused("hash: expected an object of JSON");
  StateHashes hashes;
  for (const auto& [state, hash] : object.items()) {
    MOE_ASSIGN_OR_RETURN(hashes[state], HashOf(hash, absl::StrCat("hash of '", state, "'")));
  }
  return hashes;
}

}  // namespace moe
