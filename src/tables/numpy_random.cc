#include "tables/numpy_random.h"

#include <array>
#include <bit>
#include <limits>

namespace ehc::tables {
namespace {

constexpr int kPoolWords = 4;

// A hash whose multiplier changes with every word.
class WordHash {
 public:
  WordHash(uint32_t constant, uint32_t multiplier) : constant_(constant), multiplier_(multiplier) {}

  uint32_t operator()(uint32_t word) {
    word ^= constant_;
    constant_ *= multiplier_;
    word *= constant_;
    return word ^ (word >> 16);
  }

 private:
  uint32_t constant_;
  uint32_t multiplier_;
};

uint32_t mix(uint32_t a, uint32_t b) {
  const uint32_t word = 0xca01f9ddU * a - 0x4973f715U * b;
  return word ^ (word >> 16);
}

// Entropy is the seed in 32-bit words, lowest first. Seeds here have at most kPoolWords of them,
// and missing words are hashed as zeros, so leading zero words make no difference.
std::array<uint32_t, kPoolWords> fill_pool(uint128 seed) {
  WordHash hash(0x43b0d7e5U, 0x931e8875U);
  std::array<uint32_t, kPoolWords> pool{};
  for (uint32_t& word : pool) {
    word = hash(static_cast<uint32_t>(seed));
    seed >>= 32;
  }
  for (size_t source = 0; source < kPoolWords; ++source) {
    for (size_t target = 0; target < kPoolWords; ++target) {
      if (source != target) pool[target] = mix(pool[target], hash(pool[source]));
    }
  }
  return pool;
}

constexpr uint128 join(uint64_t high, uint64_t low) { return (uint128{high} << 64) | low; }

constexpr uint128 kPcgMultiplier = join(0x2360ed051fc65da4U, 0x4385df649fccf645U);

}  // namespace

NumpyGenerator::NumpyGenerator(uint128 seed) {
  const auto pool = fill_pool(seed);
  WordHash hash(0x8b51f9ddU, 0x58f38dedU);
  std::array<uint64_t, 4> words{};
  for (size_t i = 0; i < words.size(); ++i) {
    const uint64_t low = hash(pool[2 * i % kPoolWords]);
    const uint64_t high = hash(pool[(2 * i + 1) % kPoolWords]);
    words[i] = (high << 32) | low;
  }
  increment_ = (join(words[2], words[3]) << 1) | 1;
  // One step from zero, then the initial state is added, then one more step.
  state_ = increment_ + join(words[0], words[1]);
  state_ = state_ * kPcgMultiplier + increment_;
}

uint64_t NumpyGenerator::next64() {
  state_ = state_ * kPcgMultiplier + increment_;
  const uint64_t folded = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
  return std::rotr(folded, static_cast<int>(state_ >> 122));
}

uint32_t NumpyGenerator::next32() {
  if (has_half_) {
    has_half_ = false;
    return half_;
  }
  const uint64_t word = next64();
  has_half_ = true;
  half_ = static_cast<uint32_t>(word >> 32);
  return static_cast<uint32_t>(word);
}

uint64_t NumpyGenerator::integer_below(uint64_t high) {
  constexpr uint64_t kRange32 = uint64_t{1} << 32;
  if (high == 1) return 0;
  if (high == kRange32) return next32();
  if (high < kRange32) {
    uint64_t product = next32() * high;
    if (static_cast<uint32_t>(product) < high) {
      const uint64_t threshold = (kRange32 - high) % high;
      while (static_cast<uint32_t>(product) < threshold) product = next32() * high;
    }
    return product >> 32;
  }
  uint128 product = uint128{next64()} * high;
  if (static_cast<uint64_t>(product) < high) {
    const uint64_t threshold = (std::numeric_limits<uint64_t>::max() - (high - 1)) % high;
    while (static_cast<uint64_t>(product) < threshold) product = uint128{next64()} * high;
  }
  return static_cast<uint64_t>(product >> 64);
}

}  // namespace ehc::tables
