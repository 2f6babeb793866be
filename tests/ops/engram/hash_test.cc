#include "ehc/engram/hash.h"

#include "ops/engram/hash/hash_math.h"
#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;

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

// Sizes on both sides of 2^14, where the vector kernels change their way, and at both ends.
constexpr int32_t kSizes[] = {1,     2,     3,        7,          31,         256,
                              8191,  8192,  16383,    16384,      16411,      32749,
                              65536, 65537, 16000057, 1073741824, 1073741827, 2147483647};

// Keys around multiples of the size, 2^53 (where doubles get gaps), 2^63 and 2^64.
std::vector<int64_t> hard_keys(int64_t size, std::mt19937_64& generator) {
  std::vector<int64_t> keys;
  const auto around = [&](int64_t center) {
    for (int64_t step = -3; step <= 3; ++step) {
      keys.push_back(
          static_cast<int64_t>(static_cast<uint64_t>(center) + static_cast<uint64_t>(step)));
    }
  };
  for (const int64_t center : {int64_t{0}, INT64_MAX, int64_t{1} << 53, int64_t{1} << 62, size}) {
    around(center);
    around(-center);
    around(center / size * size);
    around(-center / size * size);
  }
  for (int i = 0; i < 40; ++i) {
    const auto random = static_cast<int64_t>(generator());
    around(random / size * size);
    keys.push_back(random);
    keys.push_back(random >> (i + 1));
  }
  return keys;
}

// Every kernel against the processor's division. One layer per key: with a window of {1, 0} the key
// is the first multiplier.
TEST(Hash, EveryKernelIsExactOverTheWholeRange) {
  std::mt19937_64 generator(1);
  const int64_t heads = 9;  // one whole vector and a tail
  for (size_t which = 0; which < std::size(kSizes); ++which) {
    const std::vector<int64_t> keys = hard_keys(kSizes[which], generator);
    const auto layers = static_cast<int64_t>(keys.size());
    std::vector<int64_t> multipliers;
    std::vector<int32_t> sizes;
    for (const int64_t key : keys) {
      multipliers.insert(multipliers.end(), {key, 1});
      for (int64_t j = 0; j < heads; ++j) {
        sizes.push_back(
            kSizes[(which + (j % 3 == 0 ? 0 : static_cast<size_t>(j))) % std::size(kSizes)]);
      }
    }
    const std::vector<int64_t> offsets(sizes.size(), 0);
    const int32_t window[2] = {1, 0};
    std::vector<int32_t> indices(sizes.size());
    for (const std::string& impl : implementations("engram.hash")) {
      Context context = context_for(impl);
      hash(context, {.window = {window, DType::i32, {1, 2}},
                     .multipliers = {multipliers.data(), DType::i64, {layers, 2}},
                     .vocab_sizes = {sizes.data(), DType::i32, {layers, 1, heads}},
                     .offsets = {offsets.data(), DType::i64, {layers, heads}},
                     .indices = {indices.data(), DType::i32, {layers, 1, heads}}});
      for (size_t i = 0; i < indices.size(); ++i) {
        const int64_t key = keys[i / static_cast<size_t>(heads)];
        const int64_t floored = (key % sizes[i] + sizes[i]) % sizes[i];
        ASSERT_EQ(indices[i], floored) << impl << " key " << key << " size " << sizes[i];
      }
    }
  }
}

// Kernels agree in every layout, width, number of heads and orders, with masks, strides, borders of
// blocks and any number of threads; a token alone gives its row of the batch.
TEST(Hash, KernelsEqualTheReferenceOnAnyThreads) {
  std::mt19937_64 generator(2);
  for (const int64_t tokens : {0, 1, 2, 31, 33, 600}) {
    for (const int64_t heads : {1, 3, 8, 9, 16, 70}) {
      const int64_t orders = 1 + static_cast<int64_t>(generator() % 7);
      const int64_t layers = 1 + static_cast<int64_t>(generator() % 3);
      const int64_t columns = orders * heads;
      Array window(DType::i32, {tokens, orders + 1}, {3, 1});
      Array mask(DType::boolean, {tokens});
      Array multipliers(DType::i64, {layers, orders + 1});
      Array sizes(DType::i32, {layers, orders, heads});
      Array offsets(DType::i64, {layers, columns});
      Array narrow_offsets(DType::i32, {layers, columns});
      for (int64_t i = 0; i < window.size(); ++i) {
        window.element<int32_t>(i) = static_cast<int32_t>(generator());
      }
      for (int64_t i = 0; i < mask.size(); ++i) mask.element<uint8_t>(i) = generator() % 5 == 0;
      for (int64_t i = 0; i < multipliers.size(); ++i) {
        multipliers.element<int64_t>(i) = static_cast<int64_t>(generator());
      }
      for (int64_t i = 0; i < sizes.size(); ++i) {
        const auto bits = static_cast<int>(1 + generator() % 30);
        sizes.element<int32_t>(i) = 1 + static_cast<int32_t>(generator() >> (64 - bits));
        offsets.element<int64_t>(i) = static_cast<int64_t>(generator() >> 34);
        narrow_offsets.element<int32_t>(i) = static_cast<int32_t>(generator() >> 34);
      }
      for (const DType type : {DType::i32, DType::i64}) {
        for (const IndexLayout layout : {IndexLayout::ltc, IndexLayout::tlc}) {
          const std::vector<int64_t> shape = layout == IndexLayout::ltc
                                                 ? std::vector<int64_t>{layers, tokens, columns}
                                                 : std::vector<int64_t>{tokens, layers, columns};
          const auto run = [&](const std::string& impl, int threads, const Array& out) {
            Context context = context_for(impl, threads);
            hash(context, {.window = window,
                           .multipliers = multipliers,
                           .vocab_sizes = sizes,
                           .offsets = type == DType::i64 ? offsets : narrow_offsets,
                           .image_token_mask = mask,
                           .indices = out,
                           .layout = layout});
          };
          Array expected(type, shape);
          run("reference", 1, expected);
          for (const std::string& impl : implementations("engram.hash")) {
            Array got(type, shape, {5, 1});
            run(impl, 3, got);
            ASSERT_EQ(got.bits(), expected.bits())
                << impl << " T=" << tokens << " heads=" << heads << " " << name_of(type);
            if (tokens == 0 || layout == IndexLayout::ltc) continue;
            const int64_t t = tokens - 1;
            Array alone(type, {1, layers, columns});
            Context context = context_for(impl);
            hash(context, {.window = window.rows(t, tokens),
                           .multipliers = multipliers,
                           .vocab_sizes = sizes,
                           .offsets = type == DType::i64 ? offsets : narrow_offsets,
                           .image_token_mask = mask.rows(t, tokens),
                           .indices = alone,
                           .layout = layout});
            EXPECT_EQ(alone.bits(), expected.bits(t, tokens)) << impl;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ehc::engram
