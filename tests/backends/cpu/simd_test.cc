// simd.h on every instruction set that this processor runs.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/isa.h"
#include "tests/backends/cpu/simd_probe.h"

namespace ehc::probe {
namespace {

struct Probe {
  Isa isa;
  decltype(&generic::evaluate) evaluate;
  decltype(&generic::multiply_add) multiply_add;
  decltype(&generic::widen) widen;
  decltype(&generic::narrow) narrow;
  decltype(&generic::weighted) weighted;
  decltype(&generic::sum) sum;
};

#define EHC_PROBE(isa)                                             \
  Probe{Isa::isa,    isa::evaluate, isa::multiply_add, isa::widen, \
        isa::narrow, isa::weighted, isa::sum},
const Probe kProbes[] = {EHC_EACH_ISA(EHC_PROBE)};
#undef EHC_PROBE

class Simd : public ::testing::TestWithParam<Probe> {
 protected:
  void SetUp() override {
    if (!cpu_supports(GetParam().isa)) GTEST_SKIP() << "not on this processor";
  }
};

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The definition of fp16 and bf16: sign, exponent field, fraction.
double value_of(DType type, uint16_t bits) {
  const int fraction_bits = type == DType::bf16 ? 7 : 10;
  const int exponent_bits = 15 - fraction_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
  const int exponent = bits >> fraction_bits & top;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == top) return fraction ? std::nan("") : sign * INFINITY;
  const int hidden = exponent ? 1 << fraction_bits : 0;
  return sign * std::ldexp(hidden + fraction, std::max(exponent, 1) - bias - fraction_bits);
}

// Nearest, ties to even, found among the neighbours by value.
uint16_t nearest(DType type, float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const uint16_t infinity = type == DType::bf16 ? 0x7f80 : 0x7c00;
  const double size = std::fabs(static_cast<double>(x));
  int low = 0, high = infinity;  // value(low) <= size; infinity stands for the next power of two
  const auto value = [&](int bits) {
    return bits == infinity ? (type == DType::bf16 ? 0x1p128 : 0x1p16)
                            : value_of(type, static_cast<uint16_t>(bits));
  };
  if (size >= value(infinity)) return sign | infinity;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (value(middle) <= size ? low : high) = middle;
  }
  const double below = size - value(low), above = value(high) - size;
  const bool up = above < below || (above == below && low % 2 == 1);
  return sign | static_cast<uint16_t>(up ? high : low);
}

TEST_P(Simd, WidensEveryValue) {
  std::vector<uint16_t> in(65536);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
  for (const DType type : {DType::bf16, DType::f16}) {
    std::vector<float> out(in.size());
    GetParam().widen(type, in.data(), out.data(), 65536);
    for (size_t i = 0; i < in.size(); ++i) {
      const double expected = value_of(type, in[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(out[i])) << i;
      } else {
        ASSERT_EQ(bits_of(out[i]), bits_of(static_cast<float>(expected))) << i;
      }
    }
  }
}

// Every value of the type, the ties between neighbours, and what lies next to both; among them the
// subnormals that the BF16 instruction would flush, overflow and NaN.
TEST_P(Simd, NarrowsToNearestEven) {
  for (const DType type : {DType::bf16, DType::f16}) {
    std::vector<float> in;
    for (uint32_t i = 0; i < 65536; ++i) {
      const auto half = static_cast<uint16_t>(i);
      const auto next = static_cast<uint16_t>(i + 1);
      const double value = value_of(type, half);
      const double tie = (value + value_of(type, next)) / 2;
      for (const double x : {value, tie}) {
        const auto exact = static_cast<float>(x);
        in.push_back(exact);
        in.push_back(std::nextafter(exact, INFINITY));
        in.push_back(std::nextafter(exact, -INFINITY));
      }
    }
    for (const uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu, 0x7fc00000u}) {
      in.push_back(float_of(nan));
    }
    std::vector<uint16_t> out(in.size());
    GetParam().narrow(type, in.data(), out.data(), static_cast<int64_t>(in.size()), false);
    for (size_t i = 0; i < in.size(); ++i) {
      if (std::isnan(in[i])) {
        ASSERT_TRUE(std::isnan(value_of(type, out[i]))) << std::hex << bits_of(in[i]);
      } else {
        ASSERT_EQ(out[i], nearest(type, in[i])) << std::hex << bits_of(in[i]);
      }
    }
  }
}

