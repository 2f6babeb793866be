#include "ehc/mhc/prenorm_gemm.h"

#include <algorithm>

#include "ehc/mhc/reduce_partials.h"
#include "tests/ops/mhc/mix_support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::error_of;
using test::implementations;
using test::kInf;
using test::kNan;
using test::Layout;

struct Projection {
  int64_t T, n, d, M, splits, groups;
  DType type;
  Precision precision = Precision::fp32;
  Array residual, fn, mul, sqr;

  Projection(int64_t tokens, int64_t streams, int64_t hidden, int64_t mixes, DType activation,
             int64_t split_count = 0, int64_t group_count = 1, Layout layout = {})
      : T(tokens),
        n(streams),
        d(hidden),
        M(mixes),
        splits(split_count),
        groups(group_count),
        type(activation),
        residual(Array::random(type, {T, n, d}, 1).copy(layout)),
        fn(Array::random(DType::f32, {M, n * d}, 2).copy(layout)),
        mul(DType::f32, shape(true), layout),
        sqr(DType::f32, shape(false), layout) {}

  [[nodiscard]] int64_t S() const { return splits > 0 ? splits : prenorm_splits(T, n * d); }
  [[nodiscard]] std::vector<int64_t> shape(bool with_mixes) const {
    std::vector<int64_t> dims = {S(), T};
    if (groups > 1) dims.push_back(groups);
    if (with_mixes) dims.push_back(M);
    return dims;
  }
  [[nodiscard]] PrenormGemm params() const {
    return {.residual = residual,
            .fn = fn,
            .mul_partial = mul,
            .sqr_partial = sqr,
            .splits = splits,
            .groups = groups,
            .precision = precision};
  }
  void run(const std::string& impl, int threads = 1) const {
    test::run_on(
        impl, [](Context& c, const auto& p) { prenorm_gemm(c, p); }, params(), threads);
  }
  [[nodiscard]] std::string bits() const { return mul.bits() + sqr.bits(); }
  // Bits of the sums over splits.
  [[nodiscard]] std::string reduced_bits(const std::string& impl) const {
    const Array mixes(DType::f32, {T, M});
    const Array sums(DType::f32, {T, M});
    const Array squares(DType::f32, {T});
    Context context = test::context_for(impl == "cpu.amx" ? "cpu.avx512bf16" : impl);
    reduce_partials_fwd(context, {.mul_partial = mul,
                                  .sqr_partial = sqr,
                                  .mixes = mixes,
                                  .mul = sums,
                                  .sqr = squares,
                                  .k = n * d,
                                  .norm_eps = 1e-6});
    return sums.bits() + squares.bits();
  }
};

std::vector<std::string> kernels(DType type = DType::bf16) {
  return implementations("mhc.prenorm_gemm", type);
}

// The columns of each split and group by the rule of the contract for a given S, in double.
TEST(PrenormGemm, SplitsAndGroupsIntersect) {
  for (const auto& [n, d, S, G] : {std::tuple<int, int, int, int>{4, 100, 3, 1},
                                   {4, 100, 3, 4},
                                   {2, 300, 7, 3},
                                   {3, 7, 16, 7},
                                   {4, 1030, 5, 8}}) {
    for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
      const Projection p(3, n, d, 5, type, S, G);
      const int64_t K = static_cast<int64_t>(n) * d;
      const int64_t blocks = (K + 63) / 64;
      for (const std::string& impl : kernels(type)) {
        p.run(impl);
        int64_t begin = 0;
        for (int64_t s = 0; s < S; ++s) {
          const int64_t end = std::min(K, begin + (blocks / S + (s < blocks % S ? 1 : 0)) * 64);
          for (int64_t at = 0; at < 3 * G; ++at) {
            const int64_t t = at / G;
            const int64_t first = std::max(begin, at % G * (K / G));
            const int64_t last = std::min(end, (at % G + 1) * (K / G));
            double squares = 0;
            for (int64_t k = first; k < last; ++k) {
              squares += std::pow(p.residual.get(t * K + k), 2);
            }
            // Plain loops add serially, which costs more.
            const double share = impl == "reference.f32" ? 1e-5 : 5e-7;
            EXPECT_NEAR(p.sqr.get(s * 3 * G + at), squares, share * squares) << impl;
            for (int64_t j = 0; j < 5; ++j) {
              double sum = 0;
              double size = 0;
              for (int64_t k = first; k < last; ++k) {
                const double term =
                    static_cast<double>(p.residual.get(t * K + k)) * p.fn.get(j * K + k);
                sum += term;
                size += std::fabs(term);
              }
              EXPECT_NEAR(p.mul.get((s * 3 * G + at) * 5 + j), sum, share * size) << impl;
            }
          }
          begin = end;
        }
      }
    }
  }
}

