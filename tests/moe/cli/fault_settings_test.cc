// Flags of `moe train` that inject a fault.
#include "moe/cli/base/fault_settings.h"

#include <set>
#include <string>

#include "tests/moe/cli/settings_harness.h"

namespace moe::cli {
namespace {

using ::testing::ElementsAre;
using testing::ErrorOf;
using ::testing::HasSubstr;
using testing::Load;
using testing::Make;

Fault FaultFrom(const testing::Strings& args) {
  const auto options = Make(args);
  EXPECT_TRUE(options.ok()) << options.status();
  return options.ok() ? options->fault : Fault();
}

TEST(FaultSettingsTest, ATextNamesOneFault) {
  EXPECT_TRUE(FaultFrom({}).ranks.empty());
  const Fault fault = FaultFrom({"--fault", "rank=1,step=5,phase=combine backward,kind=hang"});
  EXPECT_THAT(fault.ranks, ElementsAre(1));
  EXPECT_EQ(fault.step, 5);
  EXPECT_EQ(fault.phase, "combine backward");
  EXPECT_EQ(fault.kind, FaultKind::kHang);
  EXPECT_EQ(fault.micro_batch, -1);
  EXPECT_EQ(FaultFrom({"--fault", "rank=3,phase=start,kind=segv"}).step, -1);
  EXPECT_EQ(FaultFrom({"--fault", "rank=0,micro-batch=3,phase=gate,kind=slow"}).micro_batch, 3);
}

TEST(FaultSettingsTest, TheEnvironmentNamesItToo) {
  auto settings = Load({"--data", "text"}, {"MOE_FAULT=rank=1,phase=x,kind=throw"});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_THAT(ErrorOf(FaultOf(*settings, 2).status()),
              HasSubstr("MOE_FAULT: phase is 'x', expected one of start, data, "));
}

TEST(FaultSettingsTest, UnknownValuesAreListed) {
  const auto error = [](const std::string& text) {
    return ErrorOf(Make({"--fault", text}).status());
  };
  EXPECT_THAT(error("rank=4,phase=data,kind=throw"),
              HasSubstr("rank is '4', expected a rank, 0 to 3"));
  EXPECT_THAT(error("rank=0,phase=data,kind=x"),
              HasSubstr("kind is 'x', expected one of throw, exit, kill, segv, hang, stop, slow"));
  EXPECT_THAT(error("rank=0,step=0,phase=data,kind=kill"), HasSubstr("a step, from 1"));
  EXPECT_THAT(error("rank=0,micro-batch=-1,phase=data,kind=kill"), HasSubstr("from 0"));
  EXPECT_THAT(error("rank=0,phase=data"), HasSubstr("phases: start, data, "));
  for (const char* const twice :
       {"rank=0,kind=slow,kind=throw,phase=data", "rank=0,rank=1,kind=slow,phase=data",
        "rank=0,kind=slow,phase=data,phase=data", "rank=0,step=1,step=2,kind=slow,phase=data"}) {
    EXPECT_THAT(error(twice), HasSubstr("= once")) << twice;
  }
  EXPECT_THAT(
      error("rank=0,phase=plan,kind=nan"),
      HasSubstr("phase is 'plan', expected with kind=nan one of embedding, attention, gate, "
                "experts, combine, loss, "));
  EXPECT_THAT(error("nonsense"),
              HasSubstr("expected rank=R,step=N,micro-batch=N,phase=NAME,kind=NAME"));
}

TEST(FaultSettingsTest, MegatronsFlagsDrawByTheirSeed) {
  const testing::Strings flags = {"--fault-injector-ranks",
                                  "0,3",
                                  "--fault-injector-fault-types",
                                  "SEGFAULT,sigkill,hang",
                                  "--fault-injector-delay-start-iteration",
                                  "7"};
  std::set<std::string> phases;
  std::set<FaultKind> kinds;
  for (int seed = 0; seed < 30; ++seed) {
    testing::Strings seeded = flags;
    seeded.insert(seeded.end(), {"--fault-injector-seed", std::to_string(seed)});
    const Fault fault = FaultFrom(seeded);
    EXPECT_THAT(fault.ranks, ElementsAre(0, 3));
    EXPECT_EQ(fault.step, 8);
    EXPECT_EQ(fault.phase, FaultFrom(seeded).phase);
    phases.insert(fault.phase);
    kinds.insert(fault.kind);
  }
  EXPECT_GT(phases.size(), 5u);
  EXPECT_THAT(kinds, ElementsAre(FaultKind::kKill, FaultKind::kSegv, FaultKind::kHang));
  EXPECT_FALSE(phases.contains("finalize"));  // not in a step
  testing::Strings values = flags;
  values[3] = "nan,-inf";
  for (int seed = 0; seed < 30; ++seed) {
    testing::Strings seeded = values;
    seeded.insert(seeded.end(), {"--fault-injector-seed", std::to_string(seed)});
    EXPECT_NE(FaultFrom(seeded).phase, "dispatch");  // it makes no values
  }
}

TEST(FaultSettingsTest, TheStepAfterTheDelay) {
  const auto flags = [](const char* delay) {
    return testing::Strings{"--fault-injector-ranks", "0", "--fault-injector-delay-start-iteration",
                            delay};
  };
  EXPECT_EQ(FaultFrom(flags("2147483647")).step, int64_t{2147483648});
  EXPECT_EQ(FaultFrom(flags("0")).step, 1);
  EXPECT_THAT(ErrorOf(Make(flags("-5")).status()), HasSubstr("expected at least 0"));
}

TEST(FaultSettingsTest, FlagsThatDoNotGoTogether) {
  EXPECT_THAT(ErrorOf(Make({"--fault-injector-seed", "3"}).status()),
              HasSubstr("--fault-injector-ranks beside it"));
  // The default, as the settings of a run's first line have it.
  EXPECT_TRUE(Make({"--fault-injector-seed", "0"}).ok());
  EXPECT_THAT(
      ErrorOf(
          Make({"--fault-injector-ranks", "1", "--fault", "rank=0,phase=data,kind=kill"}).status()),
      HasSubstr("expected none beside --fault-injector-ranks"));
  EXPECT_THAT(
      ErrorOf(
          Make({"--fault-injector-ranks", "1", "--fault-injector-fault-types", "gpu"}).status()),
      HasSubstr("expected one of throw, exit"));
}

}  // namespace
}  // namespace moe::cli
