#include "ehc/engram/gate_bwd.h"

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

constexpr double kEps = 1e-6;
constexpr double kClamp = 1e-6;

using Shape = test::GateShape;

// Inputs of one call, and its outputs.
struct Gate {
  Shape s;
  Array grad, grad_value_path, residual, key, value, weight, mask;
  Array dot, alpha, rstd_residual, rstd_key;
  Array grad_residual, grad_key, grad_value, partial;

  explicit Gate(const Shape& shape, uint32_t seed = 1)
      : s(shape),
        grad(Array::random(s.type, {s.T, s.n, s.d}, seed + 4)),
        grad_value_path(Array::random(s.type, {s.T, s.n, s.d}, seed + 5)),
        residual(Array::random(s.type, {s.T, s.n, s.d}, seed)),
        key(test::keys_like(residual, {s.T, s.n, s.d}, seed + 1)),
        value(Array::random(s.type, {s.T, s.d}, seed + 2)),
        weight(Array::random(DType::f32, {s.n, s.d}, seed + 3, 1.0F, 0.25F)),
        mask(DType::boolean, {s.T}),
        dot(DType::f32, {s.T, s.n}),
        alpha(DType::f32, {s.T, s.n}),
        rstd_residual(DType::f32, {s.T, s.n}),
        rstd_key(DType::f32, {s.T, s.n}),
        grad_residual(s.type, {s.T, s.n, s.d}),
        grad_key(s.type, {s.T, s.n, s.d}),
        grad_value(s.type, {s.T, s.d}),
        partial(DType::f32, {gate_weight_partials(s.T), s.n, s.d}) {}

  // With a gradient of the value path of its own and without statistics.
  [[nodiscard]] GateBackward params() const {
    return {.grad_out = grad,
            .grad_value_path = grad_value_path,
            .residual = residual,
            .key = key,
            .value = value,
            .weight_fused = weight,
            .grad_residual = grad_residual,
            .grad_key = grad_key,
            .grad_value = grad_value,
            .grad_weight_partial = partial,
            .clamp = kClamp,
            .eps = kEps};
  }
  // With the statistics that the forward of `impl` saves.
  [[nodiscard]] GateBackward with_statistics(const std::string& impl) const {
    const Array out(s.type, {s.T, s.n, s.d});
    Context context = context_for(impl);
    gate_fwd(context, {.residual = residual,
                       .key = key,
                       .value = value,
                       .weight_fused = weight,
                       .out = out,
                       .dot = dot,
                       .alpha = alpha,
                       .rstd_residual = rstd_residual,
                       .rstd_key = rstd_key,
                       .eps = kEps,
                       .clamp = kClamp});
    GateBackward p = params();
    p.dot = dot;
    p.alpha = alpha;
    p.rstd_residual = rstd_residual;
    p.rstd_key = rstd_key;
    p.eps.reset();
    return p;
  }
  [[nodiscard]] std::string token_bits() const {
    return grad_residual.bits() + grad_key.bits() + grad_value.bits();
  }
  [[nodiscard]] std::string bits() const { return token_bits() + partial.bits(); }
  void spoil_outputs() {
    for (Array* x : {&grad_residual, &grad_key, &grad_value, &partial}) x->fill(7);
  }
};

void run(const std::string& impl, const GateBackward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  const Buffer workspace = test::workspace_for(context, p);
  gate_bwd(context, p);
}

template <class Body>
void for_each_case(const Body& body) {
  test::for_each_case("engram.gate_bwd", test::gate_shapes(), body);
}

// A gradient is a difference of terms that may nearly cancel (with d = 1 they do, all of them), so
// its error is measured by the size of the terms, which here is about 1.
void expect_near(const Tensor& got, const Tensor& expected, const std::string& what) {
  cli::Tolerance rule = cli::default_tolerance(expected);
  rule.abs = std::max(4 * rule.abs, 0x1p-19);
  const auto result = cli::compare(got, expected, rule, /*sum_first_axis=*/false);
  EXPECT_TRUE(result.equal) << what << ": max error " << result.max_error << ", " << result.max_ulp
                            << " ulp, failing " << result.failing << " " << result.note;
}

