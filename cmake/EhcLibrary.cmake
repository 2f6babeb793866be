# The library: objects -> libehc.so (exported symbols only) and libehc_internal.a (for the program
# and the tests, which read the tables).
find_package(Threads REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)

foreach(isa ${EHC_KERNEL_ISAS})
  add_library(ehc_isa_${isa} OBJECT)
  target_compile_definitions(ehc_isa_${isa} PRIVATE EHC_ISA=${isa})
  target_compile_options(ehc_isa_${isa} PRIVATE ${EHC_OPTIMISE_KERNELS} ${EHC_ISA_FLAGS_${isa}} -fno-math-errno -fno-trapping-math -fno-exceptions
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-uninitialized>)
  target_include_directories(ehc_isa_${isa} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(ehc_isa_${isa} PRIVATE ehc_flags)
  set_target_properties(ehc_isa_${isa} PROPERTIES EHC_IS_KERNELS ON)
endforeach()

file(GLOB EHC_SOURCES CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/src/core/*.cc ${PROJECT_SOURCE_DIR}/src/backends/cpu/*.cc
  ${PROJECT_SOURCE_DIR}/src/tables/*.cc ${PROJECT_SOURCE_DIR}/src/text/*.cc
  ${PROJECT_SOURCE_DIR}/src/capi/*.cc)
add_library(ehc_objects OBJECT ${EHC_SOURCES} ${PROJECT_BINARY_DIR}/generated/registry.cc)
target_include_directories(ehc_objects PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/generated)
target_link_libraries(ehc_objects PRIVATE ehc_flags Threads::Threads nlohmann_json::nlohmann_json)
configure_file(${PROJECT_SOURCE_DIR}/cmake/version.h.in ${PROJECT_BINARY_DIR}/generated/ehc/version.h @ONLY)

set(EHC_LINK Threads::Threads)
if(EHC_HAS_CUDA)
  file(GLOB EHC_CUDA_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/backends/cuda/*.cu)
  add_library(ehc_cuda OBJECT ${EHC_CUDA_SOURCES})
  target_include_directories(ehc_cuda PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(ehc_cuda PRIVATE ehc_flags)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/src/core/cuda_support_none.cc PROPERTIES HEADER_FILE_ONLY ON)
  list(APPEND EHC_LINK CUDA::cudart_static)
endif()

if(NOT EHC_BLAS STREQUAL "OFF")
  find_library(EHC_OPENBLAS openblas)
  if(EHC_OPENBLAS)
    target_compile_definitions(ehc_flags INTERFACE EHC_HAS_OPENBLAS=1)
    list(APPEND EHC_LINK ${EHC_OPENBLAS})
  elseif(EHC_BLAS STREQUAL "ON")
    message(FATAL_ERROR "EHC_BLAS=ON: OpenBLAS not found; install libopenblas-dev")
  endif()
endif()

include(${PROJECT_SOURCE_DIR}/src/ops/operators.cmake)
ehc_generate_registry(${PROJECT_BINARY_DIR}/generated/registry.cc)

set(EHC_ALL_OBJECTS $<TARGET_OBJECTS:ehc_objects>)
foreach(isa ${EHC_KERNEL_ISAS})
  list(APPEND EHC_ALL_OBJECTS $<TARGET_OBJECTS:ehc_isa_${isa}>)
endforeach()
if(EHC_HAS_CUDA)
  list(APPEND EHC_ALL_OBJECTS $<TARGET_OBJECTS:ehc_cuda>)
endif()

add_library(ehc SHARED ${EHC_ALL_OBJECTS})
add_library(ehc::ehc ALIAS ehc)
# Before 1.0 a minor version may change the C++ ABI, so it is part of the SONAME.
set(EHC_SOVERSION ${PROJECT_VERSION_MAJOR})
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(EHC_SOVERSION 0.${PROJECT_VERSION_MINOR})
endif()
set_target_properties(ehc PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${EHC_SOVERSION}
  LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/ehc.map)
target_link_options(ehc PRIVATE LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/ehc.map)
target_include_directories(ehc INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/generated>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(ehc INTERFACE cxx_std_20)
target_link_libraries(ehc PRIVATE ${EHC_LINK} $<BUILD_INTERFACE:ehc_flags>)

add_library(ehc_internal STATIC EXCLUDE_FROM_ALL ${EHC_ALL_OBJECTS})
target_include_directories(ehc_internal PUBLIC ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/generated)
target_link_libraries(ehc_internal PUBLIC ehc_flags nlohmann_json::nlohmann_json ${EHC_LINK})
