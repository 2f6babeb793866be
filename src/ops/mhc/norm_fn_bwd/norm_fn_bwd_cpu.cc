// mhc.norm_fn_bwd on SIMD lanes.
//
//   grad_x[t,k] = round(target + (sum_j m[t,j] fn[j,k] + 2 x[t,k] q[t]))
//   grad_fn[j,k] = target + sum_t m[t,j] x[t,k]
//   m = grad_mul F32[T,G,M] and q = grad_sqr F32[T,G] of the group of column k
//   x, grad_x A[T,n,d] as [T,K], fn and grad_fn F32[M,K]
//
// Bytes a token in 16-bit types: 4*K, with a target 6*K.
// Algorithm: lanes are columns. fn and grad_fn of 2048 columns stay in the second-level cache while
// all tokens go by, 48 at a time; of those a strip of columns is widened once, for both products.
// Tiles of tokens or mixes by four vectors stay in registers. What the next strip reads, rows that
// are pages apart, is prefetched a line a step.
// Class E: each column on its own, sums in the order of the contract. Tokens are independent but
// for grad_fn, which adds chunks of 48.
#include <type_traits>

#include "core/float_formats.h"
#include "ops/mhc/norm_fn_bwd/norm_fn_bwd_args.h"
#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kPair;
using simd::Pair;
using simd::Vec;

// Pairs of vectors side by side in a tile, and rows of it: 24 or 12 vectors of sums.
inline constexpr int kWidth = 2;
inline constexpr int kTall = simd::kLanes == 16 ? 6 : simd::kPairsTogether > 1 ? 3 : 1;
inline constexpr int64_t kStrip = kWidth * kPair;
static_assert(kNormFnStrip % kStrip == 0 && kNormFnColumns % kStrip == 0);

// Columns [begin, begin + width) of one stream and group.
struct Run {
  int64_t begin, width, stream, column, group;
};

struct Scratch {
  float* fn;        // [M, kNormFnColumns], in the lane order of A
  float* grad_fn;   // the same
  float* x;         // [tokens, kStrip]: fp32
  float* grad_mul;  // [tokens, M]
};

template <int kRows>
struct TileSums {
  Pair sum[kRows][kWidth];
};

// sum[r] += factors[r * stride] * row, for a row of kStrip columns.
template <int kRows>
EHC_SIMD void add_row(const float* factors, int64_t stride, const float* row,
                      TileSums<kRows>& tile) {
  Pair values[kWidth];
#pragma GCC unroll 2
  for (int w = 0; w < kWidth; ++w) values[w] = simd::load(row + w * kPair);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = simd::splat(factors[r * stride]);
#pragma GCC unroll 2
    for (int w = 0; w < kWidth; ++w) tile.sum[r][w] = fma(factor, values[w], tile.sum[r][w]);
  }
}

template <int kRows>
EHC_SIMD TileSums<kRows> zero_tile() {
  TileSums<kRows> tile;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int w = 0; w < kWidth; ++w) tile.sum[r][w] = simd::zero_pair();
  }
  return tile;
}

// body(rows, first) for tiles that cover `count` rows.
template <class Body>
EHC_SIMD void for_each_tile(int64_t count, const Body& body) {
  int64_t at = 0;
  for (; at + kTall <= count; at += kTall) body(std::integral_constant<int, kTall>{}, at);
  for (; at < count; ++at) body(std::integral_constant<int, 1>{}, at);
}

template <class A>
EHC_SIMD A* row_of(const StreamRows& rows, int64_t token, const Run& run) {
  return token_rows<A>(rows, token)[run.stream] + run.column;
}

// What a pair of columns of grad_x is added to.
template <class A>
EHC_SIMD Pair target_pair(const NormFnBackwardArgs& a, int64_t t, int64_t stream, int64_t column,
                          int64_t count) {
  Pair sum = simd::zero_pair();
  if (a.grad_residual_acc.data) {
    const auto rows = token_rows<const A>(a.grad_residual_acc, t);
    sum = simd::load_some(rows[stream * a.targets] + column, count);
    for (int64_t k = 1; k < a.targets; ++k) {
      sum = add(sum, simd::load_some(rows[stream * a.targets + k] + column, count));
    }
  }
  if (!a.grad_row.rows.data) return sum;
  const float factor = a.row_factor.data[t * a.row_factor.token_stride + stream];
  sum = fma(simd::splat(factor), load_gradient<A>(a.grad_row, t, 0, column, count), sum);
  return a.rounds_target ? simd::rounded_to<A>(sum) : sum;
}

