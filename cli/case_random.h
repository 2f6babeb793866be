// Random numbers by position: element i of a stream is a pure function of the stream and i.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/splitmix64.h"

namespace ehc::cli {

// Output i of a SplitMix64 stream.
inline uint64_t random_bits(uint64_t stream, int64_t i) {
  return splitmix64(stream, static_cast<uint64_t>(i));
}

// A stream of its own for every tensor of a case.
inline uint64_t random_stream(uint64_t seed, std::string_view name) {
  uint64_t stream = seed * 0xd1342543de82ef95U;
  for (const char c : name) {
    stream = random_bits(stream ^ static_cast<unsigned char>(c), 0);
  }
  return stream;
}

// Uniform in [least, most]; the slight preference of a remainder is of no consequence here.
inline int64_t random_integer(uint64_t stream, int64_t i, int64_t least, int64_t most) {
  const uint64_t span = static_cast<uint64_t>(most) - static_cast<uint64_t>(least) + 1;
  const uint64_t bits = random_bits(stream, i);
  return static_cast<int64_t>(static_cast<uint64_t>(least) + (span == 0 ? bits : bits % span));
}

// Mean 0, variance 1, bounded by 3.5: the sum of four uniforms. Exact in fp32, so the same on
// every machine.
inline float random_normal(uint64_t bits) {
  const auto sum = static_cast<int32_t>((bits & 0xffffU) + (bits >> 16 & 0xffffU) +
                                        (bits >> 32 & 0xffffU) + (bits >> 48));
  return static_cast<float>(sum - 2 * 0xffff) * (1.7320508F / 65536);
}

}  // namespace ehc::cli
