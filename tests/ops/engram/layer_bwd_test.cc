#include "ehc/engram/layer_bwd.h"

#include "ehc/engram/fused_weight.h"
#include "ehc/engram/gate_bwd.h"
#include "ehc/engram/layer.h"
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

using Shape = test::LayerShape;

struct LayerGrad {
  Shape s;
  Array grad, residual, key, value, hidden, embed, conv_weight, conv_norm, mask, borders;
  Array grad_residual, grad_key, grad_value, grad_hidden, grad_embed, grad_conv, grad_norm;

  explicit LayerGrad(const Shape& shape, const std::vector<int32_t>& cu_seqlens = {},
                     uint32_t seed = 1)
      : s(shape),
        grad(Array::random(s.type, {s.T, s.n, s.d}, seed + 7)),
        residual(Array::random(s.type, {s.T, s.n, s.d}, seed)),
        key(test::keys_like(residual, {s.T, s.n, s.d}, seed + 1)),
        value(Array::random(s.type, {s.T, s.d}, seed + 2)),
        hidden(Array::random(DType::f32, {s.n, s.d}, seed + 3, 1, 0.25F)),
        embed(Array::random(DType::bf16, {s.n, s.d}, seed + 4, 1, 0.25F)),
        conv_weight(Array::random(DType::f32, {s.n, s.d, s.w}, seed + 5, 0, 0.5F)),
        conv_norm(Array::random(DType::bf16, {s.n, s.d}, seed + 6, 1, 0.25F)),
        mask(DType::boolean, {s.T}),
        borders(test::borders_of(cu_seqlens)),
        grad_residual(s.type, {s.T, s.n, s.d}),
        grad_key(s.type, {s.T, s.n, s.d}),
        grad_value(s.type, {s.T, s.d}),
        grad_hidden(DType::f32, {s.n, s.d}),
        grad_embed(DType::f32, {s.n, s.d}),
        grad_conv(DType::f32, {s.n, s.d, s.w}),
        grad_norm(DType::f32, {s.n, s.d}) {}

  [[nodiscard]] LayerBackward gate_only() const {
    return {.grad_out = grad,
            .residual = residual,
            .key = key,
            .value = value,
            .weight_hidden = hidden,
            .weight_embed = embed,
            .image_token_mask = mask,
            .grad_residual = grad_residual,
            .grad_key = grad_key,
            .grad_value = grad_value,
            .grad_weight_hidden = grad_hidden,
            .grad_weight_embed = grad_embed,
            .eps = 1e-6,
            .clamp = 1e-6};
  }
  [[nodiscard]] LayerBackward params() const {
    LayerBackward p = gate_only();
    p.conv_weight = conv_weight;
    p.conv_norm_weight = conv_norm;
    if (borders.size() > 0) p.cu_seqlens = borders;
    p.dilation = s.dilation;
    p.conv_eps = 1e-5;
    p.grad_conv_weight = grad_conv;
    p.grad_conv_norm_weight = grad_norm;
    return p;
  }
  // Nobody may read what belongs to image tokens, but for grad_out.
  void mask_every(int64_t period) {
    for (int64_t t = 1; t < s.T; t += period) {
      mask.element<uint8_t>(t) = 1;
      fill_token(t, kNan);
    }
  }
  void fill_token(int64_t t, float x) {
    for (int64_t i = 0; i < s.n * s.d; ++i) {
      residual.set(t * s.n * s.d + i, x);
      key.set(t * s.n * s.d + i, x);
    }
    for (int64_t i = 0; i < s.d; ++i) value.set(t * s.d + i, x);
  }
  [[nodiscard]] std::string token_bits(int64_t begin, int64_t end) const {
    return grad_residual.bits(begin, end) + grad_key.bits(begin, end) + grad_value.bits(begin, end);
  }
  [[nodiscard]] std::string weight_bits() const {
    return grad_hidden.bits() + grad_embed.bits() + grad_conv.bits() + grad_norm.bits();
  }
  [[nodiscard]] std::string bits() const { return token_bits(0, s.T) + weight_bits(); }
};

void run(const std::string& impl, const LayerBackward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  const Buffer workspace = test::workspace_for(context, p);
  layer_bwd(context, p);
}

template <class Body>
void for_each_case(const Body& body) {
  test::for_each_case("engram.layer_bwd", test::layer_shapes(), body);
}

