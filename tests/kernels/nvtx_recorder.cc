// A tool as NVTX loads it (NVTX_INJECTION64_PATH): writes the ranges of a program down.
#include <string>

#include <nvtx3/nvToolsExt.h>

namespace {

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

}  // namespace

extern "C" {

// What the program has done so far: "<outer<inner>>".
const char* NvtxRecorded() {
  return Log().c_str();
}

int NVTX_API InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
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

}  // extern "C"
