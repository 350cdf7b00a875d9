moe_test(comm_contract_local_test LABELS contract cpu threads
  SOURCES comm_contract_test.cc comm_contract_order_test.cc comm_contract_failure_test.cc comm_env_local.cc LIBS moe_comm)
moe_test(ring_all_reduce_test LABELS unit cpu threads
  SOURCES ring_all_reduce_test.cc comm_env_local.cc LIBS moe_comm)
moe_test(mesh_test LABELS unit cpu threads
  SOURCES mesh_test.cc comm_env_local.cc LIBS moe_comm)
moe_test(local_memory_test LABELS unit cpu threads
  SOURCES local_memory_test.cc counting_new.cc LIBS moe_comm)
moe_test(device_comm_test LABELS unit device threads SOURCES device_comm_test.cc LIBS moe_comm)
moe_test(extremes_test LABELS unit cpu threads SOURCES extremes_test.cc LIBS moe_comm)
moe_test(bootstrap_test LABELS unit cpu threads
  SOURCES bootstrap_test.cc LIBS moe_comm_run)
if(MOE_NCCL_FOUND)
  # Over real GPUs by scripts/gpu_check.sh, with several ranks; here one.
  add_executable(comm_contract_nccl_processes_test comm_contract_test.cc comm_contract_order_test.cc
    comm_contract_failure_test.cc comm_env_nccl_processes.cc)
  target_link_libraries(comm_contract_nccl_processes_test
    PRIVATE moe_comm_nccl moe_private_flags GTest::gmock GTest::gtest_main)
  add_test(NAME comm_contract_nccl_processes COMMAND ${PROJECT_SOURCE_DIR}/scripts/nccl_one_gpu.sh -n 1
    $<TARGET_FILE:comm_contract_nccl_processes_test> --gtest_brief=1 --gtest_filter=*R1*)
  set_tests_properties(comm_contract_nccl_processes PROPERTIES LABELS "contract;device" TIMEOUT 120
    SKIP_REGULAR_EXPRESSION "no (GPU|NCCL): ")
  add_dependencies(device_tests comm_contract_nccl_processes_test)
endif()
if(NOT MOE_MPI_FOUND)
  return()
endif()

moe_test(comm_contract_mpi_test LABELS contract mpi NPROC 1 2 3 4
  SOURCES comm_contract_test.cc comm_contract_order_test.cc comm_contract_failure_test.cc comm_env_mpi.cc LIBS moe_comm_mpi)

# Exit codes under a launcher. The launcher's own is what a user's script sees.
add_executable(run_ranks_main run_ranks_main.cc)
target_link_libraries(run_ranks_main PRIVATE moe_comm_run moe_private_flags)
function(moe_exit_code_test mode ranks code)
  add_test(NAME run_ranks_mpi.${mode}.np${ranks}
    COMMAND sh -c "\"$1\" \"$2\" \"$3\" \"$4\" \"$5\"; code=$?; test $code -eq ${code} || { echo exit $code; exit 1; }"
      sh ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} $<TARGET_FILE:run_ranks_main> ${mode})
  set_tests_properties(run_ranks_mpi.${mode}.np${ranks} PROPERTIES LABELS "contract;mpi" TIMEOUT 30
    ENVIRONMENT "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_rmaps_base_oversubscribe=1")
endfunction()
moe_exit_code_test(ok 3 0)
moe_exit_code_test(fail 3 6)
moe_exit_code_test(missing 2 8)
# Not the exit code: MPICH's launcher may see the broken connection first, and has one of its own.
add_test(NAME run_ranks_mpi.late.np2
  COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} 2 $<TARGET_FILE:run_ranks_main> late)
set_tests_properties(run_ranks_mpi.late.np2 PROPERTIES LABELS "contract;mpi" TIMEOUT 30
  PASS_REGULAR_EXPRESSION "MPI_Init_thread: not done after 1s"
  ENVIRONMENT "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_rmaps_base_oversubscribe=1")
