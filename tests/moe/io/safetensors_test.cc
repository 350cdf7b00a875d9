#include "moe/io/safetensors.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/dtype.h"
#include "tests/moe/io/io_test.h"
#include "tests/sanitizers.h"

namespace moe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kTwoTensors[] =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
    R"("a":{"dtype":"F32","shape":[1,2],"data_offsets":[3,11]}})";

template <typename T>
std::string Raw(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// The header of one tensor.
std::string One(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return absl::StrCat(R"({"x":{"dtype":")", dtype, R"(","shape":[)", shape, R"(],"data_offsets":[)",
                      offsets, "]}}");
}

absl::StatusOr<SafetensorsFile> Parse(const std::string& bytes) {
  return SafetensorsFile::Parse("f", AsBytes(bytes));
}

std::string ErrorOf(const std::string& header, const std::string& data) {
  const absl::Status status = Parse(SafetensorsBytes(header, data)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << header << ": " << status;
  EXPECT_EQ(status.message().substr(0, 3), "f: ");
  return std::string(status.message());
}

class SafetensorsTest : public IoTest {};

TEST_F(SafetensorsTest, ReadsAFileMadeByHand) {
  const std::string path =
      Write("m", SafetensorsBytes(kTwoTensors, "\x01\x02\x03" + Raw<float>({1.5f, -2.0f})));
  const auto file = SafetensorsFile::Open(path).value();
  EXPECT_EQ(file.path(), path);
  EXPECT_EQ(file.metadata(), (SafetensorsMetadata{{"format", "pt"}}));
  ASSERT_EQ(file.tensors().size(), 2u);
  EXPECT_EQ(file.tensors()[0].name, "a");
  const SafetensorsTensor* const b = file.Find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->type, SafetensorsType::kU8);
  EXPECT_THAT(file.Data(*b), ElementsAre(1, 2, 3));
  const SafetensorsTensor* const a = file.Find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_THAT(a->shape, ElementsAre(1, 2));
  EXPECT_EQ(a->num_elements, 2);
  // Its bytes start at an odd address: 3 after a header of even length.
  std::vector<float> values(2);
  ASSERT_TRUE(file.ReadFloat32(*a, absl::MakeSpan(values)).ok());
  EXPECT_THAT(values, ElementsAre(1.5f, -2.0f));
  EXPECT_EQ(file.Find("c"), nullptr);
  EXPECT_EQ(file.Find(""), nullptr);
}

TEST_F(SafetensorsTest, AcceptsScalarsEmptyTensorsAndPadding) {
  const std::string bytes =
      SafetensorsBytes(R"({"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
                       R"("e":{"dtype":"F32","shape":[4,0],"data_offsets":[8,8]},)"
                       R"("f":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}     )",
                       std::string(8, '\0'));
  const auto file = Parse(bytes).value();
  EXPECT_EQ(file.Find("s")->num_elements, 1);
  EXPECT_EQ(file.Find("e")->num_elements, 0);
  EXPECT_TRUE(file.ReadFloat32(*file.Find("e"), {}).ok());
  EXPECT_TRUE(Parse(SafetensorsBytes("{}", "")).ok());
}

TEST_F(SafetensorsTest, KnowsTheSizeOfEveryType) {
  for (int i = 0; i < kNumSafetensorsTypes; ++i) {
    const auto type = static_cast<SafetensorsType>(i);
    // 8 elements of n bits take n bytes.
    const int bits = BitsOf(type);
    const std::string header = One(NameOf(type), "2,4", absl::StrCat("0,", bits));
    const std::string bytes = SafetensorsBytes(header, std::string(bits, '\0'));
    const auto file = Parse(bytes).value();
    EXPECT_EQ(file.Find("x")->type, type) << NameOf(type);
  }
  // Half a byte is no byte.
  EXPECT_THAT(ErrorOf(One("F4", "3", "0,1"), "x"), HasSubstr("3 elements of 4 bits (F4 [3])"));
}

TEST_F(SafetensorsTest, ConvertsToFloat32) {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto read = [](const std::string& dtype, const std::string& data, int64_t count) {
    const std::string bytes =
        SafetensorsBytes(One(dtype, absl::StrCat(count), absl::StrCat("0,", data.size())), data);
    const auto file = Parse(bytes).value();
    std::vector<float> values(count);
    EXPECT_TRUE(file.ReadFloat32(*file.Find("x"), absl::MakeSpan(values)).ok());
    return values;
  };
  // 1 + 2^-24 is halfway between 1 and the next float: to even, 1.
  EXPECT_THAT(read("F64", Raw<double>({0.5, 1 + 0x1p-24, 1e300, -0.0}), 4),
              ElementsAre(0.5f, 1.0f, infinity, -0.0f));
  EXPECT_THAT(read("BF16", Raw<uint16_t>({0x3f80, 0xc040, 0x7f80}), 3),
              ElementsAre(1.0f, -3.0f, infinity));
  EXPECT_THAT(read("F16", Raw<uint16_t>({0x7c00, 0xfc00}), 2), ElementsAre(infinity, -infinity));
  EXPECT_TRUE(std::isnan(read("F16", Raw<uint16_t>({0x7e01}), 1)[0]));
  EXPECT_TRUE(std::signbit(read("F16", Raw<uint16_t>({0x8000}), 1)[0]));
}

// Every half against its value by definition: (-1)^s 2^(e-15) (1 + f/1024), 2^-14 f/1024 at e = 0.
TEST_F(SafetensorsTest, ConvertsEveryHalfExactly) {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  const std::string bytes =
      SafetensorsBytes(One("F16", "65536", "0,131072"), Raw<uint16_t>(halves));
  const auto file = Parse(bytes).value();
  std::vector<float> values(halves.size());
  ASSERT_TRUE(file.ReadFloat32(*file.Find("x"), absl::MakeSpan(values)).ok());
  for (int i = 0; i < 1 << 16; ++i) {
    const int exponent = i >> 10 & 31, fraction = i & 1023;
    if (exponent == 31) continue;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    ASSERT_EQ(values[i], static_cast<float>(i >> 15 == 1 ? -magnitude : magnitude)) << i;
  }
}

TEST_F(SafetensorsTest, ReadFloat32RefusesOtherTypesAndLengths) {
  const std::string bytes = SafetensorsBytes(One("I32", "2", "0,8"), std::string(8, '\0'));
  const auto file = Parse(bytes).value();
  std::vector<float> values(3);
  const absl::Status type = file.ReadFloat32(*file.Find("x"), absl::MakeSpan(values).first(2));
  EXPECT_EQ(type.message(), "f: tensor 'x': dtype I32, expected F32, F64, BF16 or F16");
  const absl::Status length = file.ReadFloat32(*file.Find("x"), absl::MakeSpan(values));
  EXPECT_EQ(length.message(), "f: tensor 'x': 2 elements into 3, expected as many");
}

TEST_F(SafetensorsTest, OpenTellsAbsentFromMalformed) {
  EXPECT_EQ(SafetensorsFile::Open(Path("no")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open("").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open(root_.string()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsFile::Open("/dev/zero").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsFile::Open(Write("empty", "")).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(SafetensorsTest, HeadersThatDoNotFitAreRefused) {
  std::string bytes = SafetensorsBytes("{}", "");
  bytes[0] = 3;  // one more than there is
  EXPECT_THAT(std::string(Parse(bytes).status().message()),
              HasSubstr("a header of 3 bytes, expected at most 2 in a file of 10 bytes"));
  std::fill_n(bytes.begin(), 8, '\xff');  // 2^64 - 1: no addition may wrap
  EXPECT_EQ(Parse(bytes).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(ErrorOf(" {}", ""), HasSubstr("the header starts with ' ', expected '{'"));
  EXPECT_THAT(ErrorOf("", "abc"), HasSubstr("the header starts with '', expected '{'"));
  EXPECT_THAT(ErrorOf("{} {}", ""), HasSubstr("malformed JSON"));
}

TEST_F(SafetensorsTest, AHeaderOf100MegabytesIsTheLongest) {
  std::string bytes = SafetensorsBytes("{}", "") + std::string(kMaxSafetensorsHeaderBytes, ' ');
  uint64_t size = kMaxSafetensorsHeaderBytes + 1;
  std::memcpy(bytes.data(), &size, 8);
  EXPECT_THAT(std::string(Parse(bytes).status().message()), HasSubstr("at most 100000000"));
  size = kMaxSafetensorsHeaderBytes;
  std::memcpy(bytes.data(), &size, 8);
  // The rest is data then, and of no tensor.
  EXPECT_THAT(std::string(Parse(bytes).status().message()), HasSubstr("2 bytes after the header"));
}

struct Refused {
  std::string header, data, reason;
};

void PrintTo(const Refused& refused, std::ostream* out) {
  *out << refused.header;
}

class SafetensorsRefusesTest : public ::testing::TestWithParam<Refused> {};

TEST_P(SafetensorsRefusesTest, TheFile) {
  EXPECT_THAT(ErrorOf(GetParam().header, GetParam().data), HasSubstr(GetParam().reason));
}

const std::string kU8 = R"({"dtype":"U8","shape":[2],"data_offsets":)";

INSTANTIATE_TEST_SUITE_P(
    Tiling, SafetensorsRefusesTest,
    ::testing::Values(
        Refused{R"({"a":)" + kU8 + R"([0,2]},"b":)" + kU8 + "[3,5]}}", "12345",
                "tensor 'b': data from byte 3, expected from byte 2"},
        Refused{R"({"a":)" + kU8 + R"([0,2]},"b":)" + kU8 + "[1,3]}}", "123",
                "tensor 'b': data from byte 1, expected from byte 2"},
        Refused{R"({"a":)" + kU8 + R"([0,2]},"b":)" + kU8 + "[0,2]}}", "12",
                "data from byte 0, expected from byte 2"},
        Refused{R"({"a":)" + kU8 + "[1,3]}}", "123",
                "tensor 'a': data from byte 1, expected from byte 0"},
        Refused{R"({"a":)" + kU8 + "[0,2]}}", "123",
                "3 bytes after the header, expected 2, where the last tensor ends"},
        Refused{"{}", "1", "1 bytes after the header, expected 0"},
        Refused{R"({"a":)" + kU8 + "[0,2]}}", "1", "[0,2], expected a range in the 1 bytes"},
        Refused{R"({"a":)" + kU8 + "[2,0]}}", "12", "[2,0], expected a range in the 2 bytes"},
        Refused{One("U8", "0", "1,1"), "", "[1,1], expected a range in the 0 bytes"}));

INSTANTIATE_TEST_SUITE_P(
    Sizes, SafetensorsRefusesTest,
    ::testing::Values(
        Refused{One("F32", "3", "0,8"), "12345678",
                "tensor 'x': data of 8 bytes, expected 3 elements of 32 bits (F32 [3])"},
        Refused{One("F32", "", "0,8"), "12345678", "expected 1 elements of 32 bits (F32 [])"},
        Refused{One("F32", "1152921504606846976", "0,8"), "12345678",  // 2^60
                "expected 1152921504606846976 elements"},
        Refused{One("U8", "4294967296,4294967296", "0,0"), "", "expected a product below 2^63"},
        Refused{One("U8", "0,4294967296,4294967296", "0,0"), "", "expected a product below 2^63"},
        Refused{One("U8", "9223372036854775808", "0,0"), "",
                "shape with 9223372036854775808, expected whole numbers below 2^63"},
        Refused{One("U8", "18446744073709551616", "0,0"), "", "expected whole numbers"},
        Refused{One("U8", "-1", "0,1"), "1", "tensor 'x': shape with -1"},
        Refused{One("U8", "1.0", "0,1"), "1", "tensor 'x': shape with 1.0"},
        Refused{One("U8", "\"1\"", "0,1"), "1", "tensor 'x': shape with '1'"},
        Refused{One("U8", "[1]", "0,1"), "1", "tensor 'x': shape with a list"},
        Refused{One("U8", "{}", "0,1"), "1", "tensor 'x': shape with an object"},
        Refused{One("U8", "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1", "0,1"), "1",
                "tensor 'x': shape of more than 16 numbers"},
        Refused{One("U8", "1", "0,-1"), "1", "tensor 'x': data_offsets with -1"},
        Refused{One("U8", "1", "0"), "1", "data_offsets of 1 numbers, expected 2"},
        Refused{One("U8", "1", "0,1,1"), "1", "data_offsets of 3 numbers, expected 2"}));

INSTANTIATE_TEST_SUITE_P(
    Structure, SafetensorsRefusesTest,
    ::testing::Values(
        Refused{One("F33", "1", "0,1"), "1", "tensor 'x': dtype 'F33', expected one of BOOL F4"},
        Refused{R"({"a":)" + kU8 + R"([0,2]},"a":)" + kU8 + "[2,4]}}", "1234",
                "tensor 'a': stands there twice"},
        Refused{R"({"a":)" + kU8 + R"([0,2],"dtype":"U8"}})", "12",
                "tensor 'a': dtype stands there twice"},
        Refused{R"({"a":)" + kU8 + R"([0,2],"more":1}})", "12",
                "tensor 'a': key 'more', expected dtype, shape and data_offsets"},
        Refused{R"({"a":{"shape":[2],"data_offsets":[0,2]}})", "12", "tensor 'a': no dtype"},
        Refused{R"({"a":{"dtype":"U8","data_offsets":[0,2]}})", "12", "tensor 'a': no shape"},
        Refused{R"({"a":{"dtype":"U8","shape":[2]}})", "12", "tensor 'a': no data_offsets"},
        Refused{R"({"a":{"dtype":8}})", "", "tensor 'a': dtype 8, expected a string"},
        Refused{R"({"a":{"dtype":{}}})", "", "tensor 'a': dtype an object, expected a string"},
        Refused{R"({"a":{"shape":2}})", "", "tensor 'a': shape 2, expected a list"},
        Refused{R"({"a":{"data_offsets":{}}})", "", "data_offsets an object, expected a list"},
        Refused{R"({"a":1})", "", "tensor 'a': 1, expected an object"},
        Refused{R"({"a":[]})", "", "tensor 'a': a list, expected an object"},
        Refused{R"({"__metadata__":{"a":1}})", "", "metadata 'a': 1, expected a string"},
        Refused{R"({"__metadata__":{"a":{}}})", "", "metadata 'a': an object, expected a string"},
        Refused{R"({"__metadata__":{"a":"","a":""}})", "", "metadata 'a' stands there twice"},
        Refused{R"({"__metadata__":{},"__metadata__":{}})", "", "__metadata__ stands there twice"},
        Refused{R"({"__metadata__":"pt"})", "", "'__metadata__': 'pt', expected an object"},
        Refused{"{\"" + std::string(1025, 'n') + "\":{}}", "", "a name of 1025 bytes"},
        Refused{"{\"\xff\":{}}", "", "malformed JSON"}, Refused{"{\"a\":", "", "malformed JSON"}));

TEST_F(SafetensorsTest, TooManyTensorsOrMetadataAreRefused) {
  if (testing::kSanitized) GTEST_SKIP() << "a matter of size";
  std::string header = R"({"__metadata__":{)";
  for (int64_t i = 0; i <= kMaxSafetensorsMetadata; ++i) {
    absl::StrAppend(&header, i == 0 ? "" : ",", "\"", i, "\":\"\"");
  }
  EXPECT_THAT(ErrorOf(header + "}}", ""), HasSubstr("more than 10000 metadata"));
  header = "{";
  for (int64_t i = 0; i <= kMaxSafetensorsTensors; ++i) {
    absl::StrAppend(&header, i == 0 ? "\"" : ",\"", i,
                    R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})");
  }
  EXPECT_THAT(ErrorOf(header + "}", ""), HasSubstr("more than 100000 tensors"));
}

// Every prefix, and every prefix of the header with its length made to agree.
TEST_F(SafetensorsTest, ACutFileIsRefusedAtEveryByte) {
  const std::string data = "\x01\x02\x03" + Raw<float>({1.5f, -2.0f});
  const std::string whole = SafetensorsBytes(kTwoTensors, data);
  ASSERT_TRUE(Parse(whole).ok());
  for (size_t size = 0; size < whole.size(); ++size) {
    // In memory of its own size, so that the sanitizer sees a read past the end.
    const std::vector<uint8_t> bytes(whole.begin(), whole.begin() + static_cast<int64_t>(size));
    EXPECT_EQ(SafetensorsFile::Parse("f", bytes).status().code(), absl::StatusCode::kDataLoss)
        << size;
  }
  const std::string header = kTwoTensors;
  for (size_t size = 0; size < header.size(); ++size) {
    ErrorOf(header.substr(0, size), data);
  }
}

// One byte changed anywhere: accepted or refused, but nothing read or claimed beyond the file.
TEST_F(SafetensorsTest, AChangedByteNeverLeadsOutOfTheFile) {
  const std::string whole =
      SafetensorsBytes(kTwoTensors, "\x01\x02\x03" + Raw<float>({1.5f, -2.0f}));
  for (size_t at = 0; at < whole.size(); ++at) {
    for (const char c : {'\0', '0', '9', '"', '{', '}', ',', '-', '\x7f', '\xff'}) {
      std::vector<uint8_t> bytes(whole.begin(), whole.end());
      bytes[at] = static_cast<uint8_t>(c);
      const auto file = SafetensorsFile::Parse("f", bytes);
      if (!file.ok()) continue;
      size_t sum = 0;
      for (const SafetensorsTensor& tensor : file->tensors()) sum += file->Data(tensor).size();
      EXPECT_EQ(sum, 11u) << at;
    }
  }
}

}  // namespace
}  // namespace moe