// One token alone is cut into more splits than many tokens: the sums have the same bits.
TEST(PrenormGemm, ATokenDependsOnItselfAlone) {
  for (const auto& [n, d] : {std::pair<int, int>{4, 1300}, {4, 515}, {3, 64}}) {
    for (const DType type : {DType::bf16, DType::f32}) {
      for (const std::string& impl : kernels(type)) {
        if (impl == "cpu.generic" || impl.starts_with("reference")) continue;  // slow
        const Projection many(1031, n, d, 24, type);
        many.run(impl, 2);
        const std::string whole = many.reduced_bits(impl);
        for (const int64_t t : {0, 1, 100, 1030}) {
          Projection one(1, n, d, 24, type);
          for (int64_t k = 0; k < n * d; ++k) one.residual.set(k, many.residual.get(t * n * d + k));
          EXPECT_EQ(many.S() < one.S(), d > 64);
          one.run(impl);
          const std::string alone = one.reduced_bits(impl);
          const auto at = static_cast<size_t>(t);
          EXPECT_EQ(alone.substr(0, 96), whole.substr(at * 96, 96)) << impl << " " << t;
          EXPECT_EQ(alone.substr(96), whole.substr(1031 * 96 + at * 4, 4)) << impl << " " << t;
        }
      }
    }
  }
}

// A given number of splits that is a power of two of whole chunks is a cut of the same tree.
TEST(PrenormGemm, SplitsAreNodesOfOneTree) {
  for (const std::string& impl : kernels()) {
    if (impl.starts_with("reference")) continue;  // adds serially
    const Projection automatic(5, 4, 512, 24, DType::bf16);
    automatic.run(impl);
    for (const int64_t splits : {1, 2, 4}) {
      const Projection given(5, 4, 512, 24, DType::bf16, splits);
      given.run(impl);
      EXPECT_EQ(given.reduced_bits(impl), automatic.reduced_bits(impl)) << impl << " " << splits;
    }
  }
}

TEST(PrenormGemm, ThreadsAndLayoutsChangeNoBit) {
  for (const auto& [T, n, d, M, S, G] :
       {std::tuple<int, int, int, int, int, int>{70, 4, 257, 24, 0, 1},
        {3, 4, 1100, 24, 0, 1},
        {33, 3, 96, 15, 5, 3},
        {2, 8, 70, 80, 0, 4}}) {
    for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
      for (const std::string& impl : kernels(type)) {
        const Projection p(T, n, d, M, type, S, G);
        p.run(impl);
        for (const int threads : {2, 3, 8}) {
          const Projection other(T, n, d, M, type, S, G);
          other.run(impl, threads);
          EXPECT_EQ(other.bits(), p.bits()) << impl << " " << threads;
        }
        for (const Layout& layout : test::kLayouts) {
          const Projection other(T, n, d, M, type, S, G, layout);
          other.run(impl);
          EXPECT_EQ(other.bits(), p.bits()) << impl << " " << layout.row_padding;
        }
      }
    }
  }
}

