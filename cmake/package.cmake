# Debian packages of a build with libmoe.so that is installed under /usr (preset deb):
# libmoe0.1, libmoe-dev and moe.
set(CPACK_GENERATOR DEB)
# Policy requires an address. This one belongs to nobody, and never can (RFC 2606).
set(CPACK_PACKAGE_CONTACT "moe project <moe@moe.invalid>" CACHE STRING "Maintainer of the packages")
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/debian_policy.cmake)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(what "
Experts are spread over ranks, which are threads of one process or processes
under MPI: gates, dispatch and combine, grouped expert products, gradients, and
the same bits at any layout.")

set(CPACK_COMPONENTS_ALL lib dev program)
set(CPACK_DEBIAN_LIB_PACKAGE_NAME libmoe${moe_soversion})
set(CPACK_DEBIAN_LIB_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_LIB_DESCRIPTION "mixture-of-experts layers, for C++${what}")
file(WRITE ${PROJECT_BINARY_DIR}/debian/triggers "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_LIB_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/debian/triggers)
set(CPACK_DEBIAN_DEV_PACKAGE_NAME libmoe-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_DESCRIPTION "mixture-of-experts layers, for C++ (development files)${what}")
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "libmoe${moe_soversion} (= ${PROJECT_VERSION}), libabsl-dev")
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME moe)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SUGGESTS mpi-default-bin)
set(CPACK_DEBIAN_PROGRAM_DESCRIPTION "trains, checks and measures mixture-of-experts layers${what}")
include(CPack)
