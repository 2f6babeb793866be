// Steps of engram.kv_projection_fwd on SIMD lanes: widening, packing, the built-in product, and
// rounding.
//
//   kv[t,j,i] = round(sum_e embedding[t,e] * weight[j,i,e] + bias[j,i])
//   embedding A[T,E]; weight A[n+1,d,E]; bias A[n+1,d]; kv A[T,n+1,d]
//
// Cost: 2*T*E*(n+1)*d FLOP. Bytes: every operand once per block of tokens, widened to fp32 in the
// workspace (kv_projection.cc cuts the blocks).
// Algorithm: a tile of row_panel x column_panel sums stays in registers; each sum is a chain of
// multiply-adds over 128 values of E that starts at +0, and the chains are added in ascending
// order: short chains keep the error of E = 6144 near that of E = 128. Class R per implementation,
// batch-invariant: no bit depends on T or on the other tokens.
#include "backends/cpu/simd.h"
#include "ops/engram/kv_projection/kv_projection_args.h"

namespace ehc::engram::EHC_ISA {

namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::Bf16;
using simd::F16;
using simd::Pair;

constexpr int64_t kRowPanel = simd::kLanes == 16 ? 12 : 6;  // fills the register file
constexpr int64_t kColumnPanel = simd::kPair;

template <class A>
const A* row_of(const ProjectionRows& rows, int64_t r) {
  return static_cast<const A*>(rows.data) + r / rows.inner_count * rows.outer_stride +
         r % rows.inner_count * rows.inner_stride;
}

template <class A>
void widen_rows(const ProjectionRows& rows, int64_t first, int64_t count, float* out) {
  for (int64_t r = 0; r < count; ++r) {
    const A* row = row_of<A>(rows, first + r);
    float* to = out + r * rows.depth;
    for (int64_t k = 0; k < rows.depth; k += simd::kPair) {
      const int64_t rest = rows.depth - k;
      simd::store_some(to + k, simd::natural_order<A>(simd::load_some(row + k, rest)), rest, false);
    }
  }
}

// One panel, transposed in squares that stay in L1.
template <class A, int64_t kPanel>
void pack_panel(const ProjectionRows& rows, int64_t first, int64_t count, float* out) {
  float square[kPanel][simd::kPair];
  const A* row[kPanel];
  for (int64_t j = 0; j < kPanel; ++j) {
    row[j] = row_of<A>(rows, first + (j < count ? j : 0));
    for (float& x : square[j]) x = 0;
  }
  for (int64_t k = 0; k < rows.depth; k += simd::kPair) {
    const int64_t rest = rows.depth - k;
    for (int64_t j = 0; j < count; ++j) {
      simd::store(square[j], simd::natural_order<A>(simd::load_some(row[j] + k, rest)));
    }
    const int64_t width = rest < simd::kPair ? rest : simd::kPair;
    for (int64_t i = 0; i < width; ++i) {
      for (int64_t j = 0; j < kPanel; ++j) out[(k + i) * kPanel + j] = square[j][i];
    }
  }
}

template <class A, int64_t kPanel>
void pack_rows(const ProjectionRows& rows, int64_t first, int64_t count, float* out) {
  for (int64_t r = 0; r < count; r += kPanel) {
    const int64_t left = count - r < kPanel ? count - r : kPanel;
    pack_panel<A, kPanel>(rows, first + r, left, out + r * rows.depth);
  }
}

// x * y + z; two roundings where the processor cannot do it in one.
EHC_SIMD Pair multiply_add(simd::Vec x, Pair y, Pair z) {
#if defined(__FMA__) || defined(__aarch64__)
  return fma(x, y, z);
#else
  return add(mul(y, x), z);
#endif
}

// sums += (or =) one chain of a tile.
template <bool kFirst>
void multiply_tile(const float* rows, const float* columns, int64_t depth, float* sums,
                   int64_t stride) {
  Pair tile[kRowPanel];
  for (Pair& sum : tile) sum = simd::zero_pair();
  for (int64_t k = 0; k < depth; ++k) {
    const Pair column = simd::load(columns + k * kColumnPanel);
#pragma GCC unroll 12
    for (int64_t r = 0; r < kRowPanel; ++r) {
      tile[r] = multiply_add(simd::splat(rows[k * kRowPanel + r]), column, tile[r]);
    }
  }
#pragma GCC unroll 12
  for (int64_t r = 0; r < kRowPanel; ++r) {
    float* to = sums + r * stride;
    simd::store(to, kFirst ? tile[r] : add(simd::load(to), tile[r]));
  }
}

void multiply_panels(const float* row_panels, const float* column_panels, int64_t rows,
                     int64_t columns, int64_t depth, bool accumulate, float* sums) {
  for (int64_t k = 0; k < depth; k += kProjectionChain) {
    const int64_t length = depth - k < kProjectionChain ? depth - k : kProjectionChain;
    for (int64_t c = 0; c < columns; c += kColumnPanel) {
      const float* column_panel = column_panels + c * depth + k * kColumnPanel;
      for (int64_t r = 0; r < rows; r += kRowPanel) {
        const float* row_panel = row_panels + r * depth + k * kRowPanel;
        float* tile = sums + r * columns + c;
        if (k == 0 && !accumulate) {
          multiply_tile<true>(row_panel, column_panel, length, tile, columns);
        } else {
          multiply_tile<false>(row_panel, column_panel, length, tile, columns);
        }
      }
    }
  }
}

template <class A>
void finish_block(const ProjectionArgs& a, const float* sums, int64_t sums_stride, int64_t t,
                  int64_t tokens, int64_t c, int64_t columns) {
  for (int64_t row = 0; row < tokens; ++row) {
    for (int64_t begin = c; begin < c + columns;) {
      const int64_t branch = begin / a.width;
      const int64_t branch_end = (branch + 1) * a.width;
      const int64_t end = branch_end < c + columns ? branch_end : c + columns;
      const int64_t column = begin - branch * a.width;
      A* kv = static_cast<A*>(a.kv) + (t + row) * a.kv_token_stride + branch * a.kv_stride + column;
      const float* from = sums + row * sums_stride + (begin - c);
      const A* bias = nullptr;
      if (a.bias != nullptr) {
        bias = static_cast<const A*>(a.bias) + branch * a.bias_stride + column;
      }
      for (int64_t i = 0; i < end - begin; i += simd::kPair) {
        const int64_t rest = end - begin - i;
        Pair sum = simd::load_f32_some<A>(from + i, rest);
        if (bias != nullptr) sum = add(sum, simd::load_some(bias + i, rest));
        simd::store_some(kv + i, sum, rest, false);
      }
      begin = end;
    }
  }
}

template <class A>
ProjectionSteps steps_of() {
  return {kRowPanel,
          kColumnPanel,
          &widen_rows<A>,
          &pack_rows<A, kRowPanel>,
          &pack_rows<A, kColumnPanel>,
          &multiply_panels,
          &finish_block<A>};
}

}  // namespace

ProjectionSteps projection_steps(DType type) {
  if (type == DType::f32) return steps_of<float>();
  if (type == DType::bf16) return steps_of<Bf16>();
  return steps_of<F16>();
}

}  // namespace ehc::engram::EHC_ISA
