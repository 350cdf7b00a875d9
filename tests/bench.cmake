# The library of `moe bench`. Its command is among the tests of the program (cli.cmake).
find_package(nlohmann_json REQUIRED)
moe_test(bench_formula_test LABELS unit SOURCES bench_formula_test.cc LIBS moe_bench)
moe_test(bench_traffic_test LABELS unit SOURCES bench_traffic_test.cc LIBS moe_bench)
moe_test(bench_tables_test LABELS unit SOURCES bench_tables_test.cc
  LIBS moe_bench nlohmann_json::nlohmann_json)
moe_test(bench_slots_test LABELS unit SOURCES bench_slots_test.cc LIBS moe_bench)
moe_test(bench_kernel_test LABELS unit SOURCES bench_kernel_test.cc LIBS moe_bench)
moe_test(bench_gemm_test LABELS unit SOURCES bench_gemm_test.cc LIBS moe_bench)
moe_test(bench_device_test LABELS unit device SOURCES bench_device_test.cc LIBS moe_bench)
moe_test(bench_layer_test LABELS unit threads SOURCES bench_layer_test.cc LIBS moe_bench TIMEOUT 300)
moe_test(bench_collectives_test LABELS unit threads
  SOURCES bench_collectives_test.cc comm_env_local.cc LIBS moe_bench)
if(MOE_MPI_FOUND)
  moe_test(bench_collectives_mpi_test LABELS mpi NPROC 1 3
    SOURCES bench_collectives_test.cc comm_env_mpi.cc LIBS moe_bench moe_comm_mpi)
endif()
