#include "ehc/engram/conv_bwd.h"

#include "ehc/engram/conv.h"
#include "ehc/memory.h"
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

using Shape = test::ConvShape;

struct ConvGrad {
  Shape s;
  Array grad, value, weight, norm, mask, borders;
  Array grad_value, grad_weight, grad_norm;

  explicit ConvGrad(const Shape& shape, const std::vector<int32_t>& cu_seqlens = {},
                    uint32_t seed = 1)
      : s(shape),
        grad(Array::random(s.type, {s.T, s.n, s.d}, seed + 3)),
        value(Array::random(s.type, {s.T, s.n, s.d}, seed)),
        weight(Array::random(s.weight_type, {s.n, s.d, s.w}, seed + 1, 0, 0.5F)),
        norm(Array::random(s.norm_type, {s.n, s.d}, seed + 2, 1, 0.25F)),
        mask(DType::boolean, {s.T}),
        borders(test::borders_of(cu_seqlens)),
        grad_value(s.type, {s.T, s.n, s.d}),
        grad_weight(DType::f32, {s.n, s.d, s.w}),
        grad_norm(DType::f32, {s.n, s.d}) {}

  [[nodiscard]] ConvBackward params() const {
    return {.grad_out = grad,
            .gated_value = value,
            .conv_weight = weight,
            .conv_norm_weight = norm,
            .cu_seqlens = borders.size() > 0 ? Tensor(borders) : Tensor(),
            .image_token_mask = mask,
            .grad_gated_value = grad_value,
            .grad_conv_weight = grad_weight,
            .grad_conv_norm_weight = grad_norm,
            .dilation = s.dilation,
            .conv_eps = 1e-5};
  }
  void mask_every(int64_t period) {
    for (int64_t t = 1; t < s.T; t += period) {
      mask.element<uint8_t>(t) = 1;
      fill_token(t, kNan);
    }
  }
  void fill_token(int64_t t, float x) {
    for (int64_t i = t * s.n * s.d; i < (t + 1) * s.n * s.d; ++i) {
      value.set(i, x);
      grad.set(i, x);
    }
  }
  [[nodiscard]] std::string weight_bits() const { return grad_weight.bits() + grad_norm.bits(); }
  [[nodiscard]] std::string bits() const { return grad_value.bits() + weight_bits(); }
};

void run(const std::string& impl, const ConvBackward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  const Buffer workspace = test::workspace_for(context, p);
  conv_bwd(context, p);
}

template <class Body>
void for_each_case(const Body& body) {
  test::for_each_case("engram.conv_bwd", test::conv_shapes(), body);
}

TEST(ConvBackward, EveryImplementationIsCloseToTheReference) {
  for_each_case([](const std::string& impl, const Shape& s) {
    for (const int64_t masked : {int64_t{1000}, int64_t{4}}) {
      ConvGrad want(s, test::thirds(s.T));
      ConvGrad got(s, test::thirds(s.T));
      want.mask_every(masked);
      got.mask_every(masked);
      run("reference", want.params());
      run(impl, got.params());
      test::expect_similar(got.grad_value, want.grad_value, "grad_gated_value");
      test::expect_similar(got.grad_weight, want.grad_weight, "grad_conv_weight");
      test::expect_similar(got.grad_norm, want.grad_norm, "grad_conv_norm_weight");
    }
  });
}

// sum(grad * conv_fwd) by the reference.
double loss(const ConvGrad& g) {
  const Array out(g.s.type, {g.s.T, g.s.n, g.s.d});
  const ConvForward p = {.gated_value = g.value,
                         .conv_weight = g.weight,
                         .conv_norm_weight = g.norm,
                         .cu_seqlens = g.borders,
                         .image_token_mask = g.mask,
                         .out = out,
                         .dilation = g.s.dilation,
                         .conv_eps = 1e-5};
  Context context = context_for("reference");
  const Buffer workspace = test::workspace_for(context, p);
  conv_fwd(context, p);
  double sum = 0;
  for (int64_t i = 0; i < out.size(); ++i) {
    if (g.mask.element<uint8_t>(i / (g.s.n * g.s.d)) == 0) {
      sum += static_cast<double>(out.get(i)) * g.grad.get(i);
    }
  }
  return sum;
}

