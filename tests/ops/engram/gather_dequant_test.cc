#include "ehc/engram/gather_dequant.h"

#include "ehc/engram/dequant_rows.h"
#include "ehc/engram/gather.h"
#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;

constexpr const char* kName = "engram.gather_dequant";

struct Table {
  Array weight;
  Array scale;
  int64_t group;

  Table(int64_t rows, int64_t groups, int64_t group_size, uint32_t seed)
      : weight(DType::f8_e4m3, {rows, groups * group_size}),
        scale(DType::f8_e8m0, {rows, groups}),
        group(group_size) {
    std::mt19937 generator(seed);
    for (int64_t i = 0; i < weight.size(); ++i) {
      weight.element<uint8_t>(i) = static_cast<uint8_t>(generator());
    }
    for (int64_t i = 0; i < scale.size(); ++i) {
      scale.element<uint8_t>(i) = static_cast<uint8_t>(generator());
    }
  }
};

Array random_indices(DType type, int64_t tokens, int64_t columns, int64_t rows, uint32_t seed) {
  Array indices(type, {tokens, columns}, {2, 1});
  std::mt19937 generator(seed);
  for (int64_t i = 0; i < indices.size(); ++i) {
    const auto index = static_cast<int32_t>(generator() % static_cast<uint32_t>(rows + 1)) - 1;
    if (type == DType::i64) {
      indices.element<int64_t>(i) = index;
    } else {
      indices.element<int32_t>(i) = index;
    }
  }
  return indices;
}

// The bits of decoding the whole table and gathering from it.
TEST(GatherDequant, IsDequantThenGather) {
  uint32_t seed = 1;
  for (const int64_t group : {1, 7, 32, 48}) {
    for (const int64_t tokens : {0, 1, 2, 31, 33}) {
      const int64_t rows = 29, groups = 3, columns = 1 + seed % 5;
      const Table table(rows, groups, group, ++seed);
      const DType index_type = seed % 2 == 0 ? DType::i32 : DType::i64;
      const Array indices = random_indices(index_type, tokens, columns, rows, ++seed);
      for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
        Array values(type, {rows, groups * group});
        Array expected(type, {tokens, columns * groups * group});
        Context reference = context_for("reference");
        dequant_rows(
            reference,
            {.weight = table.weight, .scale = table.scale, .group = group, .values = values});
        gather_fwd(reference, {.table = values, .indices = indices, .embedding = expected});
        for (const std::string& impl : implementations(kName)) {
          for (const test::Layout layout : {test::Layout{0, 0}, test::Layout{5, 1}}) {
            Array got = expected.copy(layout);
            got.fill(3);
            Context context = context_for(impl, 3);
            gather_dequant(context, {.weight = table.weight.copy(layout),
                                     .scale = table.scale.copy(layout),
                                     .indices = indices,
                                     .group = group,
                                     .embedding = got});
            EXPECT_EQ(got.bits(), expected.bits())
                << impl << " " << name_of(type) << " group " << group << " T=" << tokens;
          }
        }
      }
    }
  }
}

TEST(GatherDequant, ThreadsChangeNoBit) {
  const Table table(40, 3, 32, 1);
  const Array indices = random_indices(DType::i32, 500, 4, 40, 2);
  for (const std::string& impl : implementations(kName)) {
    std::string one;
    for (const int threads : {1, 2, 3, 8}) {
      Array got(DType::bf16, {500, 4 * 96});
      Context context = context_for(impl, threads);
      gather_dequant(
          context,
          {.weight = table.weight, .scale = table.scale, .indices = indices, .embedding = got});
      if (threads == 1) one = got.bits();
      EXPECT_EQ(got.bits(), one) << impl << " " << threads;
    }
  }
}

TEST(GatherDequant, RefusesIndicesOutsideOfTheTable) {
  const Table table(4, 1, 32, 1);
  Array embedding(DType::bf16, {1, 64});
  embedding.fill(7);
  const std::string before = embedding.bits();
  for (const int64_t index : {int64_t{4}, int64_t{-2}, INT64_MAX}) {
    const int64_t indices[] = {0, index};
    Context context = Context::cpu(1);
    const std::string text = error_of([&] {
      gather_dequant(context, {.weight = table.weight,
                               .scale = table.scale,
                               .indices = {indices, DType::i64, {1, 2}},
                               .embedding = embedding});
    });
    EXPECT_EQ(text, "engram.gather_dequant: tensor 'indices': expected -1 or a row below 4, got " +
                        std::to_string(index) + " at position [0,1]");
    EXPECT_EQ(embedding.bits(), before);
  }
}

}  // namespace
}  // namespace ehc::engram
