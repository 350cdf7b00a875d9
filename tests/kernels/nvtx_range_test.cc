// kernels/base/nvtx_range.h with a tool that is linked into the program.
#include "kernels/base/nvtx_range.h"

#include <string>

#include <gtest/gtest.h>

#define NVTX_NO_IMPL  // omits NVTX's definition of what is defined below
#include <nvtx3/nvToolsExt.h>

namespace {

// The recorded calls: "<outer<inner>>".
std::string& Log() {
  static std::string log;
  return log;
}

int NVTX_API Push(const char* name) {
  Log() += std::string("<") + name;
  return 0;
}
int NVTX_API Pop() {
  Log() += ">";
  return 0;
}

int NVTX_API Initialize(NvtxGetExportTableFunc_t get_table) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int count = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &count) == 0) {
    return 0;
  }
  *functions[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(Push);
  *functions[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(Pop);
  return 1;
}

}  // namespace

// The function that NVTX calls first.
extern "C" {
extern NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr;
NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = Initialize;
}

namespace moe {
namespace {

TEST(NvtxRangeTest, AToolSeesNamesAndNesting) {
  {
    const NvtxRange layer("layer");
    const NvtxRange gate("gate");
  }
  const NvtxRange open("open");
  EXPECT_EQ(Log(), "<layer<gate>><open");
}

}  // namespace
}  // namespace moe
