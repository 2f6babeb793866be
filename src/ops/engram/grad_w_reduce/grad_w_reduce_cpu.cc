// engram.grad_w_reduce on SIMD lanes.
//
//   s = sum over p, ascending, of partial[p]; grad of one weight = fma(s, the other weight, target)
//   partial F32[P,n,d], weights W[n,d], targets and gradients F32[n,d]
//
// Bytes: 4*P*n*d + 12*n*d + the weights; 8*n*d with targets.
// Algorithm: blocks of columns whose sums stay in the first-level cache while the partials go by.
// Serial in p for each column, so the bits are those of the float reference. Class R.
#include "backends/cpu/simd.h"
#include "ops/engram/grad_w_reduce/grad_w_reduce_args.h"

namespace ehc::engram::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::kPair;
using simd::Pair;

inline constexpr int64_t kBlock = 2048;
static_assert(kBlock % kPair == 0);

// `sums` of columns [begin, begin + count).
template <class W>
inline void write_as(const WeightGradient& to, const float* sums, int64_t stream, int64_t begin,
                     int64_t count) {
  const W* other = static_cast<const W*>(to.other.data) + stream * to.other.stream_stride + begin;
  const float* before =
      to.accumulated ? to.accumulated + stream * to.accumulated_stream_stride + begin : nullptr;
  float* grad = to.grad + stream * to.grad_stream_stride + begin;
  for (int64_t i = 0; i < count; i += kPair) {
    const int64_t rest = count - i;
    const Pair start = before ? simd::load_f32_some<W>(before + i, rest) : simd::zero_pair();
    const Pair y = fma(simd::load_f32<W>(sums + i), simd::load_some(other + i, rest), start);
    simd::store_some(grad + i, simd::natural_order<W>(y), rest, false);
  }
}

inline void write(const WeightGradient& to, const float* sums, int64_t stream, int64_t begin,
                  int64_t count) {
  if (to.other.type == DType::f32) return write_as<float>(to, sums, stream, begin, count);
  write_as<simd::Bf16>(to, sums, stream, begin, count);
}

inline void sum_block(const GradWReduceArgs& args, int64_t stream, int64_t begin, int64_t count,
                      float* sums) {
  for (int64_t i = 0; i < count; i += kPair) simd::store(sums + i, simd::zero_pair());
  for (int64_t p = 0; p < args.partials; ++p) {
    const float* partial =
        args.partial + p * args.partial_stride + stream * args.partial_stream_stride + begin;
    for (int64_t i = 0; i < count; i += kPair) {
      simd::store(sums + i, add(simd::load(sums + i), simd::load_some(partial + i, count - i)));
    }
  }
}

}  // namespace

void grad_w_reduce_columns(const GradWReduceArgs& args, int64_t stream, int64_t begin,
                           int64_t end) {
  alignas(64) float sums[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = end - at < kBlock ? end - at : kBlock;
    sum_block(args, stream, at, count, sums);
    write(args.of_hidden, sums, stream, at, count);
    write(args.of_embed, sums, stream, at, count);
  }
}

}  // namespace ehc::engram::EHC_ISA
