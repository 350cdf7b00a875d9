# The installed package: libraries, headers, and find_package(moe) with the target moe::moe.
include(CMakePackageConfigHelpers)

if(MOE_CUDA_SIMULATED)
  install(CODE "message(FATAL_ERROR \"a build with simulated CUDA devices is for tests alone\")")
endif()

# All layers in one name. The program takes the plain name `moe`.
add_library(moe_all INTERFACE)
add_library(moe::moe ALIAS moe_all)
set_target_properties(moe_all PROPERTIES EXPORT_NAME moe)
set(moe_layers kernels comm gating dispatch moe)
foreach(layer ${moe_layers})
  target_link_libraries(moe_all INTERFACE moe_${layer})
  # Headers go below moe-1/, which is the include path: "moe/moe.h" works for the user as it does
  # here, and nothing named kernels/ or comm/ lands in the user's own path.
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/${layer}
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moe-1
    FILES_MATCHING PATTERN "*.h"
    PATTERN "*-inl.h" EXCLUDE  # of one .cc, compiled once per SIMD target
    PATTERN "*_cuda.h" EXCLUDE  # of one .cc and one .cu
    PATTERN "cuda_*.h" EXCLUDE  # of .cu files
    PATTERN "bounded_json.h" EXCLUDE  # the package does not need nlohmann-json
    PATTERN "config_keys.h" EXCLUDE
    PATTERN "family.h" EXCLUDE
    PATTERN "cli" EXCLUDE
    PATTERN "bench" EXCLUDE  # of the program moe bench
    PATTERN "report" EXCLUDE  # of the program moe report
    PATTERN "verify" EXCLUDE  # of the program moe verify
    PATTERN "mpi" EXCLUDE  # programs meet MPI through comm/create.h
    PATTERN "nccl_[agrl]*.h" EXCLUDE)  # all but nccl_world.h see <nccl.h>
endforeach()
install(FILES ${PROJECT_SOURCE_DIR}/kernels/base/cuda_devices.h # no CUDA in it: for programs
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moe-1/kernels/base)
target_link_libraries(moe_all INTERFACE moe_comm_run)
install(TARGETS moe_all moe_flags moe_kernels moe_comm moe_comm_run moe_gating moe_dispatch moe_moe
  EXPORT moe-targets)
if(MOE_MPI_FOUND)
  install(TARGETS moe_comm_mpi moe_mpi EXPORT moe-targets)
endif()

if(MOE_NCCL_FOUND)
  install(TARGETS moe_comm_nccl EXPORT moe-targets)
endif()

set(moe_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moe)
install(EXPORT moe-targets NAMESPACE moe:: DESTINATION ${moe_package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/moe-config.cmake.in
  ${CMAKE_BINARY_DIR}/moe-config.cmake INSTALL_DESTINATION ${moe_package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_BINARY_DIR}/moe-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/moe-config.cmake ${CMAKE_BINARY_DIR}/moe-config-version.cmake
  DESTINATION ${moe_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
