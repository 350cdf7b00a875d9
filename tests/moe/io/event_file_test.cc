#include "moe/io/event_file.h"

#include <string>

#include <absl/strings/escaping.h>
#include <absl/time/time.h>
#include <gtest/gtest.h>

namespace moe {
namespace {

TEST(EventFileTest, CrcIsCastagnolis) {
  EXPECT_EQ(Crc32c(""), 0u);
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);            // the check value of CRC-32C
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
}

// The bytes are those that TensorBoard's RecordWriter and messages wrote.
TEST(EventFileTest, RecordsAreTensorBoards) {
  const absl::Time time = absl::FromUnixSeconds(1'500'000'000);
  EXPECT_EQ(absl::BytesToHexString(VersionRecord(time)),
            "1800000000000000a37f4b2209000000c00b5ad6411a0d627261696e2e4576656e743a324ca9a464");
  EXPECT_EQ(absl::BytesToHexString(RestartRecord(time, 8)),
            "0f000000000000006d532b0909000000c00b5ad64110083a020801a93377b2");
  EXPECT_EQ(
      absl::BytesToHexString(StepRecord(time + absl::Milliseconds(250), 300, {{"train/loss", 2.5}},
                                        {{"load/0", {0, 2, 3}}})),
      "8f000000000000006eebe2ec09000010c00b5ad64110ac022a80010a110a0a747261696e2f6c6f7373150000"
      "20400a6b0a066c6f61642f302a6109000000000000e0bf110000000000000440190000000000001440210000"
      "000000002040290000000000002c403218000000000000e03f000000000000f83f00000000000004403a1800"
      "0000000000000000000000000000400000000000000840e985a545");
}

}  // namespace
}  // namespace moe
