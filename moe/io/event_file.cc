#include "moe/io/event_file.h"

#include <array>
#include <bit>
#include <type_traits>

#include <absl/strings/str_cat.h>

namespace moe {
namespace {

constexpr std::array<uint32_t, 256> MakeCrcTable() {
  constexpr uint32_t kReflectedPolynomial = 0x82f63b78;
  std::array<uint32_t, 256> table = {};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kReflectedPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = MakeCrcTable();

// CRCs of text that has CRCs in it are weak, so TFRecords mask theirs.
uint32_t MaskedCrc(absl::string_view bytes) {
  return std::rotr(Crc32c(bytes), 15) + 0xa282ead8u;
}

template <typename Unsigned>
void AppendLittleEndian(Unsigned value, std::string& text) {
  static_assert(std::is_unsigned_v<Unsigned>);
  for (size_t i = 0; i < sizeof(value); ++i) text += static_cast<char>(value >> (8 * i));
}

// A protocol buffer message, field by field in any order. Numbers are those of the .proto files.
class Message {
 public:
  void Varint(int field, int64_t value) {
    Key(field, 0);
    AppendVarint(static_cast<uint64_t>(value));
  }
  void Double(int field, double value) {
    Key(field, 1);
    AppendLittleEndian(std::bit_cast<uint64_t>(value), bytes_);
  }
  void Bytes(int field, absl::string_view value) {
    Key(field, 2);
    AppendVarint(value.size());
    absl::StrAppend(&bytes_, value);
  }
  void Float(int field, float value) {
    Key(field, 5);
    AppendLittleEndian(std::bit_cast<uint32_t>(value), bytes_);
  }
  // Repeated, packed.
  void Doubles(int field, absl::Span<const double> values) {
    std::string packed;
    for (const double value : values) AppendLittleEndian(std::bit_cast<uint64_t>(value), packed);
    Bytes(field, packed);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void Key(int field, int wire_type) {
    AppendVarint(static_cast<uint64_t>(field << 3 | wire_type));
  }
  void AppendVarint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

// Event: wall_time = 1, step = 2, and one of file_version = 3, summary = 5, session_log = 7.
Message EventAt(absl::Time now) {
  Message event;
  event.Double(1, static_cast<double>(absl::ToUnixMicros(now)) / 1e6);
  return event;
}

Message EventAt(absl::Time now, int64_t step) {
  Message event = EventAt(now);
  event.Varint(2, step);
  return event;
}

// HistogramProto. The bucket of value v ends at v + 1/2, and the ends stand for the least and the
// largest sample, so that histograms of as many values have one axis.
Message HistogramOf(absl::Span<const int64_t> counts) {
  std::vector<double> limits, buckets;
  double number = 0, sum = 0, squares = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto value = static_cast<double>(i), count = static_cast<double>(counts[i]);
    limits.push_back(value + 0.5);
    buckets.push_back(count);
    number += count;
    sum += count * value;
    squares += count * value * value;
  }
  Message histogram;
  histogram.Double(1, -0.5);
  histogram.Double(2, static_cast<double>(counts.size()) - 0.5);
  histogram.Double(3, number);
  histogram.Double(4, sum);
  histogram.Double(5, squares);
  histogram.Doubles(6, limits);
  histogram.Doubles(7, buckets);
  return histogram;
}

}  // namespace

uint32_t Crc32c(absl::string_view bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char byte : bytes)
    crc = kCrcTable[(crc ^ static_cast<uint8_t>(byte)) & 0xff] ^ crc >> 8;
  return ~crc;
}

std::string TfRecord(absl::string_view bytes) {
  std::string record;
  AppendLittleEndian(uint64_t{bytes.size()}, record);
  AppendLittleEndian(MaskedCrc(record), record);
  absl::StrAppend(&record, bytes);
  AppendLittleEndian(MaskedCrc(bytes), record);
  return record;
}

std::string VersionRecord(absl::Time now) {
  Message event = EventAt(now);
  event.Bytes(3, "brain.Event:2");
  return TfRecord(event.bytes());
}

std::string RestartRecord(absl::Time now, int64_t step) {
  Message log;  // SessionLog: status = 1
  constexpr int kStart = 1;
  log.Varint(1, kStart);
  Message event = EventAt(now, step);
  event.Bytes(7, log.bytes());
  return TfRecord(event.bytes());
}

std::string StepRecord(absl::Time now, int64_t step, absl::Span<const EventScalar> scalars,
                       absl::Span<const EventHistogram> histograms) {
  Message summary;  // Summary: value = 1, of tag = 1, simple_value = 2, histo = 5
  for (const EventScalar& scalar : scalars) {
    Message value;
    value.Bytes(1, scalar.tag);
    value.Float(2, static_cast<float>(scalar.value));
    summary.Bytes(1, value.bytes());
  }
  for (const EventHistogram& histogram : histograms) {
    Message value;
    value.Bytes(1, histogram.tag);
    value.Bytes(5, HistogramOf(histogram.counts).bytes());
    summary.Bytes(1, value.bytes());
  }
  Message event = EventAt(now, step);
  event.Bytes(5, summary.bytes());
  return TfRecord(event.bytes());
}

}  // namespace moe
