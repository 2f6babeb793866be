// Loops over rows through simd.h, compiled for every instruction set; driven by simd_test.cc.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"

namespace ehc::probe {

enum class Function { exp, sigmoid, silu, silu_gradient };

EHC_CPU_KERNEL(void evaluate(Function function, const float* in, float* out, int64_t count));
EHC_CPU_KERNEL(void multiply_add(const float* a, const float* b, const float* c, float* out,
                                 int64_t count));
EHC_CPU_KERNEL(void widen(DType type, const void* in, float* out, int64_t count));
EHC_CPU_KERNEL(void narrow(DType type, const float* in, void* out, int64_t count, bool streaming));
// out[i] = in[i] * weight[i]: only right when both are in the same order of lanes.
EHC_CPU_KERNEL(void weighted(DType type, const void* in, const float* weight, float* out,
                             int64_t count));
// The sum of a row in the lanes of `type`.
EHC_CPU_KERNEL(float sum(DType type, const void* in, int64_t count));

}  // namespace ehc::probe
