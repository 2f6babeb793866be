// engram.multipliers, engram.primes, engram.offsets: the constants of the n-gram hash. Host only,
// exact, made once per model; ehc::tables::HashLayout makes all three from one configuration.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/table.h"
#include "ehc/tensor.h"

namespace ehc::engram {

using MultiplierScheme = tables::MultiplierScheme;

// multipliers[l, i] = 2 r + 1 with r in [0, half), half = max(1, floor(floor((2^63-1) / V') / 2)),
// so that id * multiplier < 2^63 for every id < V'. r is
//   numpy:       number i of numpy.random.default_rng(seed + 10007*layer_ids[l]).integers(0, half)
//   splitmix64:  output i of the SplitMix64 stream from seed + 10007*layer_ids[l], mod half; give
//                positions in the list of layers as layer_ids
// Contract 1.3.
struct Multipliers {
  std::span<const int64_t> layer_ids{};       // [L], each >= 0, required
  std::optional<int64_t> max_ngram{};         // Nmax, 2..8, required
  std::optional<int64_t> compressed_vocab{};  // V' >= 1, required
  int64_t seed = 0;                           // >= 0
  MultiplierScheme scheme = MultiplierScheme::numpy;
  Tensor multipliers{};  // out: I64[L, Nmax], contiguous
};

// vocab_sizes: primes, distinct in the whole model. For each layer and order the search starts at
// sizes[order-2], the first candidate, and each head takes the next prime that nobody has taken.
// Throws Error{contract} when it runs out of primes below 2^31, before anything is written.
// Contract 1.3.
struct Primes {
  std::span<const int64_t> sizes{};  // [Nmax-1], each >= 1, required
  std::optional<int64_t> layers{};   // L >= 1, required
  std::optional<int64_t> heads{};    // Kh >= 1, required
  Tensor vocab_sizes{};              // out: I32[L, Nmax-1, Kh], contiguous
};

// offsets[l, c] = sum of the sizes of layer l before column c = (order-2)*Kh + head: where the part
// of column c begins in the table of layer l. Throws Error{contract} for a size that is not
// positive and for a layer whose sizes add up to more than 2^31-1 when offsets are I32. Contract
// 1.4.
struct Offsets {
  Tensor vocab_sizes{};  // I32[L, Nmax-1, Kh], contiguous
  Tensor offsets{};      // out: I32 or I64[L, C], C = (Nmax-1)*Kh, contiguous
};

// All throw Error{contract} for arguments that break the above; workspace_bytes: bytes of workspace
// for the call, see Context::set_workspace.
EHC_API void multipliers(Context& context, const Multipliers& params);
EHC_API size_t workspace_bytes(const Context& context, const Multipliers& params);
EHC_API void primes(Context& context, const Primes& params);
EHC_API size_t workspace_bytes(const Context& context, const Primes& params);
EHC_API void offsets(Context& context, const Offsets& params);
EHC_API size_t workspace_bytes(const Context& context, const Offsets& params);

}  // namespace ehc::engram
