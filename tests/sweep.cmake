# The sweep: axes, rows, memory, and the command.
if(TARGET moe_sweep)
  moe_test(sweep_axis_test LABELS unit SOURCES sweep_axis_test.cc LIBS moe_sweep)
  moe_test(sweep_rows_test LABELS unit SOURCES sweep_rows_test.cc LIBS moe_sweep moe_report)
endif()
if(TARGET moe_cli)
  moe_test(sweep_memory_test LABELS unit SOURCES sweep_memory_test.cc LIBS moe_sweep moe_cli
    TIMEOUT 300)
  moe_cli_test(sweep LABELS smoke TIMEOUT 300 ARGS
    $<$<BOOL:${MOE_MPI_FOUND}>:${MPIEXEC_EXECUTABLE}>)
endif()
