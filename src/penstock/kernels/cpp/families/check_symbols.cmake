# Fails the build when a kernel family defines a weak symbol: the linker keeps one copy of those for all objects, and a
# copy compiled for AVX-512 would crash every other processor.  Called with -DNM=… -DOBJECTS=…
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND "${NM}" --defined-only "${object}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
  if(weak)
    message(FATAL_ERROR "weak symbols in ${object}:\n${weak}")
  endif()
endforeach()
