// NumPy's generator, which published hash multipliers are drawn from.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ehc::tables {

__extension__ using uint128 = unsigned __int128;

// numpy.random.default_rng(seed): a SeedSequence filling PCG64 (XSL-RR output on a 128-bit linear
// congruential state). Every draw equals NumPy's, in every order of calls.
class NumpyGenerator {
 public:
  explicit NumpyGenerator(uint128 seed);

  // One number of Generator.integers(0, high, dtype=int64): uniform in [0, high), by Lemire's
  // multiplication with rejection. Ranges of at most 32 bits use halves of a 64-bit output, the
  // low half first. Precondition: 1 <= high <= 2^63. No output is consumed for high = 1.
  uint64_t integer_below(uint64_t high);

  uint64_t next64();
  uint32_t next32();

 private:
  uint128 state_ = 0;
  uint128 increment_ = 0;
  bool has_half_ = false;
  uint32_t half_ = 0;
};

}  // namespace ehc::tables