TEST(LayerBackward, EveryImplementationIsCloseToTheReference) {
  for_each_case([](const std::string& impl, const Shape& s) {
    for (const int64_t masked : {int64_t{1000}, int64_t{4}}) {
      LayerGrad want(s, test::thirds(s.T));
      LayerGrad got(s, test::thirds(s.T));
      want.mask_every(masked);
      got.mask_every(masked);
      run("reference", want.params());
      run(impl, got.params());
      test::expect_similar(got.grad_residual, want.grad_residual, "grad_residual");
      test::expect_similar(got.grad_key, want.grad_key, "grad_key");
      test::expect_similar(got.grad_value, want.grad_value, "grad_value");
      test::expect_similar(got.grad_hidden, want.grad_hidden, "grad_weight_hidden");
      test::expect_similar(got.grad_embed, want.grad_embed, "grad_weight_embed");
      test::expect_similar(got.grad_conv, want.grad_conv, "grad_conv_weight");
      test::expect_similar(got.grad_norm, want.grad_norm, "grad_conv_norm_weight");
    }
  });
}

// sum(grad * layer_fwd) by the reference.
double loss(const LayerGrad& g) {
  const Array out(g.s.type, {g.s.T, g.s.n, g.s.d});
  const LayerForward p = {.residual = g.residual,
                          .key = g.key,
                          .value = g.value,
                          .weight_hidden = g.hidden,
                          .weight_embed = g.embed,
                          .conv_weight = g.conv_weight,
                          .conv_norm_weight = g.conv_norm,
                          .cu_seqlens = g.borders,
                          .image_token_mask = g.mask,
                          .out = out,
                          .eps = 1e-6,
                          .clamp = 1e-6,
                          .dilation = g.s.dilation,
                          .conv_eps = 1e-5};
  Context context = context_for("reference");
  const Buffer workspace = test::workspace_for(context, p);
  layer_fwd(context, p);
  double sum = 0;
  for (int64_t i = 0; i < out.size(); ++i) {
    if (g.mask.element<uint8_t>(i / (g.s.n * g.s.d)) == 0) {
      sum += static_cast<double>(out.get(i)) * g.grad.get(i);
    }
  }
  return sum;
}

TEST(LayerBackward, EqualsFiniteDifferences) {
  const Shape s{9, 2, 6, 3, 2, DType::f32};
  LayerGrad g(s, {0, 6, 9});
  g.embed = g.embed.copy(DType::f32);  // so that steps are exact
  g.conv_norm = g.conv_norm.copy(DType::f32);
  g.mask_every(5);
  const auto expect_slopes = [&](Array& input, const Array& gradient, const char* what) {
    test::expect_slopes(
        "engram.layer_bwd", input, gradient,
        [&](const std::string& impl) { run(impl, g.params()); }, [&] { return loss(g); }, what);
  };
  expect_slopes(g.residual, g.grad_residual, "residual");
  expect_slopes(g.key, g.grad_key, "key");
  expect_slopes(g.value, g.grad_value, "value");
  expect_slopes(g.hidden, g.grad_hidden, "weight_hidden");
  expect_slopes(g.embed, g.grad_embed, "weight_embed");
  expect_slopes(g.conv_weight, g.grad_conv, "conv_weight");
  expect_slopes(g.conv_norm, g.grad_norm, "conv_norm_weight");
}

TEST(LayerBackward, WithoutConvolutionIsTheGate) {
  for_each_case([](const std::string& impl, const Shape& s) {
    LayerGrad layer(s);
    layer.mask_every(4);
    run(impl, layer.gate_only(), 2);
    LayerGrad gate(s);
    gate.mask_every(4);
    const Array fused(DType::f32, {s.n, s.d});
    const Array partial(DType::f32, {gate_weight_partials(s.T), s.n, s.d});
    Context context = context_for(impl);
    fused_weight(context,
                 {.weight_hidden = gate.hidden, .weight_embed = gate.embed, .weight_fused = fused});
    const GateBackward p = {.grad_out = gate.grad,
                            .residual = gate.residual,
                            .key = gate.key,
                            .value = gate.value,
                            .weight_fused = fused,
                            .image_token_mask = gate.mask,
                            .grad_residual = gate.grad_residual,
                            .grad_key = gate.grad_key,
                            .grad_value = gate.grad_value,
                            .grad_weight_partial = partial,
                            .clamp = 1e-6,
                            .eps = 1e-6};
    const Buffer workspace = test::workspace_for(context, p);
    gate_bwd(context, p);
    EXPECT_EQ(layer.token_bits(0, s.T), gate.token_bits(0, s.T));
  });
}