// The rows that the strip after this one reads.
template <class A>
class NextStrip {
 public:
  NextStrip(const NormFnBackwardArgs& a, const Run& run, int64_t token, int64_t at) {
    add(row_of<const A>(a.residual, token, run) + at, a.residual.token_stride);
    if (!a.grad_residual.rows.data) return;
    if (a.grad_residual_acc.data && a.targets == 1) {
      add(row_of<const A>(a.grad_residual_acc, token, run) + at, a.grad_residual_acc.token_stride);
    }
    if (a.grad_row.rows.data && !a.grad_row.is_f32) {
      add(gradient_rows<const A>(a.grad_row, token)[0] + run.column + at,
          a.grad_row.rows.token_stride);
    }
  }

  // Step j of `steps` for `count` tokens from `token` on. All lines at once would wait for each
  // other.
  EHC_SIMD void prefetch(int64_t token, int64_t count, int64_t j, int64_t steps) const {
    for (int64_t line = j; line < kWidth * count * sources_; line += steps) {
      const Source& source = source_[line / (kWidth * count)];
      const int64_t of_source = line % (kWidth * count);
      simd::prefetch(source.at + (token + of_source / kWidth) * source.stride +
                     of_source % kWidth * kPair);
    }
  }

 private:
  struct Source {
    const A* at;
    int64_t stride;
  };
  void add(const A* at, int64_t stride) { source_[sources_++] = {at, stride}; }

  Source source_[3];
  int sources_ = 0;
};

// grad_x of a strip: `at` columns into the run, of which `count` exist.
template <class A>
inline void gradient_of_streams(const NormFnBackwardArgs& a, const Run& run, const Scratch& s,
                                int64_t first, int64_t tokens, int64_t at, int64_t count,
                                const NextStrip<A>& soon) {
  // A run may begin within a line: at the border of a group, or of a thread's columns.
  const StreamRows& to = a.grad_residual.rows;
  const bool streaming =
      a.streaming && simd::rows_can_stream<A>(static_cast<const A*>(to.data) + run.column,
                                              to.token_stride, to.stream_stride);
  for_each_tile(tokens, [&](auto size, int64_t token) EHC_SIMD_LAMBDA {
    constexpr int kRows = decltype(size)::value;
    TileSums<kRows> tile = zero_tile<kRows>();
    for (int64_t j = 0; j < a.mixes; ++j) {
      soon.prefetch(token, kRows, j, a.mixes);
      add_row<kRows>(s.grad_mul + token * a.mixes + j, a.mixes, s.fn + j * kNormFnColumns + at,
                     tile);
    }
    for (int r = 0; r < kRows; ++r) {
      const int64_t t = first + token + r;
      const float grad_sqr =
          a.grad_sqr.data[t * a.grad_sqr.token_stride + run.group * a.grad_sqr.group_stride];
      const Vec factor = simd::splat(2.0f * grad_sqr);
      for (int w = 0; w < kWidth && w * kPair < count; ++w) {
        const int64_t rest = count - w * kPair, column = run.column + at + w * kPair;
        const Pair x = simd::load(s.x + (token + r) * kStrip + w * kPair);
        const Pair sum = fma(factor, x, tile.sum[r][w]);
        const Pair target = target_pair<A>(a, t, run.stream, column, rest);
        store_gradient<A>(a.grad_residual, t, run.stream, column, add(target, sum), rest,
                          streaming);
      }
    }
  });
}

// grad_fn of a strip, the part of these tokens.
template <class A>
EHC_SIMD void gradient_of_fn(const NormFnBackwardArgs& a, const Scratch& s, int64_t tokens,
                             int64_t at, const NextStrip<A>& soon) {
  for_each_tile(a.mixes, [&](auto size, int64_t mix) EHC_SIMD_LAMBDA {
    constexpr int kRows = decltype(size)::value;
    TileSums<kRows> tile = zero_tile<kRows>();
    for (int64_t t = 0; t < tokens; ++t) {
      if (mix == 0 && !a.grad_residual.rows.data) soon.prefetch(t, 1, 0, 1);
      add_row<kRows>(s.grad_mul + t * a.mixes + mix, 1, s.x + t * kStrip, tile);
    }
    for (int r = 0; r < kRows; ++r) {
      float* total = s.grad_fn + (mix + r) * kNormFnColumns + at;
      for (int w = 0; w < kWidth; ++w) {
        simd::store(total + w * kPair, add(simd::load(total + w * kPair), tile.sum[r][w]));
      }
    }
  });
}

