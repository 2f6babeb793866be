#include "ehc/engram/dequant_rows.h"

#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;

constexpr const char* kName = "engram.dequant_rows";

// e4m3fn and ue8m0 by their definition.
double weight_of(int bits) {
  if ((bits & 127) == 127) return std::numeric_limits<double>::quiet_NaN();
  const int exponent = bits >> 3 & 15;
  const double size =
      exponent == 0 ? std::ldexp(bits & 7, -9) : std::ldexp(8 + (bits & 7), exponent - 10);
  return bits > 127 ? -size : size;
}
double scale_of(int bits) {
  return bits == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, bits - 127);
}

Array random_bytes(DType type, std::vector<int64_t> shape, uint32_t seed, uint32_t least = 0,
                   uint32_t most = 255) {
  Array bytes(type, std::move(shape));
  std::mt19937 generator(seed);
  for (int64_t i = 0; i < bytes.size(); ++i) {
    bytes.element<uint8_t>(i) = static_cast<uint8_t>(least + generator() % (most - least + 1));
  }
  return bytes;
}

void decode(const std::string& impl, int threads, const Tensor& weight, const Tensor& scale,
            int64_t group, const Tensor& values) {
  Context context = context_for(impl, threads);
  dequant_rows(context, {.weight = weight, .scale = scale, .group = group, .values = values});
}

// All 256 x 256 pairs of bytes: row = scale, column = weight; a group that fills vectors and one
// that does not.
TEST(DequantRows, EveryPairOfBytes) {
  Array weight(DType::f8_e4m3, {256, 256});
  for (int64_t i = 0; i < weight.size(); ++i) {
    weight.element<uint8_t>(i) = static_cast<uint8_t>(i % 256);
  }
  for (const int64_t group : {32, 8}) {
    Array scale(DType::f8_e8m0, {256, 256 / group});
    for (int64_t i = 0; i < scale.size(); ++i) {
      scale.element<uint8_t>(i) = static_cast<uint8_t>(i / (256 / group));
    }
    for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
      for (const std::string& impl : implementations(kName)) {
        Array values(type, {256, 256});
        decode(impl, 2, weight, scale, group, values);
        int wrong = 0;
        for (int64_t i = 0; i < values.size(); ++i) {
          Array exact(type, {1});
          store_float(exact.view().data, type, 0,
                      weight_of(static_cast<int>(i % 256)) * scale_of(static_cast<int>(i / 256)));
          const float want = exact.get(0);
          const float got = values.get(i);
          const bool equal =
              std::isnan(want) ? std::isnan(got) : float_bits(want) == float_bits(got);
          if (!equal && ++wrong < 4) {
            ADD_FAILURE() << impl << " " << name_of(type) << " weight " << i % 256 << " scale "
                          << i / 256 << ": " << got << ", expected " << want;
          }
        }
        EXPECT_EQ(wrong, 0) << impl;
      }
    }
  }
}

// The same bits, NaN included, on every instruction set, for any group and layout.
TEST(DequantRows, KernelsEqualTheReference) {
  uint32_t seed = 1;
  for (const int64_t group : {1, 7, 16, 32, 64, 160}) {
    for (const int64_t groups : {1, 3}) {
      for (const int64_t rows : {0, 1, 33}) {
        for (const bool raw : {false, true}) {
          const int64_t width = group * groups;
          const Array weight =
              random_bytes(raw ? DType::u8 : DType::f8_e4m3, {rows, width}, ++seed);
          const Array scale =
              random_bytes(raw ? DType::u8 : DType::f8_e8m0, {rows, groups}, ++seed);
          for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
            Array expected(type, {rows, width});
            decode("reference", 1, weight, scale, group, expected);
            for (const std::string& impl : implementations(kName)) {
              for (const test::Layout layout : {test::Layout{0, 0}, test::Layout{5, 1}}) {
                Array got = Array::random(type, {rows, width}, 3).copy(layout);
                decode(impl, 3, weight.copy(layout), scale.copy(layout), group, got);
                EXPECT_EQ(got.bits(), expected.bits())
                    << impl << " " << name_of(type) << " group " << group << " rows " << rows;
              }
            }
          }
        }
      }
    }
  }
}

TEST(DequantRows, ThreadsChangeNoBit) {
  const Array weight = random_bytes(DType::f8_e4m3, {1500, 96}, 1);
  const Array scale = random_bytes(DType::f8_e8m0, {1500, 3}, 2);
  for (const std::string& impl : implementations(kName)) {
    Array one(DType::bf16, {1500, 96});
    decode(impl, 1, weight, scale, 32, one);
    for (const int threads : {2, 3, 8}) {
      Array got(DType::bf16, {1500, 96});
      decode(impl, threads, weight, scale, 32, got);
      EXPECT_EQ(got.bits(), one.bits()) << impl << " " << threads;
    }
  }
}

TEST(DequantRows, GroupDividesTheRow) {
  const Array weight(DType::u8, {2, 48});
  const Array scale(DType::u8, {2, 1});
  Array values(DType::bf16, {2, 48});
  EXPECT_EQ(error_of([&] { decode("", 1, weight, scale, 32, values); }),
            "engram.dequant_rows: tensor 'scale': expected F8_E8M0/U8[2,hd/group], got U8[2,1]");
  EXPECT_EQ(error_of([&] { decode("", 1, weight, scale, 0, values); }),
            "engram.dequant_rows: attribute 'group': expected >= 1, got 0");
}

}  // namespace
}  // namespace ehc::engram