TEST(LayerBackward, LayoutAndThreadsChangeNoBit) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const LayerGrad plain(s);
    run(impl, plain.params());
    for (const int threads : {2, 3, 8}) {
      const LayerGrad many(s);
      run(impl, many.params(), threads);
      EXPECT_EQ(many.bits(), plain.bits()) << threads << " threads";
    }
    const Array grad = plain.grad.copy({.row_padding = 1, .offset = 7});
    const Array residual = plain.residual.copy({.row_padding = 3, .offset = 1});
    const Array kv = test::pack_kv(plain.key, plain.value, {.row_padding = 2, .offset = 1});
    const Array conv_weight = plain.conv_weight.copy({.row_padding = 2, .offset = 1});
    const Array grad_residual(s.type, {s.T, s.n, s.d}, {.row_padding = 7, .offset = 5});
    const Array grad_kv(s.type, {s.T, s.n + 1, s.d}, {.row_padding = 1, .offset = 3});
    const Array grad_conv(DType::f32, {s.n, s.d, s.w}, {.row_padding = 1, .offset = 1});
    LayerBackward p = plain.params();
    p.grad_out = grad;
    p.residual = residual;
    p.key = p.value = {};
    p.kv = kv;
    p.conv_weight = conv_weight;
    p.grad_residual = grad_residual;
    p.grad_key = p.grad_value = {};
    p.grad_kv = grad_kv;
    p.grad_conv_weight = grad_conv;
    run(impl, p, 2);
    EXPECT_EQ(grad_residual.bits(), plain.grad_residual.bits());
    EXPECT_EQ(grad_kv.bits(), test::pack_kv(plain.grad_key, plain.grad_value).bits());
    EXPECT_EQ(plain.grad_hidden.bits() + plain.grad_embed.bits() + grad_conv.bits() +
                  plain.grad_norm.bits(),
              plain.weight_bits());
  });
}

TEST(LayerBackward, ChunksOnManyThreadsChangeNoBit) {
  for (const std::string& impl : implementations("engram.layer_bwd")) {
    if (impl.rfind("reference", 0) == 0) continue;
    for (const int64_t dilation : {int64_t{3}, int64_t{50}}) {
      const Shape s{300, 2, 96, 4, dilation, DType::bf16};
      LayerGrad one(s, {0, 100, 101, 250, 300});
      one.mask_every(17);
      run(impl, one.params());
      for (int threads = 2; threads <= 8; threads += dilation == 3 ? 1 : 3) {
        LayerGrad many(s, {0, 100, 101, 250, 300});
        many.mask_every(17);
        run(impl, many.params(), threads);
        EXPECT_EQ(many.bits(), one.bits()) << impl << " " << threads;
      }
    }
  }
}

// A sequence has the same gradients alone and anywhere in a batch, whatever the others hold; the
// borders of chunks and runs lie elsewhere in it then.
TEST(LayerBackward, ASequenceDependsOnItselfAlone) {
  for (const std::string& impl : implementations("engram.layer_bwd")) {
    for (const Shape& of : test::layer_shapes()) {
      if (of.d > 300 || of.dilation > 50) continue;
      Shape s = of;
      s.T = 260;
      s.n = std::min<int64_t>(s.n, 2);
      const int64_t begin = 37, end = 230;
      LayerGrad batch(s, {0, begin, end, static_cast<int32_t>(s.T)});
      for (int64_t t = begin + 5; t < end; t += 23) batch.mask.element<uint8_t>(t) = 1;
      batch.fill_token(begin - 1, kNan);
      batch.fill_token(end, kInf);
      run(impl, batch.params(), 2);
      const std::string in_batch = batch.token_bits(begin, end);
      LayerBackward p = batch.params();
      p.cu_seqlens = {};
      for (Tensor* t : {&p.grad_out, &p.residual, &p.key, &p.value, &p.grad_residual, &p.grad_key,
                        &p.grad_value, &p.image_token_mask}) {
        *t = t->slice(0, begin, end);
      }
      run(impl, p);
      EXPECT_EQ(batch.token_bits(begin, end), in_batch) << impl << " " << s;
    }
  }
}

TEST(LayerBackward, MaskedTokensHandTheirGradientThrough) {
  for_each_case([](const std::string& impl, const Shape& s) {
    LayerGrad g(s);
    g.mask_every(3);
    for (int64_t i = 0; i < s.n * s.d && s.T > 1; ++i) g.grad.set(s.n * s.d + i, kNan);
    for (Array* out : {&g.grad_residual, &g.grad_key, &g.grad_value}) out->fill(7);
    run(impl, g.params());
    for (int64_t t = 1; t < s.T; t += 3) {
      EXPECT_EQ(g.grad_residual.bits(t, t + 1), g.grad.bits(t, t + 1)) << t;
      const std::string zeros = g.grad_key.bits(t, t + 1) + g.grad_value.bits(t, t + 1);
      EXPECT_EQ(zeros, std::string(zeros.size(), '\0')) << t;
    }
    for (const Array* sum : {&g.grad_hidden, &g.grad_embed, &g.grad_conv, &g.grad_norm}) {
      for (int64_t i = 0; i < sum->size(); ++i) EXPECT_TRUE(std::isfinite(sum->get(i))) << i;
    }
  });
}

