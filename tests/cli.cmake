# Text data and the program.
if(TARGET moe_moe)
  moe_test(text_data_test LABELS unit SOURCES text_data_test.cc LIBS moe_moe)
  moe_test(sampler_test LABELS unit SOURCES sampler_test.cc LIBS moe_moe)
endif()
if(TARGET moe_cli)
  find_package(nlohmann_json REQUIRED)
  moe_test(options_test LABELS unit SOURCES options_test.cc LIBS moe_cli)
  moe_test(launch_flags_test LABELS unit SOURCES launch_flags_test.cc LIBS moe_cli)
  moe_test(metrics_test LABELS unit SOURCES metrics_test.cc
    LIBS moe_cli nlohmann_json::nlohmann_json)
endif()
