#include "ehc/engram/quantize_rows.h"

#include "ehc/engram/dequant_rows.h"
#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::implementations;
using test::kInf;
using test::kNan;

constexpr const char* kName = "engram.quantize_rows";

struct Coded {
  Array weight;
  Array scale;
};

Coded encode(const std::string& impl, int threads, const Tensor& values, int64_t group,
             test::Layout layout = {}) {
  Coded out = {Array(DType::f8_e4m3, {values.shape[0], values.shape[1]}, layout),
               Array(DType::f8_e8m0, {values.shape[0], values.shape[1] / group}, layout)};
  Context context = context_for(impl, threads);
  quantize_rows(context,
                {.values = values, .group = group, .weight = out.weight, .scale = out.scale});
  return out;
}

// The reference searches; values of every size, and what lies on and beside a border.
TEST(QuantizeRows, KernelsEqualTheReference) {
  std::mt19937 generator(1);
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const int64_t group : {1, 7, 32, 128}) {
      for (const int64_t rows : {0, 1, 33}) {
        Array values = Array::random(type, {rows, 3 * group}, generator(), 0, 300);
        for (int64_t i = 0; i < values.size(); ++i) {
          const int64_t row = i / (3 * group);
          const auto shift = static_cast<int>(generator() % 280) - 150;
          if (row % 4 == 1) values.set(i, std::ldexp(values.get(i), shift));  // mixed sizes
          if (row % 4 == 2)
            values.set(i, std::ldexp(values.get(i), static_cast<int>(row * 8) - 140));
          if (row % 4 == 3) {  // ties and 448 * 2^k
            constexpr float kBorders[] = {448, 449, 464, 3.5F, 17, 1.0625F, -2.125F, 0, -0.0F, 480};
            values.set(i, kBorders[generator() % 10] * (row % 8 == 3 ? 1 : 0x1p-9F));
          }
        }
        const Coded expected = encode("reference", 1, values, group);
        for (const std::string& impl : implementations(kName)) {
          for (const test::Layout layout : {test::Layout{0, 0}, test::Layout{5, 1}}) {
            const Coded got = encode(impl, 3, values.copy(layout), group, layout);
            EXPECT_EQ(got.weight.bits(), expected.weight.bits()) << impl << " group " << group;
            EXPECT_EQ(got.scale.bits(), expected.scale.bits()) << impl << " group " << group;
          }
        }
      }
    }
  }
}

TEST(QuantizeRows, ThreadsChangeNoBit) {
  const Array values = Array::random(DType::f32, {1500, 96}, 1);
  for (const std::string& impl : implementations(kName)) {
    const Coded one = encode(impl, 1, values, 32);
    for (const int threads : {2, 3, 8}) {
      const Coded got = encode(impl, threads, values, 32);
      EXPECT_EQ(got.weight.bits(), one.weight.bits()) << impl << " " << threads;
      EXPECT_EQ(got.scale.bits(), one.scale.bits()) << impl << " " << threads;
    }
  }
}

// Every mantissa of a value between the smallest and the largest weight, next to one that fixes the
// scale.
TEST(QuantizeRows, RoundsEveryValueToNearest) {
  constexpr int64_t kRows = 4096;
  Array values(DType::f32, {kRows, 32});
  for (int64_t i = 0; i < values.size(); ++i) {
    const auto bits = static_cast<uint32_t>(0x3a000000U + i * 0x400U);  // from 2^-11 on
    values.set(i, i % 32 == 0 ? 448 : std::min(448.0F, float_from_bits(bits | (i % 3))));
  }
  const Coded expected = encode("reference", 2, values, 32);
  for (const std::string& impl : implementations(kName)) {
    const Coded got = encode(impl, 2, values, 32);
    EXPECT_EQ(got.weight.bits(), expected.weight.bits()) << impl;
    EXPECT_EQ(got.scale.bits(), std::string(kRows, 127)) << impl;
  }
}

TEST(QuantizeRows, SpecialGroups) {
  struct Case {
    float first, second;
    uint8_t scale, weight, second_weight;
  };
  const Case cases[] = {
      {0, -0.0F, 127, 0x00, 0x80},         {kNan, 1, 255, 0x7f, 0x7f},
      {-1, kNan, 255, 0x7f, 0x7f},         {kInf, 1, 254, 0x7e, 0x00},
      {-kInf, 3e38F, 254, 0xfe, 0x3e},     {448, 1, 127, 0x7e, 0x38},
      {449, 1, 128, 0x76, 0x30},           {448 * 0x1p-127F, 0, 0, 0x7e, 0x00},
      {0x1p-149F, -0x1p-149F, 0, 0, 0x80},
  };
  for (const std::string& impl : implementations(kName)) {
    for (const Case& c : cases) {
      Array values(DType::f32, {1, 2});
      values.set(0, c.first);
      values.set(1, c.second);
      const Coded got = encode(impl, 1, values, 2);
      SCOPED_TRACE(impl + " " + std::to_string(c.first) + " " + std::to_string(c.second));
      EXPECT_EQ(got.scale.element<uint8_t>(0), c.scale);
      EXPECT_EQ(got.weight.element<uint8_t>(0), c.weight);
      EXPECT_EQ(got.weight.element<uint8_t>(1), c.second_weight);
    }
  }
}

// Decoded rows are coded as rows of the same values: all pairs of finite weight and scale.
TEST(QuantizeRows, FindsDecodedValuesAgain) {
  Array weight(DType::f8_e4m3, {255, 256});
  Array scale(DType::f8_e8m0, {255, 1});
  for (int64_t i = 0; i < weight.size(); ++i) {
    weight.element<uint8_t>(i) = static_cast<uint8_t>(i % 128 == 127 ? i - 1 : i);
    scale.element<uint8_t>(i / 256) = static_cast<uint8_t>(i / 256);
  }
  for (const std::string& impl : implementations(kName)) {
    Array values(DType::f32, {255, 256});
    Context context = context_for(impl);
    dequant_rows(context, {.weight = weight, .scale = scale, .group = 256, .values = values});
    // The largest rows overflow fp32; those keep out of this.
    const Tensor finite = values.rows(0, 246);
    const Coded coded = encode(impl, 1, finite, 1);
    Array again(DType::f32, {246, 256});
    dequant_rows(context,
                 {.weight = coded.weight, .scale = coded.scale, .group = 1, .values = again});
    EXPECT_EQ(again.bits(), values.bits(0, 246)) << impl;
  }
}

TEST(QuantizeRows, GroupDividesTheRow) {
  const Array values(DType::f32, {2, 48});
  const Coded out = {Array(DType::f8_e4m3, {2, 48}), Array(DType::f8_e8m0, {2, 1})};
  Context context = Context::cpu(1);
  const auto refusal = [&](int64_t group) {
    return test::error_of([&] {
      quantize_rows(context,
                    {.values = values, .group = group, .weight = out.weight, .scale = out.scale});
    });
  };
  const std::string name = "engram.quantize_rows: attribute 'group': expected ";
  EXPECT_EQ(refusal(32), name + "a divisor of hd = 48, got 32");
  EXPECT_EQ(refusal(0), name + ">= 1, got 0");
}

}  // namespace
}  // namespace ehc::engram
