#include "ehc/engram/gate.h"

#include "tests/ops/engram/shapes.h"
#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;
using test::kInf;
using test::kNan;

using Shape = test::GateShape;

// Inputs of one call, and its outputs.
struct Gate {
  Shape s;
  Array residual, key, value, weight, mask;
  Array out, dot, alpha, rstd_residual, rstd_key, mean_square;

  explicit Gate(const Shape& shape, uint32_t seed = 1)
      : s(shape),
        residual(Array::random(s.type, {s.T, s.n, s.d}, seed)),
        key(test::keys_like(residual, {s.T, s.n, s.d}, seed + 1)),
        value(Array::random(s.type, {s.T, s.d}, seed + 2)),
        weight(Array::random(DType::f32, {s.n, s.d}, seed + 3, 1.0F, 0.25F)),
        mask(DType::boolean, {s.T}),
        out(s.type, {s.T, s.n, s.d}),
        dot(DType::f32, {s.T, s.n}),
        alpha(DType::f32, {s.T, s.n}),
        rstd_residual(DType::f32, {s.T, s.n}),
        rstd_key(DType::f32, {s.T, s.n}),
        mean_square(DType::f32, {s.T}) {}

  [[nodiscard]] GateForward params() const {
    return {.residual = residual,
            .key = key,
            .value = value,
            .weight_fused = weight,
            .out = out,
            .eps = 1e-6,
            .clamp = 1e-6};
  }
  [[nodiscard]] GateForward saving() const {
    GateForward p = params();
    p.dot = dot;
    p.alpha = alpha;
    p.rstd_residual = rstd_residual;
    p.rstd_key = rstd_key;
    return p;
  }
  [[nodiscard]] GateForward statistics() const {
    GateForward p = params();
    p.out = {};
    p.mode = GateForward::Mode::stats;
    p.alpha = alpha;
    p.value_mean_square = mean_square;
    return p;
  }
  [[nodiscard]] Array packed(test::Layout layout = {}) const {
    return test::pack_kv(key, value, layout);
  }
  [[nodiscard]] std::string saved_bits() const {
    return dot.bits() + alpha.bits() + rstd_residual.bits() + rstd_key.bits();
  }
};

void run(const std::string& impl, const GateForward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  gate_fwd(context, p);
}

template <class Body>
void for_each_case(const Body& body) {
  test::for_each_case("engram.gate_fwd", test::gate_shapes(), body);
}

TEST(GateForward, EveryImplementationIsCloseToTheReference) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const Gate want(s);
    run("reference", want.saving());
    const Gate got(s);
    run(impl, got.saving());
    test::expect_close(impl, got.out, want.out, "out");
    test::expect_close(impl, got.dot, want.dot, "dot");
    test::expect_close(impl, got.alpha, want.alpha, "alpha");
    test::expect_close(impl, got.rstd_residual, want.rstd_residual, "rstd_residual");
    test::expect_close(impl, got.rstd_key, want.rstd_key, "rstd_key");
    run("reference", want.statistics());
    run(impl, got.statistics());
    test::expect_close(impl, got.mean_square, want.mean_square, "value_mean_square");
  });
}

TEST(GateForward, SavingPackingPlaceAndLayoutChangeNoBit) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const Gate plain(s);
    run(impl, plain.params());
    const std::string want = plain.out.bits();

    const Gate saving(s);
    run(impl, saving.saving());
    EXPECT_EQ(saving.out.bits(), want) << "save";

    Gate inplace(s);
    GateForward p = inplace.params();
    p.out = p.residual;
    run(impl, p);
    EXPECT_EQ(inplace.residual.bits(), want) << "in place";

    const Array kv = saving.packed({.offset = 1});
    const Array strided_residual = saving.residual.copy({.row_padding = 3, .offset = 1});
    const Array strided_out(s.type, {s.T, s.n, s.d}, {.row_padding = 5, .offset = 3});
    const Array strided_weight = saving.weight.copy({.row_padding = 1, .offset = 1});
    const Gate other(s);
    p = other.saving();
    p.key = p.value = {};
    p.kv = kv;
    p.residual = strided_residual;
    p.weight_fused = strided_weight;
    p.out = strided_out;
    run(impl, p);
    EXPECT_EQ(strided_out.bits(), want) << "packed, strided, misaligned";
    EXPECT_EQ(other.saved_bits(), saving.saved_bits()) << "packed, strided, misaligned";

    const Array separate_key = saving.key.copy({.row_padding = 7, .offset = 2});
    p = other.params();
    p.key = separate_key;
    run(impl, p);
    EXPECT_EQ(other.out.bits(), want) << "strided key";

    const Gate stats(s);
    run(impl, stats.statistics());
    EXPECT_EQ(stats.alpha.bits(), saving.alpha.bits()) << "mode stats";
  });
}