TEST(GateBackward, EveryImplementationIsCloseToTheReference) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const Gate want(s);
    const Gate got(s);
    for (const bool saved : {false, true}) {
      SCOPED_TRACE(saved ? "saved" : "recomputed");
      run("reference", saved ? want.with_statistics("reference") : want.params());
      run(impl, saved ? got.with_statistics("reference") : got.params());
      expect_near(got.grad_residual, want.grad_residual, "grad_residual");
      expect_near(got.grad_key, want.grad_key, "grad_key");
      expect_near(got.grad_value, want.grad_value, "grad_value");
      expect_near(got.partial, want.partial, "grad_weight_partial");
    }
  });
}

TEST(GateBackward, SavingPackingAndLayoutChangeNoBit) {
  for_each_case([](const std::string& impl, const Shape& s) {
    Gate g(s);
    run(impl, g.params());
    const std::string want = g.bits();
    g.spoil_outputs();
    run(impl, g.with_statistics(impl));
    EXPECT_EQ(g.bits(), want) << "saved statistics";

    const Array kv = test::pack_kv(g.key, g.value, {.offset = 1});
    const Array grad_kv(s.type, {s.T, s.n + 1, s.d}, {.row_padding = 1, .offset = 1});
    const Array grad = g.grad.copy({.row_padding = 2, .offset = 1});
    const Array path = g.grad_value_path.copy({.row_padding = 5, .offset = 2});
    const Array residual = g.residual.copy({.row_padding = 3, .offset = 3});
    const Array weight = g.weight.copy({.row_padding = 1, .offset = 1});
    const Array grad_residual(s.type, {s.T, s.n, s.d}, {.row_padding = 7, .offset = 5});
    const Array partial(DType::f32, {gate_weight_partials(s.T), s.n, s.d},
                        {.row_padding = 3, .offset = 1});
    GateBackward p = g.params();
    p.grad_out = grad;
    p.grad_value_path = path;
    p.residual = residual;
    p.kv = kv;
    p.weight_fused = weight;
    p.grad_residual = grad_residual;
    p.grad_kv = grad_kv;
    p.grad_weight_partial = partial;
    p.key = p.value = p.grad_key = p.grad_value = {};
    run(impl, p);
    const Array packed = test::pack_kv(g.grad_key, g.grad_value);
    EXPECT_EQ(grad_residual.bits(), g.grad_residual.bits()) << "packed, strided, misaligned";
    EXPECT_EQ(grad_kv.bits(), packed.bits()) << "packed, strided, misaligned";
    EXPECT_EQ(partial.bits(), g.partial.bits()) << "packed, strided, misaligned";

    p = g.params();
    p.grad_value_path = p.grad_out;
    run(impl, p);
    const std::string twice = g.bits();
    p.grad_value_path = {};
    g.spoil_outputs();
    run(impl, p);
    EXPECT_EQ(g.bits(), twice) << "one gradient for both paths";
  });
}

TEST(GateBackward, ATokenDependsOnItselfAlone) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const Gate whole(s);
    run(impl, whole.params());
    const Gate one(s);
    for (const int64_t t : {int64_t{0}, s.T / 2, s.T - 1}) {
      const int64_t at = s.T - 1 - t;  // another position
      GateBackward p = one.params();
      for (Tensor* x : {&p.grad_out, &p.grad_value_path, &p.residual, &p.key, &p.value}) {
        *x = x->slice(0, t, t + 1);
      }
      for (Tensor* x : {&p.grad_residual, &p.grad_key, &p.grad_value}) {
        *x = x->slice(0, at, at + 1);
      }
      p.grad_weight_partial = p.grad_weight_partial.slice(0, 0, 1);
      run(impl, p);
      EXPECT_EQ(one.grad_residual.bits(at, at + 1), whole.grad_residual.bits(t, t + 1)) << t;
      EXPECT_EQ(one.grad_key.bits(at, at + 1), whole.grad_key.bits(t, t + 1)) << t;
      EXPECT_EQ(one.grad_value.bits(at, at + 1), whole.grad_value.bits(t, t + 1)) << t;
    }
  });
}

