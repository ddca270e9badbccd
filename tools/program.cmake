# weft_program(NAME SOURCES...): a program with all of weft in it, on the devices that the libraries were built for. Used by weft's
# own build, and by those of programs made with its libraries (weftConfig.cmake).
function(weft_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE weft_cli)
  if(WEFT_CUDA)
    target_link_libraries(${name} PRIVATE weft_cuda_side CUDA::cudart_static CUDA::cublasLt ${CMAKE_DL_LIBS})
    if(WEFT_NCCL)
      target_link_libraries(${name} PRIVATE ${NCCL_LIBRARY})
    endif()
  endif()
endfunction()
