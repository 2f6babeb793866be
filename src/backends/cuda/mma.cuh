// Products of a warp on tensor cores (sm_80+) that are as good as fp32: numbers in bf16 parts, and
// the instruction.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/pack.cuh"

namespace ehc::cuda {

// --- parts ---

// x = part[0] + part[1] + part[2] exactly, each bf16: eight bits of the significand, the next
// eight, the rest. Bits below 2^-133 are lost. Of an infinity or NaN the first part is x, the
// others are NaN.
__device__ __forceinline__ void parts_of(float x, uint32_t (&part)[3]) {
  constexpr uint32_t kUpper = 0xffff0000U;
  // A NaN may have all its bits in the lower half.
  part[0] = x != x ? 0x7fc00000U : __float_as_uint(x) & kUpper;
  const float rest = x - __uint_as_float(part[0]);
  part[1] = __float_as_uint(rest) & kUpper;
  part[2] = __float_as_uint(rest - __uint_as_float(part[1])) & kUpper;
}

// Two bf16 in upper halves, side by side.
__device__ __forceinline__ uint32_t side_by_side(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x7632);
}

// How many parts hold every number of a type.
template <class A>
inline constexpr int kPartsOf = sizeof(A) == 4           ? 3
                                : std::is_same_v<A, F16> ? 2
                                                         : 1;

// --- the product ---

// sum[16,8] += x[16,16] y[16,8] of bf16. A lane l has rows l/4 and l/4 + 8 of x and sum, column l/4
// of y, columns 2(l%4) and the next of sum. The summation index of a word of x or y may be any two
// that no other word has; they are the same in x and y. x is {row, row + 8, row, row + 8}: the
// first two go with y[0].
__device__ __forceinline__ void multiply_bf16(float (&sum)[4], uint32_t x0, uint32_t x1,
                                              uint32_t x2, uint32_t x3, uint32_t y0, uint32_t y1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(y0), "r"(y1));
}

// The same of f16.
__device__ __forceinline__ void multiply_f16(float (&sum)[4], uint32_t x0, uint32_t x1, uint32_t x2,
                                             uint32_t x3, uint32_t y0, uint32_t y1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(y0), "r"(y1));
}

// Four matrices of 8 x 8 elements of 16 bits: lane l gives row l%8 of matrix l/8, and gets elements
// 2(l%4) and the next of row l/4 of each; kTransposed: of column l/4.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(const uint16_t* row, uint32_t (&matrix)[4]) {
  const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(from)
                 : "memory");
  }
}

}  // namespace ehc::cuda
