// For tests of files: a folder of its own for every test, and safetensors files made by hand.
#ifndef MOE_TESTS_MOE_IO_IO_TEST_H_
#define MOE_TESTS_MOE_IO_IO_TEST_H_

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace moe {

class IoTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::path(::testing::TempDir()) /
            ("io_" + std::to_string(getpid()) + "_" + test->name());
    std::filesystem::create_directories(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::string Path(const std::string& name) const { return (root_ / name).string(); }
  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(Path(name), std::ios::binary) << bytes;
    return Path(name);
  }
  // A file of a machine that is made of files: "/proc/meminfo" below root_.
  void Put(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_.string() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  static std::string Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  int64_t NumFiles() const { return std::distance(std::filesystem::directory_iterator(root_), {}); }

  std::filesystem::path root_;
};

// A safetensors file: the length of the header, the header, the data.
inline std::string SafetensorsBytes(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  std::string bytes(sizeof(size), '\0');
  std::memcpy(bytes.data(), &size, sizeof(size));
  return bytes + header + data;
}

inline absl::Span<const uint8_t> AsBytes(absl::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace moe

#endif  // MOE_TESTS_MOE_IO_IO_TEST_H_
