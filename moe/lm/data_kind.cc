#include "moe/lm/data_kind.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>

#include "kernels/base/status_macros.h"

namespace moe::lm {
namespace {

using namespace std::string_view_literals;

// By chance 64 bytes of ids of 16 bits are not all printable, and of 128 ids those above a bound
// are not all at even places: 2^-64, were both places alike.
constexpr int64_t kLeastSample = 64;

using Sample = std::vector<absl::Span<const uint8_t>>;

// All of a short file; of a longer one its beginning, its middle and its end, each from a multiple
// of 8 on, where an id of any type begins.
Sample SampleOf(absl::Span<const uint8_t> bytes) {
  constexpr size_t kWindow = size_t{64} << 10;
  if (bytes.size() <= 3 * kWindow) return {bytes};
  const auto window = [&](size_t first) {
    return bytes.subspan(first / 8 * 8, kWindow);
  };
  return {window(0), window(bytes.size() / 2), window(bytes.size() - kWindow)};
}

// What the first bytes of a file say that it is.
struct Format {
  std::string_view magic;
  const char* name;
  const char* to_ids;   // what to do for --tokens,
  const char* to_text;  // and for --data
};
constexpr char kIds[] = "--tokens reads token ids";
constexpr char kExtract[] = "write its text to a file";
constexpr char kConvert[] =
    "write one with numpy's ids.astype('uint32').tofile(IDS), then --tokens IDS --tokens-dtype "
    "uint32";
constexpr char kDecompress[] = "decompress it";
constexpr Format kFormats[] = {
    {"\x93NUMPY"sv, "numpy's .npy, which has a header",
     "write one with numpy.load(FILE).astype('uint32').tofile(IDS), then --tokens IDS "
     "--tokens-dtype uint32",
     kIds},
    // llm.c's headers are 256 int32, the first 20240520 (GPT-2's ids) or 20240801 (Llama 3's).
    {"\x88\xd8\x34\x01"sv, "llm.c's, which has a header of 1024 bytes",
     "tail -c +1025 FILE > IDS, then --tokens IDS --tokens-dtype uint16", kIds},
    {"\xa1\xd9\x34\x01"sv, "llm.c's, which has a header of 1024 bytes",
     "tail -c +1025 FILE > IDS, then --tokens IDS --tokens-dtype uint32", kIds},
    {"MMIDIDX\0\0"sv, "a Megatron index", "name it PREFIX.idx, beside PREFIX.bin", kIds},
    {"PK\x03\x04"sv, "a zip archive (.npz, .pt)", kConvert, kExtract},
    {"PAR1"sv, "Parquet", kConvert, kExtract},
    {"ARROW1"sv, "Arrow", kConvert, kExtract},
    {"\x89HDF\r\n"sv, "HDF5", kConvert, kExtract},
    {"\x1f\x8b\x08"sv, "compressed by gzip", kDecompress, kDecompress},
    {"\x28\xb5\x2f\xfd"sv, "compressed by zstd", kDecompress, kDecompress},
    {"\xfd\x37zXZ\0"sv, "compressed by xz", kDecompress, kDecompress},
};

// A header of JSON behind its length, which is within the file.
bool IsSafetensors(absl::Span<const uint8_t> bytes) {
  uint64_t length = 0;
  if (bytes.size() <= sizeof(length)) return false;
  std::memcpy(&length, bytes.data(), sizeof(length));
  return length >= 2 && length <= bytes.size() - sizeof(length) && bytes[sizeof(length)] == '{';
}

constexpr Format kSafetensors = {"", "a safetensors file", kConvert, "weights are no text"};

// nullptr: none of these.
const Format* FormatOf(absl::Span<const uint8_t> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (const Format& format : kFormats) {
    if (text.substr(0, format.magic.size()) == format.magic) return &format;
  }
  return IsSafetensors(bytes) ? &kSafetensors : nullptr;
}

bool IsUtf16(absl::Span<const uint8_t> bytes) {
  return bytes.size() >= 2 &&
         ((bytes[0] == 0xff && bytes[1] == 0xfe) || (bytes[0] == 0xfe && bytes[1] == 0xff));
}

absl::Status IsNot(const char* expected, const std::string& path, absl::string_view what,
                   absl::string_view advice) {
  return absl::DataLossError(
      absl::StrCat(path, ": is ", what, ", expected ", expected, ": ", advice));
}

// No control character but white space and escape: text in ASCII, UTF-8 or another encoding in
// bytes. Ids of 16 bits have others in their low bytes, wider ones are small and have zeros.
bool IsText(const Sample& sample) {
  int64_t size = 0;
  for (const absl::Span<const uint8_t> window : sample) {
    size += std::ssize(window);
    for (const uint8_t byte : window) {
      const bool text = byte >= 0x20 ? byte != 0x7f : (byte >= '\t' && byte <= '\r') || byte == 033;
      if (!text) return false;
    }
  }
  return size >= kLeastSample;
}

// Whether pairs of Half are ids of twice its width, whose upper halves are at most `most_upper`.
template <typename Half>
bool AreHalves(const Sample& sample, int64_t most_upper) {
  int64_t lower_above = 0;
  for (const absl::Span<const uint8_t> window : sample) {
    Half pair[2];
    for (size_t at = 0; at + sizeof(pair) <= window.size(); at += sizeof(pair)) {
      std::memcpy(pair, window.data() + at, sizeof(pair));
      if (pair[1] > most_upper) return false;
      lower_above += pair[0] > most_upper ? 1 : 0;
    }
  }
  return lower_above >= kLeastSample;
}

}  // namespace

TextKind TextKindOf(absl::Span<const uint8_t> bytes) {
  if (bytes.empty()) return TextKind::kEmpty;
  if (FormatOf(bytes) != nullptr) return TextKind::kBinary;
  if (IsUtf16(bytes)) return TextKind::kUtf16;
  const bool has_nul = std::memchr(bytes.data(), 0, bytes.size()) != nullptr;
  return has_nul ? TextKind::kBinary : TextKind::kText;
}

absl::Status CheckText(const std::string& path, absl::Span<const uint8_t> bytes) {
  const TextKind kind = TextKindOf(bytes);
  if (kind == TextKind::kText || kind == TextKind::kEmpty) return absl::OkStatus();
  if (const std::string pair = TokenPairOf(path); !pair.empty()) {
    return IsNot("text", path, "of a Megatron pair", absl::StrCat("--tokens ", pair, " reads it"));
  }
  if (const Format* const format = FormatOf(bytes); format != nullptr) {
    return IsNot("text", path, format->name, format->to_text);
  }
  if (kind == TextKind::kUtf16) {
    return IsNot("text", path, "UTF-16", "iconv -f UTF-16 -t UTF-8 makes UTF-8 of it");
  }
  return IsNot("text", path, "binary, with NUL bytes", kIds);
}

absl::Status CheckPlainTokens(const std::string& path, absl::Span<const uint8_t> bytes,
                              TokenType type, int64_t vocab_size) {
  constexpr char kExpected[] = "a bare array of ids";
  if (const Format* const format = FormatOf(bytes); format != nullptr) {
    return IsNot(kExpected, path, format->name, format->to_ids);
  }
  const Sample sample = SampleOf(bytes);
  if (IsText(sample)) return IsNot(kExpected, path, "text", "--data reads text");
  const auto halves = [&](int64_t most_upper, const char* wider) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", path, "': every second id is ", most_upper == 0 ? "" : "at most ", most_upper,
        ", which makes the others lower halves, expected --tokens-dtype ", wider));
  };
  const int64_t most_upper = std::max<int64_t>(0, vocab_size - 1) >> 16;
  if (SizeOf(type) < 8 && AreHalves<uint32_t>(sample, 0)) return halves(0, "int64");
  if (SizeOf(type) < 4 && AreHalves<uint16_t>(sample, most_upper)) {
    return halves(most_upper, "uint32");
  }
  return absl::OkStatus();
}

}  // namespace moe::lm