// Only fn is rounded, and before it meets anything.
TEST(PrenormGemm, Tf32RoundsFnAlone) {
  EXPECT_EQ(round_to_tf32(1 + 0x1p-11F), 1);                 // half, to even
  EXPECT_EQ(round_to_tf32(1 + 0x3p-11F), 1 + 0x1p-9F);       // half, to even
  EXPECT_EQ(round_to_tf32(1 + 0x1.002p-11F), 1 + 0x1p-10F);  // above half
  EXPECT_EQ(round_to_tf32(std::numeric_limits<float>::max()), kInf);
  EXPECT_EQ(round_to_tf32(-kInf), -kInf);
  EXPECT_TRUE(std::isnan(round_to_tf32(float_from_bits(0x7f800001))));
  for (const DType type : {DType::bf16, DType::f32}) {
    for (const std::string& impl : kernels(type)) {
      Projection rounded(5, 4, 160, 24, type);
      Projection plain(5, 4, 160, 24, type);
      rounded.precision = Precision::tf32;
      for (int64_t i = 0; i < plain.fn.size(); ++i) {
        plain.fn.set(i, round_to_tf32(plain.fn.get(i)));
      }
      rounded.run(impl);
      plain.run(impl);
      EXPECT_EQ(rounded.bits(), plain.bits()) << impl;
    }
  }
}

TEST(PrenormGemm, AutomaticSplitsArePowersOfTwo) {
  EXPECT_EQ(prenorm_splits(8192, 28672), 1);
  EXPECT_EQ(prenorm_splits(4096, 28672), 2);
  EXPECT_EQ(prenorm_splits(1, 28672), 64);
  EXPECT_EQ(prenorm_splits(1, 512), 1);
  for (int64_t T = 0; T < 9000; T += 61) {
    for (const int64_t K : {1, 513, 5120, 57344}) {
      const int64_t S = prenorm_splits(T, K);
      EXPECT_GE(S, 1);
      EXPECT_EQ(S & (S - 1), 0) << T << " " << K;
    }
  }
}

// More splits than blocks: those without columns are zeros, whatever stood there.
TEST(PrenormGemm, EmptySplitsAreZeros) {
  for (const std::string& impl : kernels()) {
    Projection p(2, 2, 40, 3, DType::bf16, 9);
    p.mul.fill(7);
    p.sqr.fill(7);
    p.run(impl);
    for (int64_t s = 0; s < 9; ++s) {
      for (int64_t t = 0; t < 2; ++t) EXPECT_EQ(p.sqr.get(s * 2 + t) == 0, s >= 2) << impl << s;
      for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(p.mul.get(s * 6 + i) == 0, s >= 2) << impl << s;
    }
  }
}

TEST(PrenormGemm, NanAndInfinityStayInTheirToken) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const float bad : {kNan, kInf}) {
      Projection p(3, 4, 50, 24, type, 1);
      p.residual.set(200 + 130, bad);
      for (const std::string& impl : kernels(type)) {
        p.run(impl);
        for (int64_t i = 0; i < 72; ++i) {
          EXPECT_EQ(std::isfinite(p.mul.get(i)), i / 24 != 1) << impl;
        }
        for (int64_t t = 0; t < 3; ++t) {
          EXPECT_EQ(std::isfinite(p.sqr.get(t)), t != 1) << impl;
          EXPECT_EQ(std::isnan(p.sqr.get(t)), t == 1 && std::isnan(bad)) << impl;
        }
      }
    }
  }
}

// The product of three bf16 parts of fn in the order of the tile unit: those of even columns and of
// odd ones, 16 a step, then both and the sum of the steps before.
bool has_tiles() {
  const std::vector<std::string> names = kernels();
  return std::find(names.begin(), names.end(), "cpu.amx") != names.end();
}