TEST(GateForward, ATokenDependsOnItselfAlone) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const Gate whole(s);
    run(impl, whole.saving());
    const Gate one(s);
    for (const int64_t t : {int64_t{0}, s.T / 2, s.T - 1}) {
      GateForward p = one.saving();
      for (Tensor* x : {&p.residual, &p.key, &p.value}) *x = x->slice(0, t, t + 1);
      for (Tensor* x : {&p.out, &p.dot, &p.alpha, &p.rstd_residual, &p.rstd_key}) {
        *x = x->slice(0, s.T - 1 - t, s.T - t);  // another position
      }
      run(impl, p);
      const int64_t at = s.T - 1 - t;
      EXPECT_EQ(one.out.bits(at, at + 1), whole.out.bits(t, t + 1)) << "token " << t;
      EXPECT_EQ(one.dot.bits(at, at + 1), whole.dot.bits(t, t + 1)) << "token " << t;
      EXPECT_EQ(one.alpha.bits(at, at + 1), whole.alpha.bits(t, t + 1)) << "token " << t;
    }
  });
}

TEST(GateForward, ThreadsChangeNoBit) {
  for (const DType type : {DType::f32, DType::bf16}) {
    Gate g({37, 4, 1000, type});
    for (const std::string& impl : implementations("engram.gate_fwd")) {
      run(impl, g.saving());
      const std::string want = g.out.bits();
      const std::string want_saved = g.saved_bits();
      for (int threads = 2; threads <= 8; ++threads) {
        for (Array* x : {&g.out, &g.dot, &g.alpha, &g.rstd_residual, &g.rstd_key}) x->fill(7);
        run(impl, g.saving(), threads);
        EXPECT_EQ(g.out.bits(), want) << impl << " " << threads;
        EXPECT_EQ(g.saved_bits(), want_saved) << impl << " " << threads;
      }
    }
  }
}

// With the saved alpha, every element of out is the rounded formula.
TEST(GateForward, ModesRoundOnce) {
  for_each_case([](const std::string& impl, const Shape& s) {
    if (impl == "reference") return;  // its alpha is a double
    const Gate g(s);
    GateForward p = g.saving();
    p.mode = GateForward::Mode::value;
    run(impl, p);
    Array want(s.type, {s.T, s.n, s.d});
    const auto expect_formula = [&](auto formula, const char* what) {
      for (int64_t i = 0; i < g.out.size(); ++i) {
        const int64_t t = i / (s.n * s.d);
        const float v = g.value.get(t * s.d + i % s.d);
        want.set(i, formula(g.residual.get(i), g.alpha.get(i / s.d), v));
      }
      EXPECT_EQ(g.out.bits(), want.bits()) << what;
    };
    expect_formula([](float, float alpha, float v) { return alpha * v; }, "value");
    run(impl, g.saving());
    expect_formula([](float x, float alpha, float v) { return std::fma(alpha, v, x); }, "add");
  });
}

TEST(GateForward, MaskedTokensPassThroughAndReadNoKv) {
  for_each_case([](const std::string& impl, const Shape& s) {
    Gate g(s);
    const Gate plain(s);
    run(impl, plain.saving());
    const auto masked = [&](int64_t t) { return t % 3 == 0; };
    for (int64_t t = 0; t < s.T; ++t) {
      if (!masked(t)) continue;
      g.mask.element<uint8_t>(t) = 1;
      for (int64_t i = 0; i < s.n * s.d; ++i) g.key.set(t * s.n * s.d + i, kNan);
      for (int64_t i = 0; i < s.d; ++i) g.value.set(t * s.d + i, kNan);
      g.residual.set(t * s.n * s.d, kNan);
    }
    const auto with_mask = [&](GateForward p) {
      p.image_token_mask = g.mask;
      return p;
    };
    for (Array* x : {&g.dot, &g.alpha, &g.rstd_residual, &g.rstd_key, &g.mean_square, &g.out}) {
      x->fill(7);
    }
    run(impl, with_mask(g.saving()));
    const std::string zeros(static_cast<size_t>(s.n) * 4, '\0');
    for (int64_t t = 0; t < s.T; ++t) {
      EXPECT_EQ(g.out.bits(t, t + 1), (masked(t) ? g.residual : plain.out).bits(t, t + 1)) << t;
      for (const auto& [got, want] : {std::pair{&g.dot, &plain.dot},
                                      {&g.alpha, &plain.alpha},
                                      {&g.rstd_residual, &plain.rstd_residual},
                                      {&g.rstd_key, &plain.rstd_key}}) {
        EXPECT_EQ(got->bits(t, t + 1), masked(t) ? zeros : want->bits(t, t + 1)) << t;
      }
    }
    const Array before = g.residual.copy();
    GateForward inplace = with_mask(g.params());
    inplace.out = inplace.residual;
    run(impl, inplace);
    EXPECT_EQ(g.residual.bits(0, 1), before.bits(0, 1)) << "in place";

    GateForward value = with_mask(g.params());
    value.mode = GateForward::Mode::value;
    run(impl, value);
    EXPECT_EQ(g.out.bits(0, 1), std::string(g.out.bits(0, 1).size(), '\0')) << "mode value";

    run(impl, with_mask(g.statistics()));
    EXPECT_EQ(g.alpha.bits(0, 1), zeros) << "mode stats";
    EXPECT_EQ(g.mean_square.get(0), 0) << "mode stats";
  });
}