TEST(ConvBackward, EqualsFiniteDifferences) {
  const Shape s{11, 2, 5, 3, 2, DType::f32, DType::f32, DType::f32};
  ConvGrad g(s, {0, 7, 11});
  g.mask_every(6);
  const auto expect_slopes = [&](Array& input, const Array& gradient, const char* what) {
    test::expect_slopes(
        "engram.conv_bwd", input, gradient, [&](const std::string& impl) { run(impl, g.params()); },
        [&] { return loss(g); }, what);
  };
  expect_slopes(g.value, g.grad_value, "gated_value");
  expect_slopes(g.weight, g.grad_weight, "conv_weight");
  expect_slopes(g.norm, g.grad_norm, "conv_norm_weight");
}

TEST(ConvBackward, LayoutAndThreadsChangeNoBit) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const ConvGrad plain(s);
    run(impl, plain.params());
    for (const int threads : {2, 3, 8}) {
      const ConvGrad many(s);
      run(impl, many.params(), threads);
      EXPECT_EQ(many.bits(), plain.bits()) << threads << " threads";
    }
    const Array grad = plain.grad.copy({.row_padding = 1, .offset = 7});
    const Array value = plain.value.copy({.row_padding = 3, .offset = 1});
    const Array weight = plain.weight.copy({.row_padding = 2, .offset = 1});
    const Array norm = plain.norm.copy({.row_padding = 1, .offset = 3});
    const Array grad_value(s.type, {s.T, s.n, s.d}, {.row_padding = 7, .offset = 5});
    const Array grad_weight(DType::f32, {s.n, s.d, s.w}, {.row_padding = 1, .offset = 1});
    const Array grad_norm(DType::f32, {s.n, s.d}, {.row_padding = 4, .offset = 9});
    ConvBackward p = plain.params();
    p.grad_out = grad;
    p.gated_value = value;
    p.conv_weight = weight;
    p.conv_norm_weight = norm;
    p.grad_gated_value = grad_value;
    p.grad_conv_weight = grad_weight;
    p.grad_conv_norm_weight = grad_norm;
    run(impl, p, 2);
    EXPECT_EQ(grad_value.bits() + grad_weight.bits() + grad_norm.bits(), plain.bits());
  });
}

// Several chunks of tokens and several runs in each, for tiles and token by token.
TEST(ConvBackward, ChunksOnManyThreadsChangeNoBit) {
  for (const std::string& impl : implementations("engram.conv_bwd")) {
    if (impl.rfind("reference", 0) == 0) continue;
    for (const int64_t dilation : {int64_t{3}, int64_t{50}}) {
      const Shape s{300, 2, 96, 4, dilation, DType::bf16, DType::bf16, DType::bf16};
      ConvGrad one(s, {0, 100, 101, 250, 300});
      one.mask_every(17);
      run(impl, one.params());
      for (int threads = 2; threads <= 8; threads += dilation == 3 ? 1 : 3) {
        ConvGrad many(s, {0, 100, 101, 250, 300});
        many.mask_every(17);
        run(impl, many.params(), threads);
        EXPECT_EQ(many.bits(), one.bits()) << impl << " " << threads;
      }
    }
  }
}

// A sequence has the same gradients alone and anywhere in a batch, whatever the others hold; the
// borders of chunks and runs lie elsewhere in it then.
TEST(ConvBackward, ASequenceDependsOnItselfAlone) {
  for (const std::string& impl : implementations("engram.conv_bwd")) {
    for (const Shape& of : test::conv_shapes()) {
      if (of.d > 300 || of.dilation > 50) continue;
      Shape s = of;
      s.T = 260;
      s.n = std::min<int64_t>(s.n, 2);
      const int64_t begin = 37, end = 230;
      ConvGrad batch(s, {0, begin, end, static_cast<int32_t>(s.T)});
      for (int64_t t = begin + 5; t < end; t += 23) batch.mask.element<uint8_t>(t) = 1;
      batch.fill_token(begin - 1, kNan);
      batch.fill_token(end, kInf);
      run(impl, batch.params(), 2);
      const std::string in_batch = batch.grad_value.bits(begin, end);
      ConvBackward p = batch.params();
      p.cu_seqlens = {};
      for (Tensor* t : {&p.grad_out, &p.gated_value, &p.grad_gated_value, &p.image_token_mask}) {
        *t = t->slice(0, begin, end);
      }
      run(impl, p);
      EXPECT_EQ(batch.grad_value.bits(begin, end), in_batch) << impl << " " << s;
    }
  }
}

