// The functions of cuBLAS that this project calls, on a CPU, in streams of the fake runtime: what a
// build with MOE_ENABLE_CUDA=SIMULATED links in place of the library.
//
// Plain loops that sum in float32, in ascending order. Strict where the library is lenient or says
// nothing: a matrix outside the handle's device, a leading dimension below its column's length,
// types that do not go together, a product without terms, a missing workspace (results could then
// depend on other streams) and another device than the handle's are printed and abort the process.
#ifndef MOE_TESTS_CUSIM_FAKE_CUBLAS_H_
#define MOE_TESTS_CUSIM_FAKE_CUBLAS_H_

#include <cstdint>

namespace cusim {

// Products enqueued since the process began.
int64_t CublasProducts();

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_FAKE_CUBLAS_H_