template <class A>
inline void take_fn(const NormFnBackwardArgs& a, const Run& run, const Scratch& s) {
  const int64_t room = (run.width + kStrip - 1) / kStrip * kStrip;
  for (int64_t j = 0; j < a.mixes; ++j) {
    const float* row = a.fn.data + j * a.fn.stride + run.begin;
    float rounded[kNormFnColumns];
    if (a.tf32) {
      for (int64_t k = 0; k < run.width; ++k) rounded[k] = round_to_tf32(row[k]);
      row = rounded;
    }
    for (int64_t k = 0; k < room; k += kPair) {
      const int64_t rest = run.width > k ? run.width - k : 0;
      simd::store(s.fn + j * kNormFnColumns + k, simd::load_f32_some<A>(row + k, rest));
      simd::store(s.grad_fn + j * kNormFnColumns + k, simd::zero_pair());
    }
  }
}

template <class A>
inline void give_grad_fn(const NormFnBackwardArgs& a, const Run& run, const Scratch& s) {
  for (int64_t j = 0; j < a.mixes; ++j) {
    const float* before =
        a.grad_fn_acc.data ? a.grad_fn_acc.data + j * a.grad_fn_acc.stride + run.begin : nullptr;
    float* grad_fn = a.grad_fn.data + j * a.grad_fn.stride + run.begin;
    for (int64_t k = 0; k < run.width; k += kPair) {
      const int64_t rest = run.width - k;
      const Pair sum = simd::natural_order<A>(simd::load(s.grad_fn + j * kNormFnColumns + k));
      const Pair target = before ? simd::load_some(before + k, rest) : simd::zero_pair();
      simd::store_some(grad_fn + k, add(target, sum), rest, false);
    }
  }
}

template <class A>
inline void take_strip(const NormFnBackwardArgs& a, const Run& run, const Scratch& s, int64_t first,
                       int64_t tokens, int64_t at, int64_t count) {
  for (int64_t t = 0; t < tokens; ++t) {
    const A* x = row_of<const A>(a.residual, first + t, run) + at;
    for (int w = 0; w < kWidth; ++w) {
      const int64_t rest = count > w * kPair ? count - w * kPair : 0;
      simd::store(s.x + t * kStrip + w * kPair,
                  rest > 0 ? simd::load_some(x + w * kPair, rest) : simd::zero_pair());
    }
  }
}

template <class A>
inline void run_gradients(const NormFnBackwardArgs& a, const Run& run, const Tile& tile,
                          const Scratch& s) {
  take_fn<A>(a, run, s);
  for (int64_t first = tile.token_begin; first < tile.token_end; first += kNormFnTokens) {
    const int64_t left = tile.token_end - first;
    const int64_t tokens = left < kNormFnTokens ? left : kNormFnTokens;
    for (int64_t t = 0; t < tokens; ++t) {
      const float* grad_mul = a.grad_mul.data + (first + t) * a.grad_mul.token_stride +
                              run.group * a.grad_mul.group_stride;
      for (int64_t j = 0; j < a.mixes; ++j) s.grad_mul[t * a.mixes + j] = grad_mul[j];
    }
    for (int64_t at = 0; at < run.width; at += kStrip) {
      const int64_t count = run.width - at;
      take_strip<A>(a, run, s, first, tokens, at, count);
      const bool is_last = count <= kStrip && left > tokens;
      const NextStrip<A> soon(a, run, is_last ? first + tokens : first, is_last ? 0 : at + kStrip);
      if (a.grad_residual.rows.data) {
        gradient_of_streams<A>(a, run, s, first, tokens, at, count, soon);
      }
      if (a.grad_fn.data) gradient_of_fn(a, s, tokens, at, soon);
    }
  }
  if (a.grad_fn.data) give_grad_fn<A>(a, run, s);
}

}  // namespace

void norm_fn_bwd_tile(const NormFnBackwardArgs& a, const Tile& tile, float* scratch) {
  Scratch s;
  s.fn = scratch;
  s.grad_fn = s.fn + a.mixes * kNormFnColumns;
  s.x = s.grad_fn + a.mixes * kNormFnColumns;
  s.grad_mul = s.x + kNormFnTokens * kNormFnStrip;
  const int64_t d = a.sizes.hidden, of_group = a.sizes.streams * d / a.groups;
  for (int64_t k = tile.column_begin; k < tile.column_end;) {
    Run run{k, tile.column_end - k, k / d, k % d, k / of_group};
    const int64_t limits[] = {kNormFnColumns, d - run.column, of_group - k % of_group};
    for (const int64_t limit : limits) run.width = run.width < limit ? run.width : limit;
    simd::with_activation(a.sizes.activation, [&](auto activation) {
      run_gradients<decltype(activation)>(a, run, tile, s);
    });
    k += run.width;
  }
  if (a.streaming) simd::stream_fence();
}

}  // namespace ehc::mhc::EHC_ISA