TEST(GateForward, NanAndInfinityStayInTheirStream) {
  for (const std::string& impl : implementations("engram.gate_fwd")) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      for (const int64_t d : {1, 7, 96, 257}) {
        SCOPED_TRACE(impl + " " + std::string(name_of(type)) + " d=" + std::to_string(d));
        const Shape s{2, 4, d, type};
        const Gate plain(s);
        run(impl, plain.saving());
        for (const bool in_key : {false, true}) {
          for (const float bad : {kNan, kInf, -kInf}) {
            Gate g(s);
            (in_key ? g.key : g.residual).set(2 * d + d - 1, bad);  // token 0, stream 2
            run(impl, g.saving());
            for (int64_t h = 0; h < 8; ++h) {
              EXPECT_EQ(std::isnan(g.alpha.get(h)), h == 2) << h << " " << bad;
              for (int64_t i = 0; i < d; ++i) {
                EXPECT_EQ(std::isnan(g.out.get(h * d + i)), h == 2) << h << " " << bad;
              }
            }
          }
        }
        Gate g(s);
        g.value.set(d - 1, kNan);
        g.value.set(d + d - 1, -kInf);
        run(impl, g.saving());
        EXPECT_EQ(g.alpha.bits(), plain.alpha.bits());
        for (int64_t i = 0; i < g.out.size(); ++i) {
          if (i % d != d - 1) {
            EXPECT_EQ(g.out.get(i), plain.out.get(i));
          } else if (i < 4 * d) {
            EXPECT_TRUE(std::isnan(g.out.get(i)));
          } else {
            EXPECT_EQ(g.out.get(i), -kInf);
          }
        }
      }
    }
  }
}

TEST(GateForward, AZeroDotOpensTheGateByTheClamp) {
  const double above = 1 / (1 + std::exp(-1e-3));
  for (const std::string& impl : implementations("engram.gate_fwd")) {
    for (const int64_t d : {1, 7, 64, 257}) {
      for (const float x : {0.0F, -0.0F}) {
        for (const float k : {1.0F, -1.0F, 0.0F, -0.0F}) {
          Gate g({1, 1, d, DType::f32});
          g.residual.fill(x);
          g.key.fill(k);
          run(impl, g.saving());
          EXPECT_NEAR(g.alpha.get(0), above, 1e-7) << impl << " " << d << " " << x << " " << k;
          EXPECT_FALSE(std::signbit(g.dot.get(0))) << impl << " " << d << " " << x << " " << k;
        }
      }
      Gate g({1, 1, d, DType::f32});
      g.weight.fill(1);
      g.residual.fill(0);
      g.residual.set(d / 2, -1e-15F);
      g.key.fill(1e-15F);
      run(impl, g.saving());
      EXPECT_NEAR(g.alpha.get(0), 1 - above, 1e-7) << impl << " " << d;
      EXPECT_LT(g.dot.get(0), 0) << impl << " " << d;
    }
  }
}

TEST(GateForward, NoTokensTouchNothing) {
  for (const std::string& impl : implementations("engram.gate_fwd")) {
    const float weight[8] = {};
    Context context = context_for(impl, 2);
    const Tensor none(nullptr, DType::f32, {0, 2, 4});
    const Tensor saved(nullptr, DType::f32, {0, 2});
    EXPECT_EQ(error_of([&] {
                gate_fwd(context, {.residual = none,
                                   .kv = {nullptr, DType::f32, {0, 3, 4}},
                                   .weight_fused = {weight, DType::f32, {2, 4}},
                                   .out = none,
                                   .dot = saved,
                                   .alpha = saved,
                                   .rstd_residual = saved,
                                   .rstd_key = saved,
                                   .eps = 1e-6,
                                   .clamp = 1e-6});
              }),
              "none")
        << impl;
  }
}

