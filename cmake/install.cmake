# The installed package: libraries, headers, and find_package(moe) with the target moe::moe
# (and moe::mpi where this build has MPI).
include(CMakePackageConfigHelpers)
if(NOT TARGET moe_moe OR NOT TARGET moe_dispatch OR NOT TARGET moe_gating OR NOT TARGET moe_comm)
  return()
endif()

# All layers in one name. The program takes the plain name `moe`.
add_library(moe_all INTERFACE)
add_library(moe::moe ALIAS moe_all)
set_target_properties(moe_all PROPERTIES EXPORT_NAME moe)
set(moe_layers kernels comm gating dispatch moe)
foreach(layer ${moe_layers})
  target_link_libraries(moe_all INTERFACE moe_${layer})
  set_target_properties(moe_${layer} PROPERTIES EXPORT_NAME moe_${layer})
  # Headers go below moe-1/, which is the include path: "moe/moe.h" works for the user as it does
  # here, and nothing named kernels/ or comm/ lands in the user's own path.
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/${layer}
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moe-1
    FILES_MATCHING PATTERN "*.h"
    PATTERN "*-inl.h" EXCLUDE   # of one .cc, compiled once per SIMD target
    PATTERN "cli" EXCLUDE
    PATTERN "mpi" EXCLUDE)
endforeach()
install(TARGETS moe_all moe_flags moe_kernels moe_comm moe_gating moe_dispatch moe_moe
  EXPORT moe-targets)

set(moe_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moe)
install(EXPORT moe-targets NAMESPACE moe:: DESTINATION ${moe_package_dir})

# The MPI backend is a component of its own: find_package(moe COMPONENTS mpi) then finds the MPI that
# it was built with, and other users need none.
if(TARGET moe_comm_mpi)
  set_target_properties(moe_comm_mpi PROPERTIES EXPORT_NAME mpi)
  install(TARGETS moe_comm_mpi moe_mpi EXPORT moe-mpi-targets)
  install(EXPORT moe-mpi-targets NAMESPACE moe:: DESTINATION ${moe_package_dir})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/comm/mpi
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moe-1/comm FILES_MATCHING PATTERN "*.h")
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/moe-config.cmake.in
  ${CMAKE_BINARY_DIR}/moe-config.cmake INSTALL_DESTINATION ${moe_package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_BINARY_DIR}/moe-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/moe-config.cmake ${CMAKE_BINARY_DIR}/moe-config-version.cmake
  DESTINATION ${moe_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