TEST_P(Simd, NanBesideNumbersHarmsNoLane) {
  for (int lane = 0; lane < 32; ++lane) {
    std::vector<float> in(32, 1.00390625f);  // a tie in bf16
    in[static_cast<size_t>(lane)] = NAN;
    std::vector<uint16_t> out(32);
    GetParam().narrow(DType::bf16, in.data(), out.data(), 32, false);
    for (int i = 0; i < 32; ++i) {
      const uint16_t bits = out[static_cast<size_t>(i)];
      if (i == lane) {
        EXPECT_TRUE(std::isnan(value_of(DType::bf16, bits)));
      } else {
        EXPECT_EQ(bits, 0x3f80) << i;
      }
    }
  }
}

struct Range {
  Function function;
  std::function<double(double)> exact;
  float low, high;
  double units;
};

TEST_P(Simd, FunctionsAreWithinTheirUnits) {
  const auto sigmoid = [](double x) {
    return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x));
  };
  const Range ranges[] = {
      {Function::exp, [](double x) { return std::exp(x); }, -110, 0, 2},
      {Function::sigmoid, sigmoid, -110, 110, 2},
      {Function::silu, [&](double x) { return x * sigmoid(x); }, -80, 110, 4},
  };
  for (const Range& range : ranges) {
    std::vector<float> in;
    for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 2999) {
      const float x = float_of(static_cast<uint32_t>(bits));
      if (x >= range.low && x <= range.high) in.push_back(x);
    }
    std::vector<float> out(in.size());
    GetParam().evaluate(range.function, in.data(), out.data(), static_cast<int64_t>(in.size()));
    for (size_t i = 0; i < in.size(); ++i) {
      const double expected = range.exact(in[i]);
      const auto rounded = static_cast<float>(expected);
      if (std::isinf(rounded)) {
        ASSERT_EQ(out[i], rounded) << in[i];
        continue;
      }
      const float size = std::fabs(rounded);
      const double spacing = static_cast<double>(std::nextafter(size, INFINITY)) - size;
      ASSERT_LE(std::fabs(out[i] - expected), range.units * spacing)
          << static_cast<int>(range.function) << " of " << in[i];
    }
  }
}

// Of t = x log2(e). It crosses zero at x = -1.278, where only an absolute bound holds; behind it,
// it is tiny.
TEST_P(Simd, GradientOfSiluIsWithinItsBound) {
  const double log2e = std::log2(std::exp(1.0));
  std::vector<float> in;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 2999) {
    const float t = float_of(static_cast<uint32_t>(bits));
    if (std::fabs(t) <= 159) in.push_back(t);
  }
  std::vector<float> out(in.size());
  GetParam().evaluate(Function::silu_gradient, in.data(), out.data(),
                      static_cast<int64_t>(in.size()));
  for (size_t i = 0; i < in.size(); ++i) {
    const double x = in[i] / log2e, e = std::exp(-std::fabs(x));
    const double s = (x < 0 ? e : 1) / (1 + e), rest = (x < 0 ? 1 : e) / (1 + e);
    const double size = s * (1 + std::fabs(x) * rest) * log2e;
    ASSERT_LE(std::fabs(out[i] - s * (1 + x * rest) * log2e), 6 * 0x1p-24 * size + 0x1p-140)
        << in[i];
  }
}