TEST(GateForward, LeadingDimensionsAreTokens) {
  const Gate g({6, 3, 16, DType::bf16});
  run("", g.params());
  const std::string want = g.out.bits();
  GateForward p = g.params();
  for (Tensor* t : {&p.residual, &p.key, &p.out}) *t = Tensor(t->data, t->dtype, {2, 3, 3, 16});
  p.value = Tensor(p.value.data, p.value.dtype, {2, 3, 16});
  g.out.view().as<uint16_t>()[0] = 0;
  run("", p);
  EXPECT_EQ(g.out.bits(), want);
}

TEST(GateForward, RefusesWhatTheContractForbids) {
  const Gate g({3, 2, 8, DType::bf16});
  const auto refused = [&](const std::function<void(GateForward&)>& change) {
    GateForward p = g.params();
    change(p);
    return error_of([&] { run("", p); });
  };
  const Array kv = g.packed();
  EXPECT_EQ(refused([](GateForward&) {}), "none");
  EXPECT_EQ(refused([&](GateForward& p) {
              p = g.saving();
              p.out = p.residual;
            }),
            "engram.gate_fwd: tensor 'out': expected memory apart from 'residual' when statistics "
            "are saved (inplace excludes save), got the same memory");
  EXPECT_EQ(refused([&](GateForward& p) { p.alpha = g.alpha; }),
            "engram.gate_fwd: tensor 'alpha': expected none without 'dot' (saved: all four or "
            "none), got F32[3,2]");
  EXPECT_EQ(refused([&](GateForward& p) {
              p = g.saving();
              p.alpha = {};
            }),
            "engram.gate_fwd: tensor 'alpha': expected F32[T,n] beside 'dot', got none");
  EXPECT_EQ(refused([&](GateForward& p) {
              p = g.saving();
              p.rstd_key = {};
            }),
            "engram.gate_fwd: tensor 'dot': expected all or none of 'dot rstd_residual rstd_key', "
            "got 'dot', 'rstd_residual'");
  EXPECT_EQ(refused([&](GateForward& p) { p.kv = kv; }),
            "engram.gate_fwd: tensor 'kv': expected either side of 'kv | key value', got 'kv', "
            "'key', 'value'");
  EXPECT_EQ(refused([](GateForward& p) { p.value = {}; }),
            "engram.gate_fwd: tensor 'kv': expected either side of 'kv | key value', got 'key'");
  EXPECT_EQ(refused([](GateForward& p) { p.eps.reset(); }),
            "engram.gate_fwd: attribute 'eps': expected a value, got none");
  EXPECT_EQ(refused([](GateForward& p) { p.clamp = 0; }),
            "engram.gate_fwd: attribute 'clamp': expected a finite number > 0, got 0");
  EXPECT_EQ(refused([](GateForward& p) { p.out = {}; }),
            "engram.gate_fwd: tensor 'out': expected BF16[3,2,8], got none");
  EXPECT_EQ(refused([&](GateForward& p) { p.mode = GateForward::Mode::stats; }),
            "engram.gate_fwd: tensor 'out': expected no such output here (it needs "
            "mode=add|mode=value), got BF16[3,2,8]");
  EXPECT_EQ(refused([&](GateForward& p) {
              p = g.statistics();
              p.value_mean_square = {};
            }),
            "engram.gate_fwd: tensor 'value_mean_square': expected F32[3], got none");
  EXPECT_EQ(refused([](GateForward& p) { p.key.dtype = DType::f16; }),
            "engram.gate_fwd: tensor 'key': expected BF16[3,2,8], got F16[3,2,8]");
  EXPECT_EQ(refused([](GateForward& p) { p.weight_fused = p.weight_fused.slice(1, 0, 7); }),
            "engram.gate_fwd: tensor 'weight_fused': expected F32[2,8], got F32[2,7]");
  EXPECT_EQ(refused([](GateForward& p) {
              p.out = p.residual;
              p.out.data = p.out.as<uint16_t>() + 1;
            }),
            "engram.gate_fwd: tensor 'out': expected memory apart from 'residual' or exactly the "
            "same view, got overlapping memory");
}

}  // namespace
}  // namespace ehc::engram
