#include "tables/numpy_random.h"

#include <gtest/gtest.h>

#include "core/splitmix64.h"

namespace ehc::tables {
namespace {

struct Draws {
  uint64_t high;
  uint64_t values[3];
};
struct Sequence {
  uint64_t seed_high;  // upper 64 bits of the seed
  uint64_t seed_low;
  Draws draws[21];
};

#include "numpy_vectors.inc"

// Each range is drawn from three times on one generator, so that the unused half of a 64-bit word
// must survive 64-bit draws in between.
TEST(NumpyRandom, EqualsNumpyOverSeedsAndRanges) {
  for (const Sequence& sequence : kSequences) {
    NumpyGenerator generator((uint128{sequence.seed_high} << 64) | sequence.seed_low);
    for (const Draws& draws : sequence.draws) {
      for (const uint64_t expected : draws.values) {
        EXPECT_EQ(generator.integer_below(draws.high), expected)
            << "seed " << sequence.seed_high << ":" << sequence.seed_low << " high " << draws.high;
      }
    }
  }
}

TEST(NumpyRandom, EqualsNumpyOverManySeeds) {
  uint64_t folded = 0;
  for (uint64_t seed = 0; seed < kFoldedSeeds; ++seed) {
    NumpyGenerator generator(seed * uint64_t{2654435761});
    for (const uint64_t high :
         std::initializer_list<uint64_t>{46539438283891u, 6148914691236517206u, 2863311531u}) {
      for (int i = 0; i < 5; ++i) {
        folded = folded * 6364136223846793005u + generator.integer_below(high);
      }
    }
  }
  EXPECT_EQ(folded, kFolded);
}

// default_rng(seed).random() takes the upper 53 bits of a word.
TEST(NumpyRandom, PublishedFirstDoubles) {
  const auto first_double = [](uint64_t seed) {
    return static_cast<double>(NumpyGenerator(seed).next64() >> 11) * 0x1p-53;
  };
  EXPECT_NEAR(first_double(0), 0.6369616873, 5e-11);
  EXPECT_NEAR(first_double(42), 0.7739560486, 5e-11);
  EXPECT_NEAR(first_double(12345), 0.2273360225, 5e-11);
}

// First outputs of the reference SplitMix64 for seed 1234567.
TEST(SplitMix64, ReferenceStream) {
  EXPECT_EQ(splitmix64(1234567, 0), 6457827717110365317u);
  EXPECT_EQ(splitmix64(1234567, 1), 3203168211198807973u);
  EXPECT_EQ(splitmix64(1234567, 2), 9817491932198370423u);
  EXPECT_EQ(splitmix64(1234567, 3), 4593380528125082431u);
}

}  // namespace
}  // namespace ehc::tables