TEST(LayerBackward, ASumIsAddedToItsTarget) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const LayerGrad plain(s);
    run(impl, plain.params());
    const LayerGrad added(s);
    const Array hidden = Array::random(DType::f32, {s.n, s.d}, 8, 0, 5);
    const Array embed = Array::random(DType::f32, {s.n, s.d}, 9, 0, 5);
    const Array conv = Array::random(DType::f32, {s.n, s.d, s.w}, 10, 0, 5);
    const Array norm = Array::random(DType::f32, {s.n, s.d}, 11, 0, 5);
    LayerBackward p = added.params();
    p.grad_weight_hidden_acc = hidden;
    p.grad_weight_embed_acc = embed;
    p.grad_conv_weight_acc = conv;
    p.grad_conv_norm_weight_acc = norm;
    run(impl, p);
    EXPECT_EQ(added.token_bits(0, s.T), plain.token_bits(0, s.T));
    const auto expect_sum = [&](const Array& sum, const Array& target, const Array& part) {
      for (int64_t i = 0; i < sum.size(); ++i) {
        const float want = target.get(i) + part.get(i);
        EXPECT_NEAR(sum.get(i), want, 1e-6F * (std::fabs(target.get(i)) + std::fabs(want))) << i;
      }
    };
    expect_sum(added.grad_hidden, hidden, plain.grad_hidden);
    expect_sum(added.grad_embed, embed, plain.grad_embed);
    expect_sum(added.grad_conv, conv, plain.grad_conv);
    expect_sum(added.grad_norm, norm, plain.grad_norm);
    p.grad_weight_hidden = hidden;  // in place
    p.grad_weight_embed = embed;
    p.grad_conv_weight = conv;
    p.grad_conv_norm_weight = norm;
    run(impl, p, 2);
    EXPECT_EQ(hidden.bits() + embed.bits() + conv.bits() + norm.bits(), added.weight_bits());
  });
}

TEST(LayerBackward, NoTokensGiveZeros) {
  for (const std::string& impl : implementations("engram.layer_bwd")) {
    const Shape s{0, 2, 5, 3, 2, DType::bf16};
    LayerGrad g(s, {0, 0, 0});
    for (Array* sum : {&g.grad_hidden, &g.grad_embed, &g.grad_conv, &g.grad_norm}) sum->fill(3);
    const Tensor none(nullptr, DType::bf16, {0, 2, 5});
    for (const bool conv : {false, true}) {
      LayerBackward p = conv ? g.params() : g.gate_only();
      p.grad_out = p.residual = p.key = p.grad_residual = p.grad_key = none;
      p.value = p.grad_value = Tensor(nullptr, DType::bf16, {0, 5});
      p.image_token_mask = {};
      run(impl, p, 2);
    }
    EXPECT_EQ(g.weight_bits(), std::string(size_t{60} * 4, '\0')) << impl;
  }
}

TEST(LayerBackward, RefusesWhatTheContractForbids) {
  const Shape s{6, 2, 8, 4, 3, DType::bf16};
  const LayerGrad g(s, {0, 2, 6});
  const auto refused = [&](const std::function<void(LayerBackward&)>& change) {
    LayerBackward p = g.params();
    change(p);
    return error_of([&] { run("", p); });
  };
  EXPECT_EQ(refused([](LayerBackward&) {}), "none");
  EXPECT_EQ(refused([](LayerBackward& p) { p.grad_conv_weight = {}; }),
            "engram.layer_bwd: tensor 'grad_conv_weight': expected F32[2,8,4], got none");
  EXPECT_EQ(
      refused([](LayerBackward& p) { p.dilation.reset(); }),
      "engram.layer_bwd: attribute 'dilation': expected a value with 'conv_weight', got none");
  EXPECT_EQ(refused([](LayerBackward& p) { p.grad_key = p.key; }),
            "engram.layer_bwd: tensor 'grad_key': expected memory apart from 'key', got "
            "overlapping memory");
  const Array target(DType::f32, {2, 8});
  EXPECT_EQ(refused([&](LayerBackward& p) {
              p = g.gate_only();
              p.grad_conv_norm_weight_acc = target;
            }),
            "engram.layer_bwd: tensor 'grad_conv_norm_weight_acc': expected none without "
            "'conv_weight', got F32[2,8]");
}

TEST(LayerBackward, AsksForItsWorkspace) {
  const LayerGrad g({6, 2, 8, 4, 3, DType::f32});
  Context context = context_for("");
  const size_t bytes = workspace_bytes(context, g.params());
  std::vector<char> memory(bytes);
  context.set_workspace(memory.data(), bytes - 1);
  EXPECT_EQ(error_of([&] { layer_bwd(context, g.params()); }),
            "engram.layer_bwd: workspace: expected at least " + std::to_string(bytes) +
                " bytes, got " + std::to_string(bytes - 1));
}

}  // namespace
}  // namespace ehc::engram
