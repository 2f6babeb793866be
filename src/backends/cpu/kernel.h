// Declares a function of `<op>_cpu.cc` in the namespace of every instruction set.
#pragma once

#define EHC_CPU_KERNEL(...) \
  namespace generic {       \
  __VA_ARGS__;              \
  }                         \
  namespace avx2 {          \
  __VA_ARGS__;              \
  }                         \
  namespace avx512 {        \
  __VA_ARGS__;              \
  }                         \
  namespace avx512bf16 {    \
  __VA_ARGS__;              \
  }                         \
  static_assert(true)