TEST(GateBackward, ThreadsChangeNoBit) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const int64_t tokens : {37, 1200}) {
      Gate g({tokens, 4, tokens > 100 ? 33 : 1000, type});
      for (const std::string& impl : implementations("engram.gate_bwd")) {
        run(impl, g.params());
        const std::string want = g.bits();
        for (int threads = 2; threads <= 8; ++threads) {
          g.spoil_outputs();
          run(impl, g.params(), threads);
          EXPECT_EQ(g.bits(), want) << impl << " " << threads;
        }
      }
    }
  }
}

// Chunks are cut by T alone, so the chunk of a longer call gives what a call on it alone gives.
TEST(GateBackward, PartialsAreSumsOverChunks) {
  EXPECT_EQ(gate_weight_partials(0), 0);
  EXPECT_EQ(gate_weight_partials(1), 1);
  EXPECT_EQ(gate_weight_partials(8), 1);
  EXPECT_EQ(gate_weight_partials(9), 2);
  EXPECT_EQ(gate_weight_partials(1024), 128);
  EXPECT_EQ(gate_weight_partials(1025), 114);
  EXPECT_EQ(gate_weight_partials(int64_t{1} << 40), 128);
  const Gate g({20, 3, 97, DType::bf16});
  for (const std::string& impl : implementations("engram.gate_bwd")) {
    run(impl, g.params());
    ASSERT_EQ(g.partial.view().shape[0], 3);
    for (int64_t p = 0; p < 3; ++p) {
      const int64_t begin = 8 * p;
      const int64_t end = std::min<int64_t>(20, begin + 8);
      const Gate other(g.s);
      GateBackward part = other.params();
      for (Tensor* x : {&part.grad_out, &part.grad_value_path, &part.residual, &part.key,
                        &part.value, &part.grad_residual, &part.grad_key, &part.grad_value}) {
        *x = x->slice(0, begin, end);
      }
      part.grad_weight_partial = part.grad_weight_partial.slice(0, 0, 1);
      run(impl, part);
      EXPECT_EQ(other.partial.bits(0, 1), g.partial.bits(p, p + 1)) << impl << " " << p;
    }
  }
}

TEST(GateBackward, MaskedTokensPassThroughAndAreNotRead) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const Gate plain(s);
    run(impl, plain.params());
    for (const int64_t pattern : {0, 1, 2, 3}) {
      const auto masked = [&](int64_t t) {
        return pattern == 0 || (pattern == 1 ? t % 2 == 0 : pattern == 2 ? t == 0 : t == s.T - 1);
      };
      Gate g(s);
      GateBackward p = g.with_statistics(impl);
      for (int64_t t = 0; t < s.T; ++t) {
        if (!masked(t)) continue;
        g.mask.element<uint8_t>(t) = 1;
        for (Array* x : {&g.grad_value_path, &g.residual, &g.key, &g.value, &g.dot, &g.alpha,
                         &g.rstd_residual, &g.rstd_key}) {
          const int64_t row = x->size() / s.T;
          for (int64_t i = 0; i < row; ++i) x->set(t * row + i, kNan);
        }
        g.grad.set(t * s.n * s.d, kNan);
      }
      p.image_token_mask = g.mask;
      g.spoil_outputs();
      run(impl, p);
      const auto zeros = [](const std::string& like) { return std::string(like.size(), '\0'); };
      for (int64_t t = 0; t < s.T; ++t) {
        const bool m = masked(t);
        EXPECT_EQ(g.grad_residual.bits(t, t + 1), (m ? g.grad : plain.grad_residual).bits(t, t + 1))
            << pattern << " " << t;
        const std::string key = plain.grad_key.bits(t, t + 1);
        const std::string value = plain.grad_value.bits(t, t + 1);
        EXPECT_EQ(g.grad_key.bits(t, t + 1), m ? zeros(key) : key) << pattern << " " << t;
        EXPECT_EQ(g.grad_value.bits(t, t + 1), m ? zeros(value) : value) << pattern << " " << t;
      }
      if (pattern == 0) {
        EXPECT_EQ(g.partial.bits(), zeros(g.partial.bits()));
      }
      for (int64_t i = 0; i < g.partial.size(); ++i) EXPECT_TRUE(std::isfinite(g.partial.get(i)));

      const std::string saved = g.bits();
      p.dot = p.alpha = p.rstd_residual = p.rstd_key = {};
      p.eps = kEps;
      run(impl, p);
      EXPECT_EQ(g.bits(), saved) << "recomputed, " << pattern;
    }
  });
}