TEST(PrenormGemm, TilesGiveTheBitsOfTheFormula) {
  if (!has_tiles()) GTEST_SKIP() << "not on this processor, or not in this build";
  constexpr int64_t kColumns = 4 * 75;
  for (const int64_t T : {1, 16, 17, 40}) {  // as single and as paired tiles
    for (const int64_t M : {1, 8, 24}) {
      const Projection p(T, 4, 75, M, DType::bf16, 1);
      p.run("cpu.amx");
      for (int64_t at = 0; at < T * M; ++at) {
        const int64_t t = at / M;
        const int64_t j = at % M;
        float parts[3] = {};
        for (int64_t k = 0; k < kColumns; k += 32) {
          float sums[3][2] = {};
          for (int64_t c = k; c < std::min(k + 32, kColumns); ++c) {
            float rest = p.fn.get(j * kColumns + c);
            for (int i = 0; i < 3; ++i) {
              const float upper = float_from_bits(float_bits(rest) & 0xffff0000U);
              sums[i][c % 2] = std::fma(upper, p.residual.get(t * kColumns + c), sums[i][c % 2]);
              rest = (rest - upper) * (i == 0 ? 0x1p7F : 0x1p8F);
            }
          }
          for (int i = 0; i < 3; ++i) parts[i] += sums[i][0] + sums[i][1];
        }
        const float sum = std::fma(0x1p-7F, std::fma(0x1p-8F, parts[2], parts[1]), parts[0]);
        ASSERT_EQ(p.mul.get(at), sum) << T << " " << M << " " << at;
      }
    }
  }
}

// fn is exact on tiles down to its last bit, from 2^-118 on.
TEST(PrenormGemm, TilesKeepEveryBitOfFn) {
  if (!has_tiles()) GTEST_SKIP() << "not on this processor, or not in this build";
  Projection p(1, 1, 2, 8, DType::bf16, 1);
  p.residual.set(0, 1);
  p.residual.set(1, 0);
  const float values[] = {
      1 + 0x1p-23F, 0x1.fffffep127F, -0x1.fffffep-118F, 0x1.000002p-118F, kInf, -kInf, kNan, 0};
  for (int64_t j = 0; j < 8; ++j) p.fn.set(2 * j, values[j]);
  p.run("cpu.amx");
  for (int64_t j = 0; j < 8; ++j) {
    EXPECT_TRUE(p.mul.get(j) == values[j] || (std::isnan(values[j]) && std::isnan(p.mul.get(j))))
        << p.mul.get(j) << " " << values[j];
  }
  p.fn.set(12, float_from_bits(0x7f800001));  // NaN by its lowest bit alone
  p.run("cpu.amx");
  EXPECT_TRUE(std::isnan(p.mul.get(6)));
}

// Normalising before the product is as good in fp32, and breaks when the normalised streams are
// rounded to bf16: so the norm comes after (pitfall P15).
TEST(PrenormGemm, ABf16IntermediateWouldLoseTheMixes) {
  const Projection p(4, 4, 512, 24, DType::bf16, 1);
  constexpr int64_t kColumns = 2048;
  std::vector<double> exact;
  std::vector<double> single;
  std::vector<double> rounded;
  for (int64_t t = 0; t < p.T; ++t) {
    double squares = 0;
    for (int64_t k = 0; k < kColumns; ++k) {
      squares += std::pow(p.residual.get(t * kColumns + k), 2);
    }
    const double r = 1 / std::sqrt(squares / kColumns + 1e-6);
    for (int64_t j = 0; j < p.M; ++j) {
      double sums[3] = {};
      for (int64_t k = 0; k < kColumns; ++k) {
        const double x = p.residual.get(t * kColumns + k) * r;
        const double factor = p.fn.get(j * kColumns + k);
        const auto narrow = static_cast<float>(x);
        sums[0] += x * factor;
        sums[1] += narrow * factor;
        sums[2] += bf16_to_float(float_to_bf16(narrow)) * factor;
      }
      exact.push_back(sums[0]);
      single.push_back(sums[1]);
      rounded.push_back(sums[2]);
    }
  }
  double scale = 0;
  for (const double x : exact) scale = std::max(scale, std::fabs(x));
  const auto error = [&](const auto& got) {
    double largest = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      largest = std::max(largest, std::fabs(got(i) - exact[i]));
    }
    return largest / scale;
  };
  EXPECT_LT(error([&](size_t i) { return single[i]; }), 1e-6);
  EXPECT_GT(error([&](size_t i) { return rounded[i]; }), 3e-4);
  for (const std::string& impl : kernels()) {
    p.run(impl);
    const auto after = [&](size_t i) {
      const auto at = static_cast<int64_t>(i);
      const double mean = p.sqr.get(at / p.M) / static_cast<double>(kColumns);
      return p.mul.get(at) / std::sqrt(mean + 1e-6);
    };
    EXPECT_LT(error(after), impl == "reference.f32" ? 1e-5 : 1e-6) << impl;
  }
}

