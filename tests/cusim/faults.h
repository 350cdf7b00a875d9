// Shared by the tests of planted faults.
#ifndef MOE_TESTS_CUSIM_FAULTS_H_
#define MOE_TESTS_CUSIM_FAULTS_H_

#include <string>

#include <gtest/gtest.h>

namespace cusim {

// "name of the fault ... this file:line" as a regular expression for the program's output.
inline std::string Named(const std::string& fault, int line, const char* file = __builtin_FILE()) {
  const std::string path = file;
  return fault + ".*" + path.substr(path.rfind('/') + 1) + ":" + std::to_string(line);
}

// Every fault ends the program; each runs in a process of its own.
class CusimFaultDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_FAULTS_H_