TEST(GateBackward, NanAndInfinityStayInTheirStream) {
  for (const std::string& impl : implementations("engram.gate_bwd")) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      for (const int64_t d : {7, 96, 257}) {
        SCOPED_TRACE(impl + " " + std::string(name_of(type)) + " d=" + std::to_string(d));
        for (const bool in_key : {false, true}) {
          for (const float bad : {kNan, kInf, -kInf}) {
            Gate g({2, 4, d, type});
            (in_key ? g.key : g.residual).set(2 * d + d - 1, bad);  // token 0, stream 2
            run(impl, g.params());
            for (int64_t h = 0; h < 8; ++h) {
              for (int64_t i = 0; i < d; ++i) {
                EXPECT_EQ(std::isnan(g.grad_residual.get(h * d + i)), h == 2) << h << " " << bad;
                EXPECT_EQ(std::isnan(g.grad_key.get(h * d + i)), h == 2) << h << " " << bad;
              }
            }
            for (int64_t i = 0; i < d; ++i) {
              EXPECT_TRUE(std::isnan(g.grad_value.get(i)));
              EXPECT_FALSE(std::isnan(g.grad_value.get(d + i)));
            }
            for (int64_t i = 0; i < 4 * d; ++i) {
              EXPECT_EQ(std::isnan(g.partial.get(i)), i / d == 2) << i;
            }
          }
        }
      }
    }
  }
}

// Where the clamp is flat, and at a dot of zero, only the identity and the value path are left.
TEST(GateBackward, TheFlatClampStopsTheGradient) {
  for (const std::string& impl : implementations("engram.gate_bwd")) {
    for (const bool zero : {false, true}) {
      Gate g({3, 2, 40, DType::f32});
      if (zero) g.key.fill(0);
      GateBackward p = g.params();
      p.clamp = zero ? 1e-30 : 100;
      run(impl, p);
      EXPECT_EQ(g.grad_residual.bits(), g.grad.bits()) << impl;
      for (int64_t i = 0; i < g.grad_key.size(); ++i) EXPECT_EQ(g.grad_key.get(i), 0) << impl;
      for (int64_t i = 0; i < g.partial.size(); ++i) EXPECT_EQ(g.partial.get(i), 0) << impl;
      EXPECT_NE(g.grad_value.get(0), 0) << impl;
    }
  }
}

