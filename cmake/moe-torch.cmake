# The target moe::torch: <moe/torch.h>, which a program compiles with its own LibTorch. Uses the
# target `torch` if find_package(Torch) has made it, else the LibTorch that is found here, of which
# libtorch_cpu suffices: Torch's own package requires CUDA's compiler if its build had CUDA.
# Torch_DIR: its folder share/cmake/Torch, as for Torch's own package.
if(NOT TARGET torch)
  find_path(MOE_TORCH_INCLUDE_DIR torch/csrc/api/include/torch/torch.h HINTS ${Torch_DIR}/../../../include)
  find_library(MOE_TORCH_CPU_LIBRARY torch_cpu HINTS ${Torch_DIR}/../../../lib)
  find_library(MOE_C10_LIBRARY c10 HINTS ${Torch_DIR}/../../../lib)
endif()
if(TARGET torch OR (MOE_TORCH_INCLUDE_DIR AND MOE_TORCH_CPU_LIBRARY AND MOE_C10_LIBRARY))
  set(moe_torch_FOUND TRUE)
  add_library(moe::torch INTERFACE IMPORTED)
  target_link_libraries(moe::torch INTERFACE moe::moe)
  if(TARGET torch)
    target_link_libraries(moe::torch INTERFACE torch)
  else()
    target_include_directories(moe::torch INTERFACE ${MOE_TORCH_INCLUDE_DIR}
      ${MOE_TORCH_INCLUDE_DIR}/torch/csrc/api/include)
    target_link_libraries(moe::torch INTERFACE ${MOE_TORCH_CPU_LIBRARY} ${MOE_C10_LIBRARY})
  endif()
else()
  set(moe_torch_FOUND FALSE)
endif()