TEST(PrenormGemm, TilesRefuseOtherTypes) {
  if (!has_tiles()) GTEST_SKIP() << "not on this processor, or not in this build";
  for (const DType type : {DType::f16, DType::f32}) {
    const Projection p(1, 1, 2, 8, type, 1);
    try {
      p.run("cpu.amx");
      FAIL();
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(),
                   "mhc.prenorm_gemm: no implementation on cpu takes this call; cpu.amx refused: "
                   "tiles of amx multiply BF16 activations alone");
    }
  }
}

TEST(PrenormGemm, RefusesWhatTheContractForbids) {
  const Projection p(3, 4, 30, 24, DType::bf16);
  Context context = Context::cpu(1);
  const auto refused = [&](const std::function<void(PrenormGemm&)>& change) {
    PrenormGemm params = p.params();
    change(params);
    return error_of([&] { prenorm_gemm(context, params); });
  };
  const Array narrow(DType::f32, {24, 119});
  EXPECT_EQ(refused([&](PrenormGemm& q) { q.fn = narrow; }),
            "mhc.prenorm_gemm: tensor 'fn': expected F32[24,120], got F32[24,119]");
  const Array wide(DType::f32, {81, 120});
  EXPECT_EQ(refused([&](PrenormGemm& q) { q.fn = wide; }),
            "mhc.prenorm_gemm: tensor 'fn': expected M in [1,80], got F32[81,120]");
  EXPECT_EQ(refused([](PrenormGemm& q) { q.splits = 1025; }),
            "mhc.prenorm_gemm: attribute 'splits': expected in [0,1024], got 1025");
  EXPECT_EQ(refused([](PrenormGemm& q) { q.splits = 3; }),
            "mhc.prenorm_gemm: tensor 'mul_partial': expected F32[3,3,24], got F32[1,3,24]");
  EXPECT_EQ(refused([](PrenormGemm& q) { q.groups = 7; }),
            "mhc.prenorm_gemm: attribute 'groups': expected a divisor of K = 120, got 7");
  EXPECT_EQ(refused([](PrenormGemm& q) { q.groups = 2; }),
            "mhc.prenorm_gemm: tensor 'mul_partial': expected F32[1,3,2,24], got F32[1,3,24]");
  const Array grouped(DType::f32, {1, 3, 1, 24});
  EXPECT_EQ(refused([&](PrenormGemm& q) { q.mul_partial = grouped; }),
            "mhc.prenorm_gemm: tensor 'mul_partial': expected F32[1,3,24], got F32[1,3,1,24]");
  for (const int64_t n : {0, 9}) {
    const Array residual(DType::bf16, {3, n, 30});
    EXPECT_EQ(refused([&](PrenormGemm& q) { q.residual = residual; }),
              "mhc.prenorm_gemm: tensor 'residual': expected n in [1,8], got BF16[3," +
                  std::to_string(n) + ",30]");
  }
  EXPECT_EQ(
      refused([](PrenormGemm&) {}).rfind("mhc.prenorm_gemm: workspace: expected at least ", 0), 0U);
}

}  // namespace
}  // namespace ehc::mhc