// Rows so small that q / |D| is beyond fp32, though the slope is not.
TEST(GateBackward, TinyRowsDoNotOverflow) {
  for (const std::string& impl : implementations("engram.gate_bwd")) {
    Gate g({2, 2, 16, DType::f32});
    for (int64_t i = 0; i < g.residual.size(); ++i) {
      g.residual.set(i, g.residual.get(i) * 1e-14F);
      g.key.set(i, g.key.get(i) * 1e-14F);
    }
    const Gate want(g.s);
    GateBackward p = g.params();
    p.eps = 1e-37;
    run("reference", p);
    const Array residual = g.grad_residual.copy();
    const Array key = g.grad_key.copy();
    run(impl, p);
    test::expect_close(impl, g.grad_residual, residual, "grad_residual");
    test::expect_close(impl, g.grad_key, key, "grad_key");
    EXPECT_TRUE(std::isfinite(g.grad_key.get(0)));
    EXPECT_GT(std::fabs(g.grad_key.get(0)), 1e6F);
  }
}

TEST(GateBackward, NoTokensTouchNothing) {
  for (const std::string& impl : implementations("engram.gate_bwd")) {
    const float weight[8] = {};
    Context context = context_for(impl, 2);
    const Tensor none(nullptr, DType::f32, {0, 2, 4});
    const Tensor kv(nullptr, DType::f32, {0, 3, 4});
    EXPECT_EQ(error_of([&] {
                gate_bwd(context, {.grad_out = none,
                                   .residual = none,
                                   .kv = kv,
                                   .weight_fused = {weight, DType::f32, {2, 4}},
                                   .grad_residual = none,
                                   .grad_kv = kv,
                                   .grad_weight_partial = none,
                                   .clamp = kClamp,
                                   .eps = kEps});
              }),
              "none")
        << impl;
  }
}

TEST(GateBackward, LeadingDimensionsAreTokens) {
  Gate g({6, 3, 16, DType::bf16});
  run("", g.params());
  const std::string want = g.bits();
  g.spoil_outputs();
  GateBackward p = g.params();
  for (Tensor* t :
       {&p.grad_out, &p.grad_value_path, &p.residual, &p.key, &p.grad_residual, &p.grad_key}) {
    *t = Tensor(t->data, t->dtype, {2, 3, 3, 16});
  }
  for (Tensor* t : {&p.value, &p.grad_value}) *t = Tensor(t->data, t->dtype, {2, 3, 16});
  run("", p);
  EXPECT_EQ(g.bits(), want);
}

TEST(GateBackward, RefusesWhatTheContractForbids) {
  const Gate g({9, 2, 8, DType::bf16});
  const auto refused = [&](const std::function<void(GateBackward&)>& change) {
    GateBackward p = g.params();
    change(p);
    return error_of([&] { run("", p); });
  };
  EXPECT_EQ(refused([](GateBackward&) {}), "none");
  EXPECT_EQ(refused([](GateBackward& p) { p.eps.reset(); }),
            "engram.gate_bwd: attribute 'eps': expected a value without 'dot', got none");
  EXPECT_EQ(refused([](GateBackward& p) { p.clamp.reset(); }),
            "engram.gate_bwd: attribute 'clamp': expected a value, got none");
  EXPECT_EQ(refused([&](GateBackward& p) { p.dot = g.dot; }),
            "engram.gate_bwd: tensor 'dot': expected all or none of 'dot alpha rstd_residual "
            "rstd_key', got 'dot'");
  EXPECT_EQ(refused([](GateBackward& p) {
              p.grad_weight_partial = p.grad_weight_partial.slice(0, 0, 1);
            }),
            "engram.gate_bwd: tensor 'grad_weight_partial': expected F32[2,2,8], got F32[1,2,8]");
  EXPECT_EQ(refused([](GateBackward& p) { p.grad_key = {}; }),
            "engram.gate_bwd: tensor 'grad_key': expected BF16[9,2,8], got none");
  EXPECT_EQ(refused([](GateBackward& p) { p.grad_residual = p.grad_out; }),
            "engram.gate_bwd: tensor 'grad_residual': expected memory apart from 'grad_out', got "
            "overlapping memory");
}

}  // namespace
}  // namespace ehc::engram
