// Rows of the 8-bit format decoded on CUDA: those of a `Which`, which has count() of them, says
// which row item i is, index(i), and where its values go, out(i). A thread has eight columns of
// kDecodedRows rows: it finds the rows, then reads weights and scales of all of them, then decodes
// and writes. Groups that eight does not divide and rows that are not aligned go element by
// element. Class E.
#pragma once

#include "ops/engram/shared/row_format.h"
#include "ops/engram/shared/table_rows.cuh"

namespace ehc::engram {

namespace detail {

// Weights k and k + 1 of a word. An e4m3 number shifted into fp16 is 2^8 times too small there.
__device__ __forceinline__ void decode_two(uint32_t word, int k, float scale, float* out) {
  const uint32_t high_bytes = __byte_perm(word, 0, k == 0 ? 0x1404 : 0x3424);
  const uint32_t halves = (high_bytes & 0x80008000U) | (high_bytes >> 1 & 0x3f803f80U);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto half = static_cast<uint16_t>(halves >> (16 * i));
    float x = 0;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    out[i] = x * 256.0f * scale;
  }
}

// Is one of the four weights a NaN?
__device__ __forceinline__ bool has_nan(uint32_t word) {
  return (((word & 0x7f7f7f7fU) + 0x01010101U) & 0x80808080U) != 0;
}

}  // namespace detail

// Eight weights of one group. `weights` are the bytes at `from`.
template <class Out>
__device__ __forceinline__ void decode_eight(uint2 weights, uint8_t scale, Out* to) {
  if (scale == 255 || detail::has_nan(weights.x) || detail::has_nan(weights.y)) {
    constexpr DType kType = sizeof(Out) == 4                 ? DType::f32
                            : std::is_same_v<Out, cuda::F16> ? DType::f16
                                                             : DType::bf16;
    for (int k = 0; k < kEight; ++k) {
      const uint32_t word = k < 4 ? weights.x : weights.y;
      store_float(to, kType, k, decode_weight(static_cast<uint8_t>(word >> (k % 4 * 8)), scale));
    }
    return;
  }
  const float factor = e8m0_to_float(scale);
  float x[kEight];
  detail::decode_two(weights.x, 0, factor, x);
  detail::decode_two(weights.x, 2, factor, x + 2);
  detail::decode_two(weights.y, 0, factor, x + 4);
  detail::decode_two(weights.y, 2, factor, x + 6);
  EightOf<Out>::of([&](int k) { return x[k]; }).template store<true>(to, kEight);
}

// Rows of weights and scales.
struct CodedRows {
  const uint8_t* weight;
  const uint8_t* scale;
  int64_t weight_stride;
  int64_t scale_stride;
  int64_t width;
  int64_t group;
};

// Can eight weights be read at once, and have they one scale?
inline bool are_eights(const CodedRows& rows) {
  return rows.width % kEight == 0 && rows.group % kEight == 0 &&
         are_aligned(rows.weight, rows.weight_stride, 1, 8);
}

inline constexpr int kDecodedRows = 2;  // of a thread

template <class Which, class Out>
__global__ void decode_eights(const __grid_constant__ Which which,
                              const __grid_constant__ CodedRows coded, Out* out,
                              int64_t column_blocks) {
  const RowPlace at(column_blocks, kEight, kDecodedRows);
  if (at.column >= coded.width) return;
  const int64_t group = at.column / coded.group;
  int64_t row[kDecodedRows];
#pragma unroll
  for (int k = 0; k < kDecodedRows; ++k) {
    const int64_t item = at.row + k * blockDim.y;
    row[k] = item < which.count() ? which.index(item) : -1;
  }
  uint2 weights[kDecodedRows] = {};
  uint8_t scale[kDecodedRows] = {};
#pragma unroll
  for (int k = 0; k < kDecodedRows; ++k) {
    if (row[k] < 0) continue;
    weights[k] = __ldg(
        reinterpret_cast<const uint2*>(coded.weight + row[k] * coded.weight_stride + at.column));
    scale[k] = __ldg(coded.scale + row[k] * coded.scale_stride + group);
  }
#pragma unroll
  for (int k = 0; k < kDecodedRows; ++k) {
    const int64_t item = at.row + k * blockDim.y;
    if (item >= which.count()) break;
    decode_eight(weights[k], scale[k], out + which.out(item) + at.column);
  }
}

template <class Which>
__global__ void decode_elements(const __grid_constant__ Which which,
                                const __grid_constant__ CodedRows coded, void* out, DType type,
                                int64_t column_blocks) {
  const RowPlace at(column_blocks, 1, 1);
  if (at.column >= coded.width || at.row >= which.count()) return;
  const int64_t row = which.index(at.row);
  float x = 0;
  if (row >= 0) {
    x = decode_weight(coded.weight[row * coded.weight_stride + at.column],
                      coded.scale[row * coded.scale_stride + at.column / coded.group]);
  }
  store_float(out, type, which.out(at.row) + at.column, x);
}

template <class Which>
void decode_rows_of(const char* name, const Which& which, const CodedRows& coded, void* out,
                    DType type, bool is_aligned, int device, void* stream) {
  const int64_t count = which.count();
  if (!is_aligned || !are_eights(coded)) {
    launch_rows(name, device, stream, cut_rows(count, coded.width, 1, 1), &decode_elements<Which>,
                which, coded, out, type);
    return;
  }
  cuda::with_activation(type, [&](auto a) {
    using Out = decltype(a);
    launch_rows(name, device, stream, cut_rows(count, coded.width, kEight, kDecodedRows),
                &decode_eights<Which, Out>, which, coded, static_cast<Out*>(out));
  });
}

}  // namespace ehc::engram
