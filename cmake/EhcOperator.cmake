# ehc_operator(<family>/<op>): one line per operator folder. Finds the folder's files by name and
# fails when one is missing or misnamed, so nothing is left out of the build by accident.
#   include/ehc/<family>/<op>.h   src/ops/<family>/<op>/<op>.cc and <op>_ref.cc   required
#   <op>_math.h <op>_args.h <op>_simd.h <op>_cpu.cc <op>_amx.cc <op>_cuda.cu <op>_sm90.cu   as needed
#   tests/ops/<family>/<op>_test.cc                                               required
# What operators of a family share stands in src/ops/<family>/shared/, headers only.
set_property(GLOBAL PROPERTY EHC_OPERATORS "")

function(ehc_operator path)
  get_filename_component(family ${path} DIRECTORY)
  get_filename_component(op ${path} NAME)
  set(folder ${PROJECT_SOURCE_DIR}/src/ops/${path})
  set(required ${folder}/${op}.cc ${folder}/${op}_ref.cc
    ${PROJECT_SOURCE_DIR}/include/ehc/${path}.h
    ${PROJECT_SOURCE_DIR}/tests/ops/${family}/${op}_test.cc)
  foreach(file ${required})
    if(NOT EXISTS ${file})
      message(FATAL_ERROR "ehc_operator(${path}): missing ${file}")
    endif()
  endforeach()
  set(known ${op}.cc ${op}_ref.cc ${op}_math.h ${op}_args.h ${op}_simd.h ${op}_cpu.cc ${op}_amx.cc ${op}_cuda.cu ${op}_sm90.cu)
  file(GLOB files CONFIGURE_DEPENDS RELATIVE ${folder} ${folder}/*)
  foreach(file ${files})
    if(NOT file IN_LIST known)
      message(FATAL_ERROR "ehc_operator(${path}): ${file} is not a name of an operator file; see docs/HACKING.md")
    endif()
  endforeach()

  target_sources(ehc_objects PRIVATE ${folder}/${op}.cc ${folder}/${op}_ref.cc)
  foreach(isa ${EHC_KERNEL_ISAS})
    set(kernels ${folder}/${op}_cpu.cc)
    if(isa STREQUAL "amx")
      set(kernels ${folder}/${op}_amx.cc)
    endif()
    if(EXISTS ${kernels})
      target_sources(ehc_isa_${isa} PRIVATE ${kernels})
    endif()
  endforeach()
  foreach(kind cuda sm90)
    if(EHC_HAS_CUDA AND EXISTS ${folder}/${op}_${kind}.cu)
      target_sources(ehc_cuda PRIVATE ${folder}/${op}_${kind}.cu)
      # Not for every file, so that ccache shares the others with a build without CUDA.
      set_property(SOURCE ${folder}/${op}.cc PROPERTY COMPILE_DEFINITIONS EHC_HAS_CUDA=1)
    endif()
  endforeach()
  set_property(GLOBAL APPEND PROPERTY EHC_OPERATORS ${path})
endfunction()

# Writes the registry: one function per operator folder, in the order of the ehc_operator() lines.
function(ehc_generate_registry output)
  get_property(paths GLOBAL PROPERTY EHC_OPERATORS)
  set(EHC_DECLARATIONS "")
  set(EHC_CALLS "")
  foreach(path ${paths})
    get_filename_component(family ${path} DIRECTORY)
    get_filename_component(op ${path} NAME)
    string(APPEND EHC_DECLARATIONS "namespace ehc::${family} { std::span<const Operator* const> ${op}_operators(); }\n")
    string(APPEND EHC_CALLS "      ehc::${family}::${op}_operators(),\n")
  endforeach()
  configure_file(${PROJECT_SOURCE_DIR}/cmake/registry.cc.in ${output} @ONLY)
endfunction()
