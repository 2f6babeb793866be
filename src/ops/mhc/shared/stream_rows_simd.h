// Rows of streams and coefficients as the SIMD kernels use them.
#pragma once

#include <type_traits>

#include "backends/cpu/simd.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;

// Row of stream i at [i].
template <class A>
struct TokenRows {
  A* first;
  int64_t stride;

  EHC_SIMD A* operator[](int64_t stream) const { return first + stream * stride; }
};

template <class A>
EHC_SIMD TokenRows<A> token_rows(const StreamRows& rows, int64_t token) {
  return {static_cast<A*>(rows.data) + token * rows.token_stride, rows.stream_stride};
}

template <class A>
EHC_SIMD A* token_row(const StreamRows& rows, int64_t token) {
  return token_rows<A>(rows, token).first;
}

template <class G>
EHC_SIMD TokenRows<G> gradient_rows(const GradientRows& rows, int64_t token) {
  return token_rows<G>(rows.rows, token - rows.first_token);
}

// A pair of columns of gradients G, which are A or fp32, of which `count` exist; in the lane order
// of A.
template <class A, class G>
EHC_SIMD simd::Pair load_gradient(const G* from, int64_t count) {
  if constexpr (std::is_same_v<A, G>) {
    return simd::load_some(from, count);
  } else {
    return simd::load_f32_some<A>(from, count);
  }
}
template <class A>
EHC_SIMD simd::Pair load_gradient(const GradientRows& from, int64_t token, int64_t stream,
                                  int64_t column, int64_t count) {
  if (!from.is_f32) {
    return load_gradient<A>(gradient_rows<const A>(from, token)[stream] + column, count);
  }
  return load_gradient<A>(gradient_rows<const float>(from, token)[stream] + column, count);
}
template <class A>
EHC_SIMD void store_gradient(const GradientRows& to, int64_t token, int64_t stream, int64_t column,
                             simd::Pair x, int64_t count, bool streaming) {
  if (!to.is_f32) {
    simd::store_some(gradient_rows<A>(to, token)[stream] + column, x, count, streaming);
    return;
  }
  float* row = gradient_rows<float>(to, token)[stream];
  simd::store_some(row + column, simd::natural_order<A>(x), count, false);
}

// A pair of columns of weights W[d] in the lane order of A.
template <class A, class W>
EHC_SIMD simd::Pair load_weight(const void* weight, int64_t column, int64_t count) {
  const simd::Pair w = simd::load_some(static_cast<const W*>(weight) + column, count);
  if constexpr (std::is_same_v<A, W>) return w;
  return simd::lane_order<A>(simd::natural_order<W>(w));
}

// Can outputs be stored past the caches? Every row starts on a cache line.
template <class A>
EHC_SIMD bool can_stream(const StreamRows& rows) {
  return simd::rows_can_stream<A>(rows.data, rows.token_stride, rows.stream_stride);
}

// A token's coefficients side by side: F32[n], or F32[n,n] with [i,o] at i*n + o.
template <int kSize>
struct TokenCoefficients {
  float value[kSize];

  EHC_SIMD TokenCoefficients(const Coefficients& from, int64_t token, int64_t rows,
                             int64_t columns) {
    const float* at = from.data + token * from.token_stride;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t o = 0; o < columns; ++o) value[i * columns + o] = at[i * from.row_stride + o];
    }
  }
};

using StreamVector = TokenCoefficients<kMaxStreams>;
using StreamMatrix = TokenCoefficients<kMaxStreams * kMaxStreams>;

// Where a token's coefficients begin.
EHC_SIMD float* token_values(const Coefficients& rows, int64_t token) {
  return rows.data + token * rows.token_stride;
}

EHC_SIMD StreamVector stream_vector(const Coefficients& from, int64_t token, int64_t streams) {
  return {from, token, 1, streams};
}
EHC_SIMD StreamMatrix stream_matrix(const Coefficients& from, int64_t token, int64_t streams) {
  return {from, token, streams, streams};
}

// Calls body with the number of streams as a constant for two and four, else 0, which stands for
// any. More constants would make compilation long.
template <class Body>
inline void with_streams(int64_t streams, const Body& body) {
  if (streams == 4) {
    body(std::integral_constant<int, 4>{});
  } else if (streams == 2) {
    body(std::integral_constant<int, 2>{});
  } else {
    body(std::integral_constant<int, 0>{});
  }
}

// Calls body(a, streams) with a value of the storage type, and the streams as above.
template <class Body>
inline void with_kernel(const StreamSizes& sizes, const Body& body) {
  simd::with_activation(sizes.activation, [&](auto a) {
    with_streams(sizes.streams, [&](auto streams) { body(a, streams); });
  });
}

// The number of streams, a constant where the kernel was compiled for it.
template <int kStreams>
EHC_SIMD int64_t count_of(int64_t streams) {
  return kStreams == 0 ? streams : kStreams;
}

}  // namespace
}  // namespace ehc::mhc::EHC_ISA
