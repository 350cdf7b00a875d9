# What nvcc made of the CUDA kernels. Executing them without a GPU: cusim.cmake.
find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND)
  add_test(NAME ptxas_table_test COMMAND ${Python3_EXECUTABLE}
    ${CMAKE_CURRENT_SOURCE_DIR}/ptxas_table_test.py ${PROJECT_SOURCE_DIR}/cmake/ptxas_table.py)
  add_test(NAME ptx_check_test COMMAND ${Python3_EXECUTABLE}
    ${CMAKE_CURRENT_SOURCE_DIR}/ptx_check_test.py ${PROJECT_SOURCE_DIR}/cmake/ptx_check.py)
  add_test(NAME gpu_table_test COMMAND ${Python3_EXECUTABLE}
    ${CMAKE_CURRENT_SOURCE_DIR}/gpu_table_test.py ${PROJECT_SOURCE_DIR}/scripts/gpu_table.py)
  set_tests_properties(ptxas_table_test ptx_check_test gpu_table_test PROPERTIES LABELS "unit;cuda" TIMEOUT 60)
endif()
if(NOT MOE_CUDA_FOUND)
  return()
endif()
moe_test(cuda_link_test LABELS unit cuda SOURCES cuda_link_test.cc
  LIBS moe_kernels CUDA::cudart_static)
if(Python3_FOUND)
  add_test(NAME cuda_resources COMMAND ${Python3_EXECUTABLE}
    ${PROJECT_SOURCE_DIR}/cmake/ptxas_table.py ${MOE_PTXAS_LOGS}
    ${PROJECT_SOURCE_DIR}/kernels/cuda_resources.tsv)
  add_test(NAME cuda_ptx COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/ptx_check.py
    ${PROJECT_SOURCE_DIR}/kernels/cuda_instructions.tsv $<TARGET_OBJECTS:moe_kernels_ptx>
    COMMAND_EXPAND_LISTS)
  set_tests_properties(cuda_resources cuda_ptx PROPERTIES LABELS "unit;cuda" TIMEOUT 60)
  add_test(NAME gpu_check COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/gpu_check_test.sh
    ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR} ${CMAKE_CURRENT_BINARY_DIR}/gpu_check)
  set_tests_properties(gpu_check PROPERTIES LABELS "smoke;cuda" TIMEOUT 300 SKIP_RETURN_CODE 77)
endif()