TEST(ConvBackward, ZeroTapsStillHaveAGradient) {
  for_each_case([](const std::string& impl, const Shape& s) {
    ConvGrad g(s);
    g.weight.fill(0);
    run(impl, g.params());
    EXPECT_EQ(g.grad_value.bits(), g.grad.bits());
    // The current token's tap meets every token: sum of G u / 2.
    for (int64_t h = 0; h < s.n; ++h) {
      for (const int64_t i : {int64_t{0}, s.d - 1}) {
        double want = 0;
        for (int64_t t = 0; t < s.T; ++t) {
          double squares = 0;
          for (int64_t k = 0; k < s.d; ++k) {
            const double v = g.value.get((t * s.n + h) * s.d + k);
            squares += v * v;
          }
          const int64_t at = (t * s.n + h) * s.d + i;
          want += 0.5 * g.grad.get(at) * g.value.get(at) /
                  std::sqrt(squares / static_cast<double>(s.d) + 1e-5) * g.norm.get(h * s.d + i);
        }
        EXPECT_NEAR(g.grad_weight.get((h * s.d + i) * s.w + s.w - 1), want,
                    1e-4 + 1e-5 * std::fabs(want));
      }
    }
  });
}

// Masked rows are not read and have no gradient; the others see a row of zeros that nobody asks
// about.
TEST(ConvBackward, MaskedTokensHaveNoPart) {
  for_each_case([](const std::string& impl, const Shape& s) {
    ConvGrad masked(s);
    ConvGrad zeroed(s);
    masked.mask_every(3);
    for (int64_t t = 1; t < s.T; t += 3) zeroed.fill_token(t, 0);
    masked.grad_value.fill(7);
    run(impl, masked.params());
    run(impl, zeroed.params());
    EXPECT_EQ(masked.weight_bits(), zeroed.weight_bits());
    for (int64_t t = 0; t < s.T; ++t) {
      const std::string got = masked.grad_value.bits(t, t + 1);
      const bool hidden = t % 3 == 1;
      EXPECT_EQ(got, hidden ? std::string(got.size(), '\0') : zeroed.grad_value.bits(t, t + 1))
          << t;
    }
  });
}

TEST(ConvBackward, ASumIsAddedToItsTarget) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const ConvGrad plain(s);
    run(impl, plain.params());
    const ConvGrad added(s);
    const Array weight = Array::random(DType::f32, {s.n, s.d, s.w}, 8, 0, 5);
    const Array norm = Array::random(DType::f32, {s.n, s.d}, 9, 0, 5);
    ConvBackward p = added.params();
    p.grad_conv_weight_acc = weight;
    p.grad_conv_norm_weight_acc = norm;
    run(impl, p);
    EXPECT_EQ(added.grad_value.bits(), plain.grad_value.bits());
    const bool exact = impl != "reference";  // which rounds but once
    const auto expect_sum = [&](const Array& sum, const Array& target, const Array& part) {
      for (int64_t i = 0; i < sum.size(); ++i) {
        const float want = target.get(i) + part.get(i);
        EXPECT_NEAR(sum.get(i), want, exact ? 0 : 1e-6F * (1 + std::fabs(want))) << i;
      }
    };
    expect_sum(added.grad_weight, weight, plain.grad_weight);
    expect_sum(added.grad_norm, norm, plain.grad_norm);
    p.grad_conv_weight = weight;  // in place
    p.grad_conv_norm_weight = norm;
    run(impl, p, 2);
    EXPECT_EQ(weight.bits() + norm.bits(), added.weight_bits());
  });
}

TEST(ConvBackward, NanReachesWhatTheFormulaNames) {
  for (const std::string& impl : implementations("engram.conv_bwd")) {
    const Shape s{12, 3, 33, 3, 2, DType::f32, DType::f32, DType::f32};
    ConvGrad g(s);
    g.grad.set(5 * 99 + 33 + 32, kNan);  // token 5, stream 1, last channel
    run(impl, g.params());
    for (int64_t i = 0; i < g.grad_value.size(); ++i) {
      const int64_t t = i / 99;  // tokens 1, 3, 5 are read by the taps, and their rows' means
      const bool want = i / 33 % 3 == 1 && (t == 1 || t == 3 || t == 5);
      EXPECT_EQ(std::isnan(g.grad_value.get(i)), want) << impl << " at " << i;
    }
    for (int64_t i = 0; i < g.grad_norm.size(); ++i) {
      EXPECT_EQ(std::isnan(g.grad_norm.get(i)), i == 65) << impl << " at " << i;
      for (int64_t k = 0; k < 3; ++k) {
        EXPECT_EQ(std::isnan(g.grad_weight.get(3 * i + k)), i == 65) << impl << " at " << i;
      }
    }
  }
}

