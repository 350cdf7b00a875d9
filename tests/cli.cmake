# Text data and the program.
if(TARGET moe_moe)
  moe_test(text_data_test LABELS unit SOURCES text_data_test.cc LIBS moe_moe)
  moe_test(sampler_test LABELS unit SOURCES sampler_test.cc LIBS moe_moe)
endif()
