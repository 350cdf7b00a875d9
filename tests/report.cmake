# The report: inputs, charts, comparison.
if(TARGET moe_report)
  moe_test(report_charts_test LABELS unit SOURCES report_charts_test.cc LIBS moe_report)
  moe_test(report_inputs_test LABELS unit SOURCES report_inputs_test.cc LIBS moe_report)
  moe_test(report_compare_test LABELS unit SOURCES report_compare_test.cc LIBS moe_report)
endif()

# End to end, and in a browser where there is one.
if(TARGET moe AND TARGET moe_report)
  foreach(name report report_render)
    add_test(NAME cli_${name} COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/cli/${name}.sh
      $<TARGET_FILE:moe> ${CMAKE_CURRENT_SOURCE_DIR}/report/data)
    set_tests_properties(cli_${name} PROPERTIES LABELS smoke TIMEOUT 120 SKIP_RETURN_CODE 77)
  endforeach()
endif()