TEST(ConvBackward, NoTokensGiveZerosOrTheTarget) {
  for (const std::string& impl : implementations("engram.conv_bwd")) {
    const Shape s{0, 2, 5, 3, 2, DType::bf16, DType::bf16, DType::f32};
    ConvGrad g(s, {0, 0, 0});
    g.grad_weight.fill(3);
    g.grad_norm.fill(3);
    ConvBackward p = g.params();
    p.grad_out = p.gated_value = p.grad_gated_value = Tensor(nullptr, DType::bf16, {0, 2, 5});
    p.image_token_mask = {};
    run(impl, p, 2);
    EXPECT_EQ(g.weight_bits(), std::string(size_t{40} * 4, '\0')) << impl;
    const Array weight = Array::random(DType::f32, {2, 5, 3}, 1);
    p.grad_conv_weight_acc = weight;
    run(impl, p, 2);
    EXPECT_EQ(g.grad_weight.bits(), weight.bits()) << impl;
  }
}

TEST(ConvBackward, ATapBeyondTheSequenceIsLeftOutWhateverTheDilation) {
  for (const std::string& impl : implementations("engram.conv_bwd")) {
    const ConvGrad g({5, 2, 9, 4, 5, DType::f32, DType::f32, DType::f32});
    run(impl, g.params());
    const std::string bits = g.bits();
    ConvBackward p = g.params();
    p.dilation = int64_t{1} << 62;
    run(impl, p);
    EXPECT_EQ(g.bits(), bits) << impl;
  }
}

TEST(ConvBackward, RefusesWhatTheContractForbids) {
  const Shape s{6, 2, 8, 4, 3, DType::bf16, DType::bf16, DType::bf16};
  ConvGrad g(s, {0, 2, 6});
  const auto refused = [&](const std::function<void(ConvBackward&)>& change) {
    ConvBackward p = g.params();
    change(p);
    return error_of([&] { run("", p); });
  };
  EXPECT_EQ(refused([](ConvBackward&) {}), "none");
  EXPECT_EQ(refused([](ConvBackward& p) { p.dilation.reset(); }),
            "engram.conv_bwd: attribute 'dilation': expected a value, got none");
  EXPECT_EQ(refused([](ConvBackward& p) { p.grad_conv_weight = {}; }),
            "engram.conv_bwd: tensor 'grad_conv_weight': expected F32[2,8,4], got none");
  EXPECT_EQ(refused([](ConvBackward& p) { p.grad_gated_value = p.grad_out; }),
            "engram.conv_bwd: tensor 'grad_gated_value': expected memory apart from 'grad_out', "
            "got overlapping memory");
  EXPECT_EQ(refused([](ConvBackward& p) { p.grad_conv_norm_weight_acc = p.grad_conv_weight; }),
            "engram.conv_bwd: tensor 'grad_conv_norm_weight_acc': expected F32[2,8], got "
            "F32[2,8,4]");
  g.borders.element<int32_t>(2) = 5;
  EXPECT_EQ(refused([](ConvBackward&) {}),
            "engram.conv_bwd: tensor 'cu_seqlens': expected a last element T = 6, got 5 at "
            "position 2");
}

TEST(ConvBackward, AsksForItsWorkspace) {
  const ConvGrad g({6, 2, 8, 4, 3, DType::f32, DType::f32, DType::f32});
  Context context = context_for("");
  const size_t bytes = workspace_bytes(context, g.params());
  std::vector<char> memory(bytes);
  context.set_workspace(memory.data(), bytes - 1);
  EXPECT_EQ(error_of([&] { conv_bwd(context, g.params()); }),
            "engram.conv_bwd: workspace: expected at least " + std::to_string(bytes) +
                " bytes, got " + std::to_string(bytes - 1));
}

}  // namespace
}  // namespace ehc::engram