TEST_P(Simd, FunctionsAtTheEdges) {
  const float inf = INFINITY, nan = NAN;
  const std::vector<float> in = {0.0f, -0.0f, inf, -inf, nan, -nan, FLT_MAX, -FLT_MAX, 200, -200};
  std::vector<float> out(in.size());
  const auto evaluate = [&](Function function) {
    GetParam().evaluate(function, in.data(), out.data(), static_cast<int64_t>(in.size()));
  };
  evaluate(Function::sigmoid);
  const std::vector<float> sigmoids = {0.5f, 0.5f, 1, 0, nan, nan, 1, 0, 1, 0};
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_TRUE(out[i] == sigmoids[i] || (std::isnan(out[i]) && std::isnan(sigmoids[i]))) << in[i];
  }
  evaluate(Function::silu);  // -inf * 0 is NaN
  const std::vector<float> silus = {0, 0, inf, nan, nan, nan, FLT_MAX, 0, 200, 0};
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_TRUE(out[i] == silus[i] || (std::isnan(out[i]) && std::isnan(silus[i]))) << in[i];
  }
  evaluate(Function::silu_gradient);  // inf * 0 is NaN
  const float log2e = 0x1.715476p+0f;
  const std::vector<float> slopes = {log2e / 2, log2e / 2, nan, nan, nan, nan, log2e, 0, log2e, 0};
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_TRUE(out[i] == slopes[i] || (std::isnan(out[i]) && std::isnan(slopes[i]))) << in[i];
  }
}

TEST_P(Simd, ExponentialAtTheEdges) {
  const std::vector<float> in = {0.0f, -0.0f, -INFINITY, NAN, -NAN, -FLT_MAX, -104, -0x1p-149f};
  const std::vector<float> expected = {1, 1, 0, NAN, NAN, 0, 0, 1};
  std::vector<float> out(in.size());
  GetParam().evaluate(Function::exp, in.data(), out.data(), static_cast<int64_t>(in.size()));
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_TRUE(out[i] == expected[i] || (std::isnan(out[i]) && std::isnan(expected[i]))) << in[i];
  }
}

// Two elements share a division; what one of them holds must not show in the other.
TEST_P(Simd, SiluKeepsSpecialValuesToTheirElement) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float special : {std::nanf(""), -std::nanf(""), inf, -inf, FLT_MAX, -FLT_MAX}) {
    for (size_t at = 0; at < 32; ++at) {
      std::vector<float> in(32, 0.75f), out(in.size());
      in[at] = special;
      GetParam().evaluate(Function::silu, in.data(), out.data(), static_cast<int64_t>(in.size()));
      for (size_t i = 0; i < in.size(); ++i) {
        if (i == at) continue;
        ASSERT_NEAR(out[i], 0.50938f, 1e-5f) << special << " at " << at << ", " << i;
      }
    }
  }
}

// One polynomial and correctly rounded steps: no instruction set differs from another.
TEST_P(Simd, FunctionsHaveTheSameBitsEverywhere) {
  const Probe& plainest = *std::prev(std::end(kProbes));  // generic, unless the build leaves it out
  std::mt19937 random(1);
  std::vector<float> in(4099), a(in.size()), b(in.size());
  for (float& x : in) x = std::normal_distribution<float>(0, 30)(random);
  const auto count = static_cast<int64_t>(in.size());
  for (const Function function : {Function::sigmoid, Function::exp}) {
    if (function == Function::exp) {
      for (float& x : in) x = -std::fabs(x);
    }
    GetParam().evaluate(function, in.data(), a.data(), count);
    plainest.evaluate(function, in.data(), b.data(), count);
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
  }
}

