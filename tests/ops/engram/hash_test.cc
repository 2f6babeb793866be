#include "ehc/engram/hash.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "ehc/error.h"
#include "ops/engram/hash/hash_math.h"

namespace ehc::engram {
namespace {

// The remainder by multiplication equals the floored one around multiples of each size and at the
// ends of the 64-bit range.
TEST(HashRemainder, IsExactOverTheWholeRange) {
  for (const int32_t size : {1, 2, 3, 7, 31, 256, 646403, 16000057, 20000003, 2147483647}) {
    const Divisor by = make_divisor(size);
    const auto check = [&](int64_t key) {
      const int64_t floored = ((key % size) + size) % size;
      ASSERT_EQ(floored_remainder(static_cast<uint64_t>(key), by), floored) << key << " " << size;
    };
    for (int64_t step = -4; step <= 4; ++step) {
      check(INT64_MAX - 4 + step);
      check(
          static_cast<int64_t>(static_cast<uint64_t>(INT64_MIN) + 4 + static_cast<uint64_t>(step)));
      check(step);
      for (const int64_t multiple : {INT64_MAX / size * size, INT64_MIN / size * size,
                                     INT64_MAX / size / 2 * size, int64_t{size}, int64_t{-size}}) {
        int64_t key = 0;
        if (!__builtin_add_overflow(multiple, step, &key)) check(key);
      }
    }
    uint64_t state = 1;
    for (int i = 0; i < 20000; ++i) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      check(static_cast<int64_t>(state ^ (state >> 29)));
    }
  }
}

TEST(Hash, RefusesATableThatCannotBeAddressed) {
  Context context = Context::cpu(1);
  const int32_t window[2] = {1, 2};
  const int64_t multipliers[2] = {3, 5};
  int32_t sizes[1] = {7};
  const int32_t offsets[1] = {0};
  int32_t indices[1];
  const Hash params{.window = {window, DType::i32, {1, 2}},
                    .multipliers = {multipliers, DType::i64, {1, 2}},
                    .vocab_sizes = {sizes, DType::i32, {1, 1, 1}},
                    .offsets = {offsets, DType::i32, {1, 1}},
                    .indices = {indices, DType::i32, {1, 1, 1}}};
  hash(context, params);
  EXPECT_EQ(indices[0], (3 ^ 10) % 7);
  sizes[0] = 0;
  try {
    hash(context, params);
    FAIL() << "a size of 0 was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::contract);
    EXPECT_STREQ(e.what(), "engram.hash: tensor 'vocab_sizes': expected sizes > 0, got 0");
  }
}

}  // namespace
}  // namespace ehc::engram
