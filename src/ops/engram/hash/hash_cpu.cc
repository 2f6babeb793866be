// engram.hash on the CPU. Tokens are taken in blocks whose keys of one order stay in L1; for each
// group of columns the tokens of the block run innermost. AVX-512 reduces a key by 8 sizes at once
// (hash_simd.h); elsewhere the processor multiplies by 64-bit reciprocals one by one. Exact. Bytes
// per token: 4*Nmax read, 4*L*C written.
#include "ops/engram/hash/hash_args.h"
#include "ops/engram/hash/hash_math.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include "ops/engram/hash/hash_simd.h"
#endif

namespace ehc::engram::EHC_ISA {

namespace {

constexpr int64_t kTokens = 256;  // of a block

// Columns [c, c + count) of layer l for tokens [begin, end) with the keys of their order.
#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int64_t kColumns = kDivisors;

template <class Index>
void hash_columns(const HashArgs& a, const uint64_t* keys, int64_t l, int64_t c, int64_t count,
                  int64_t begin, int64_t end) {
  const DivisorGroup group = make_group(a, l * a.orders * a.heads + c, count);
  const auto lanes = static_cast<__mmask8>((1U << count) - 1);
  auto* out = static_cast<Index*>(a.indices) + l * a.layer_stride + c;
  for (int64_t t = begin; t < end; ++t) {
    __m512i indices = indices_of<sizeof(Index) == 8>(keys[t - begin], group);
    if (a.mask != nullptr && a.mask[t] != 0) indices = _mm512_set1_epi64(-1);
    store_indices(out + t * a.token_stride, indices, lanes);
  }
}
#else
constexpr int64_t kColumns = 64;

template <class Index>
void hash_columns(const HashArgs& a, const uint64_t* keys, int64_t l, int64_t c, int64_t count,
                  int64_t begin, int64_t end) {
  Divisor divisors[kColumns];
  int64_t offsets[kColumns];
  for (int64_t j = 0; j < count; ++j) {
    const int64_t column = l * a.orders * a.heads + c + j;
    divisors[j] = make_divisor(a.sizes[column]);
    offsets[j] = hash_offset(a, column);
  }
  auto* out = static_cast<Index*>(a.indices) + l * a.layer_stride + c;
  for (int64_t t = begin; t < end; ++t) {
    const bool masked = a.mask != nullptr && a.mask[t] != 0;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t index = floored_remainder(keys[t - begin], divisors[j]) + offsets[j];
      out[t * a.token_stride + j] = static_cast<Index>(masked ? -1 : index);
    }
  }
}
#endif

template <class Index>
void hash_block(const HashArgs& a, int64_t l, int64_t begin, int64_t end) {
  uint64_t keys[kTokens];
  const int64_t* multipliers = a.multipliers + l * (a.orders + 1);
  for (int64_t t = begin; t < end; ++t) {
    keys[t - begin] = hash_step(0, a.window[t * a.window_stride], multipliers[0]);
  }
  for (int64_t order = 0; order < a.orders; ++order) {
    for (int64_t t = begin; t < end; ++t) {
      uint64_t& key = keys[t - begin];
      key = hash_step(key, a.window[t * a.window_stride + order + 1], multipliers[order + 1]);
    }
    for (int64_t head = 0; head < a.heads; head += kColumns) {
      const int64_t count = a.heads - head < kColumns ? a.heads - head : kColumns;
      hash_columns<Index>(a, keys, l, order * a.heads + head, count, begin, end);
    }
  }
}

}  // namespace

void hash_rows(const HashArgs& a, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kTokens) {
    const int64_t last = end - first < kTokens ? end : first + kTokens;
    for (int64_t l = 0; l < a.layers; ++l) {
      if (a.indices_are_64) {
        hash_block<int64_t>(a, l, first, last);
      } else {
        hash_block<int32_t>(a, l, first, last);
      }
    }
  }
}

}  // namespace ehc::engram::EHC_ISA
