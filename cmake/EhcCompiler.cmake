# Flags of every C++ file. `-ffp-contract=off`: the order of fma is part of the contract.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(EHC_OPTIMISE -O2)
set(EHC_OPTIMISE_KERNELS -O3)
if(EHC_SANITIZE)
  set(EHC_OPTIMISE -O1)
  set(EHC_OPTIMISE_KERNELS -O1)
elseif(CMAKE_BUILD_TYPE STREQUAL "Debug")
  set(EHC_OPTIMISE_KERNELS -O0)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "${EHC_OPTIMISE} -g1")
set(CMAKE_C_FLAGS_RELEASE "${EHC_OPTIMISE} -g1")

find_program(EHC_CCACHE ccache)
if(EHC_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${EHC_CCACHE})
  # The base makes paths relative, so that build trees share objects; without the sloppiness ccache
  # leaves alone what uses a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
    CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros ${EHC_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${EHC_CCACHE})
endif()

set(EHC_WARNINGS -Wall -Wextra -Wshadow -Wpedantic)
if(EHC_WERROR)
  list(APPEND EHC_WARNINGS -Werror)
endif()
add_library(ehc_flags INTERFACE)
target_compile_options(ehc_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:${EHC_WARNINGS};-ffp-contract=off>)

if(EHC_SANITIZE)
  target_compile_options(ehc_flags INTERFACE
    $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${EHC_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>)
  target_link_options(ehc_flags INTERFACE -fsanitize=${EHC_SANITIZE})
  # These checks make the compiler spend minutes on unrolled kernels; AddressSanitizer sees what they
  # would see there. Behind the interface options above, so that they come later on the command line.
  if(EHC_SANITIZE MATCHES "undefined")
    target_compile_options(ehc_flags INTERFACE
      $<$<BOOL:$<TARGET_PROPERTY:EHC_IS_KERNELS>>:-fno-sanitize=null,alignment,object-size,vptr,pointer-overflow>)
  endif()
  # g++ 12 sees uninitialised values inside libstdc++ once sanitizers change the code.
  target_compile_options(ehc_flags INTERFACE
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-maybe-uninitialized;-Wno-uninitialized>)
endif()

# --- CUDA: CMake 3.25 has no CUDA 20 flag, so it is set by hand ---------------------------------
set(EHC_HAS_CUDA OFF)
if(NOT EHC_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80 90a-real)
    endif()
    enable_language(CUDA)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
    set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -lineinfo")
    # Line numbers for profilers double the machine code, which compresses to a tenth.
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
      string(APPEND CMAKE_CUDA_FLAGS " --compress-mode=size")
    else()
      string(APPEND CMAKE_CUDA_FLAGS " -Xfatbin -compress-all")
    endif()
    find_package(CUDAToolkit REQUIRED)
    target_compile_options(ehc_flags INTERFACE
      $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;$<$<BOOL:${EHC_WERROR}>:-Werror;all-warnings;-Xcompiler=-Werror>;-Xcompiler=-Wall,-Wextra,-ffp-contract=off>)
    set(EHC_HAS_CUDA ON)
  elseif(EHC_CUDA STREQUAL "ON")
    message(FATAL_ERROR "EHC_CUDA=ON: no CUDA compiler found; put nvcc on PATH or set CMAKE_CUDA_COMPILER")
  endif()
endif()

# --- instruction sets: every <op>_cpu.cc is compiled once for each --------------------------------
set(EHC_ALL_ISAS generic)
if(EHC_OPTIMISE_KERNELS STREQUAL "-O3")
  set(EHC_ISA_FLAGS_generic -O2)  # plain loops: more unrolling costs minutes and gains little
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND EHC_ALL_ISAS avx2 avx512 avx512bf16)
  set(EHC_ISA_FLAGS_avx2 -march=x86-64-v3)
  set(EHC_ISA_FLAGS_avx512 -march=x86-64-v4)
  set(EHC_ISA_FLAGS_avx512bf16 -march=x86-64-v4 -mavx512bf16)
  set(EHC_ISA_FLAGS_amx ${EHC_ISA_FLAGS_avx512bf16} -mamx-tile -mamx-bf16)
endif()
set(EHC_ISAS "${EHC_ALL_ISAS}" CACHE STRING "Instruction sets to compile kernels for")
foreach(isa ${EHC_ALL_ISAS})
  if(NOT isa IN_LIST EHC_ISAS)
    target_compile_definitions(ehc_flags INTERFACE EHC_WITHOUT_${isa}=1)
  endif()
endforeach()
# Kernels on AMX tiles, <op>_amx.cc, which few operators have, come with those of avx512bf16.
set(EHC_KERNEL_ISAS ${EHC_ISAS})
if(avx512bf16 IN_LIST EHC_ISAS)
  list(APPEND EHC_KERNEL_ISAS amx)
endif()
