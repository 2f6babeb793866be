#include "ehc/engram/gather.h"

#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;

Array random_indices(DType type, int64_t tokens, int64_t columns, int64_t rows, uint32_t seed) {
  Array indices(type, {tokens, columns}, {3, 0});
  std::mt19937 generator(seed);
  for (int64_t i = 0; i < indices.size(); ++i) {
    const int64_t index = static_cast<int64_t>(generator() % (rows + 1)) - 1;
    if (type == DType::i64) {
      indices.element<int64_t>(i) = index;
    } else {
      indices.element<int32_t>(i) = static_cast<int32_t>(index);
    }
  }
  return indices;
}

// Every pair of dtypes and index width, odd and even widths, misaligned and padded rows, any number
// of threads; a token alone gives its row of the batch.
TEST(Gather, KernelsEqualTheReference) {
  const DType types[] = {DType::f32, DType::bf16, DType::f16};
  uint32_t seed = 1;
  for (const int64_t width : {1, 2, 19, 32, 33, 64, 100, 256}) {
    for (const DType from : types) {
      const int64_t rows = 1 + width % 7 * 20;
      Array table = Array::random(from, {rows, width}, ++seed, 0, 1000);
      table.set(0, std::numeric_limits<float>::quiet_NaN());
      if (width > 2) table.set(1, -0.0F);
      if (width > 2) table.set(2, std::numeric_limits<float>::infinity());
      for (const DType to : types) {
        for (const int64_t tokens : {0, 1, 2, 31, 33}) {
          const DType index_type = seed % 2 == 0 ? DType::i32 : DType::i64;
          const int64_t columns = 1 + seed % 5;
          const Array indices = random_indices(index_type, tokens, columns, rows, ++seed);
          const auto run = [&](const std::string& impl, int threads, const Tensor& rows_in,
                               const Tensor& from_table, const Tensor& out) {
            Context context = context_for(impl, threads);
            gather_fwd(context, {.table = from_table, .indices = rows_in, .embedding = out});
          };
          Array expected(to, {tokens, columns * width});
          run("reference", 1, indices, table, expected);
          for (const std::string& impl : implementations("engram.gather_fwd")) {
            for (const test::Layout layout : {test::Layout{0, 0}, test::Layout{5, 1}}) {
              const Array copy = table.copy(layout);
              Array got = Array::random(to, {tokens, columns * width}, 3).copy(layout);
              run(impl, 3, indices, copy, got);
              // NaN has many bit patterns once it is converted.
              const auto same = cli::compare(got.copy().view(), expected, {0, 0}, false);
              EXPECT_TRUE(from == to ? got.bits() == expected.bits() : same.equal)
                  << impl << " " << name_of(from) << " to " << name_of(to) << " width " << width
                  << " T=" << tokens;
              if (tokens == 0) continue;
              Array alone(to, {1, columns * width});
              run(impl, 1, indices.rows(tokens - 1, tokens), copy, alone);
              EXPECT_EQ(alone.bits(), got.bits(tokens - 1, tokens)) << impl;
            }
          }
        }
      }
    }
  }
}

// The path for outputs larger than the caches.
TEST(Gather, ManyRowsOnThreadsEqualTheReference) {
  const int64_t tokens = 3000, columns = 24, width = 64, rows = 5000;
  const Array table = Array::random(DType::bf16, {rows, width}, 1);
  const Array indices = random_indices(DType::i32, tokens, columns, rows, 2);
  Array expected(DType::bf16, {tokens, columns * width});
  Context reference = context_for("reference", 2);
  gather_fwd(reference, {.table = table, .indices = indices, .embedding = expected});
  for (const std::string& impl : implementations("engram.gather_fwd")) {
    Array got(DType::bf16, {tokens, columns * width});
    Context context = context_for(impl, 2);
    gather_fwd(context, {.table = table, .indices = indices, .embedding = got});
    EXPECT_EQ(std::memcmp(got.view().data, expected.view().data,
                          static_cast<size_t>(tokens * columns * width * 2)),
              0)
        << impl;
  }
}

TEST(Gather, RefusesIndicesOutsideOfTheTable) {
  const Array table = Array::random(DType::f32, {4, 8}, 1);
  Array embedding(DType::f32, {2, 24});
  embedding.fill(7);
  const std::string before = embedding.bits();
  Context context = Context::cpu(1);
  const auto refusal = [&](std::vector<int64_t> values, const Tensor& from) {
    const Tensor indices(values.data(), DType::i64, {2, 3});
    const std::string text = error_of(
        [&] { gather_fwd(context, {.table = from, .indices = indices, .embedding = embedding}); });
    EXPECT_EQ(embedding.bits(), before);
    return text;
  };
  const std::string name = "engram.gather_fwd: tensor 'indices': expected -1 or a row below ";
  EXPECT_EQ(refusal({0, 1, 2, 3, 4, 0}, table), name + "4, got 4 at position [1,1]");
  EXPECT_EQ(refusal({0, 1, -2, 3, 3, 0}, table), name + "4, got -2 at position [0,2]");
  EXPECT_EQ(refusal({INT64_MIN, 1, 0, 3, 3, 0}, table),
            name + "4, got -9223372036854775808 at position [0,0]");
  EXPECT_EQ(refusal({-1, -1, -1, -1, -1, 0}, table.rows(0, 0)),
            name + "0, got 0 at position [1,2]");
}

TEST(Gather, NoRowsGiveZeros) {
  const int32_t indices[] = {-1, -1};
  for (const std::string& impl : implementations("engram.gather_fwd")) {
    Array embedding(DType::bf16, {1, 66});
    embedding.fill(1);
    Context context = context_for(impl);
    gather_fwd(context, {.table = {nullptr, DType::bf16, {0, 33}},
                         .indices = {indices, DType::i32, {1, 2}},
                         .embedding = embedding});
    EXPECT_EQ(embedding.bits(), std::string(132, '\0')) << impl;
  }
}

}  // namespace
}  // namespace ehc::engram