TEST_P(Simd, MultiplyAddRoundsOnce) {
  std::mt19937 random(2);
  std::vector<float> a, b, c;
  const auto any = [&] { return float_of(static_cast<uint32_t>(random())); };
  for (int i = 0; i < 200000; ++i) {
    a.push_back(any());
    b.push_back(i % 2 ? any() : std::ldexp(1.0f, static_cast<int>(random() % 40) - 20));
    const float product = a.back() * b.back();
    c.push_back(i % 3 == 0 ? any() : i % 3 == 1 ? -product : product * 0x1p-24f);
  }
  // product + c lies just off a tie of fp32, nearer than double can see
  a.push_back(1 + 0x1p-23f), b.push_back(1 + 0x1p-23f), c.push_back(0x1p-60f);
  a.push_back(0x1.000002p0f), b.push_back(0x1.8p-24f), c.push_back(1.0f);
  a.push_back(0x1p-24f), b.push_back(1 + 0x1p-23f), c.push_back(-0x1p30f);
  std::vector<float> out(a.size());
  GetParam().multiply_add(a.data(), b.data(), c.data(), out.data(), static_cast<int64_t>(a.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    const float expected = std::fma(a[i], b[i], c[i]);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(out[i])) << a[i] << " " << b[i] << " " << c[i];
    } else {
      ASSERT_EQ(bits_of(out[i]), bits_of(expected)) << a[i] << " " << b[i] << " " << c[i];
    }
  }
}

// A tail has the bits of a body filled up with zeros, and nothing beyond a row is written.
TEST_P(Simd, TailsAreLikeTheBody) {
  std::mt19937 random(3);
  std::vector<float> in(160);
  for (float& x : in) x = std::normal_distribution<float>(0, 4)(random);
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    const size_t size = size_of(type);
    std::vector<uint8_t> all(in.size() * size);
    GetParam().narrow(type, in.data(), all.data(), static_cast<int64_t>(in.size()), false);
    for (int64_t count = 0; count <= 130; ++count) {
      const auto n = static_cast<size_t>(count);
      std::vector<float> filled = in, whole(in.size());
      std::fill(filled.begin() + count, filled.end(), 0.0f);
      GetParam().evaluate(Function::silu, filled.data(), whole.data(),
                          static_cast<int64_t>(in.size()));
      std::vector<float> some(n + 1, -7.0f);
      GetParam().evaluate(Function::silu, in.data(), some.data(), count);
      ASSERT_EQ(std::memcmp(some.data(), whole.data(), n * sizeof(float)), 0) << count;
      ASSERT_EQ(some[n], -7.0f) << count;

      std::vector<uint8_t> narrow(n * size + 1, 0x5a);
      GetParam().narrow(type, in.data(), narrow.data(), count, false);
      ASSERT_EQ(std::memcmp(narrow.data(), all.data(), n * size), 0) << count;
      ASSERT_EQ(narrow[n * size], 0x5a) << count;

      std::vector<float> wide(n + 1, -7.0f), product(n + 1, -7.0f);
      GetParam().widen(type, all.data(), wide.data(), count);
      GetParam().weighted(type, all.data(), in.data(), product.data(), count);
      ASSERT_EQ(wide[n], -7.0f) << count;
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(product[i], wide[i] * in[i]) << count << " " << i;
    }
  }
}

TEST_P(Simd, StreamingStoresTheSameBits) {
  alignas(64) static uint8_t plain[4096], streamed[4096];
  std::mt19937 random(4);
  std::vector<float> in(1000);
  for (float& x : in) x = std::normal_distribution<float>(0, 4)(random);
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    GetParam().narrow(type, in.data(), plain, 1000, false);
    GetParam().narrow(type, in.data(), streamed, 1000, true);
    EXPECT_EQ(std::memcmp(plain, streamed, 1000 * size_of(type)), 0);
  }
}

TEST_P(Simd, SumsAllLanes) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (int64_t count = 0; count <= 100; ++count) {
      std::vector<float> in(static_cast<size_t>(count));
      for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i + 1);
      std::vector<uint8_t> row(in.size() * 4 + 1);
      GetParam().narrow(type, in.data(), row.data(), count, false);
      EXPECT_EQ(GetParam().sum(type, row.data(), count),
                static_cast<float>(count * (count + 1) / 2));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Simd, ::testing::ValuesIn(kProbes),
                         [](const auto& probe) { return std::string(isa_name(probe.param.isa)); });

}  // namespace
}  // namespace ehc::probe
