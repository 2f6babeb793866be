#include "ehc/engram/layer.h"

#include "ehc/engram/conv.h"
#include "ehc/engram/fused_weight.h"
#include "ehc/engram/gate.h"
#include "ehc/memory.h"
#include "tests/ops/engram/shapes.h"
#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;
using test::kNan;
using test::workspace_for;

using Shape = test::LayerShape;

std::vector<Shape> shapes() {
  std::vector<Shape> list = test::layer_shapes();
  for (const DType type : test::kActivations) list.push_back({31, 3, 1, 4, 3, type});
  return list;
}

struct Layer {
  Shape s;
  Array residual, key, value, hidden, embed, conv_weight, conv_norm, mask, borders, state;
  Array out, dot, alpha, rstd_residual, rstd_key, new_state;

  explicit Layer(const Shape& shape, const std::vector<int32_t>& cu_seqlens = {}, uint32_t seed = 1)
      : s(shape),
        residual(Array::random(s.type, {s.T, s.n, s.d}, seed)),
        key(test::keys_like(residual, {s.T, s.n, s.d}, seed + 1)),
        value(Array::random(s.type, {s.T, s.d}, seed + 2)),
        hidden(Array::random(DType::f32, {s.n, s.d}, seed + 3, 1, 0.25F)),
        embed(Array::random(DType::bf16, {s.n, s.d}, seed + 4, 1, 0.25F)),
        conv_weight(Array::random(DType::f32, {s.n, s.d, s.w}, seed + 5, 0, 0.5F)),
        conv_norm(Array::random(DType::bf16, {s.n, s.d}, seed + 6, 1, 0.25F)),
        mask(DType::boolean, {s.T}),
        borders(test::borders_of(cu_seqlens)),
        out(s.type, {s.T, s.n, s.d}),
        dot(DType::f32, {s.T, s.n}),
        alpha(DType::f32, {s.T, s.n}),
        rstd_residual(DType::f32, {s.T, s.n}),
        rstd_key(DType::f32, {s.T, s.n}) {
    const int64_t sequences = std::max<int64_t>(1, borders.size() - 1);
    const std::vector<int64_t> dims = {sequences, (s.w - 1) * s.dilation, s.n, s.d};
    state = Array::random(DType::f32, dims, seed + 7);
    new_state = Array(DType::f32, dims);
  }

  [[nodiscard]] LayerForward gate_only() const {
    return {.residual = residual,
            .key = key,
            .value = value,
            .weight_hidden = hidden,
            .weight_embed = embed,
            .image_token_mask = mask,
            .out = out,
            .eps = 1e-6,
            .clamp = 1e-6};
  }
  [[nodiscard]] LayerForward params() const {
    LayerForward p = gate_only();
    p.conv_weight = conv_weight;
    p.conv_norm_weight = conv_norm;
    if (borders.size() > 0) p.cu_seqlens = borders;
    p.dilation = s.dilation;
    p.conv_eps = 1e-5;
    return p;
  }
  [[nodiscard]] LayerForward with_state() const {
    LayerForward p = params();
    p.state = state;
    p.new_state = new_state;
    return p;
  }
  [[nodiscard]] LayerForward saving(LayerForward p) const {
    p.dot = dot;
    p.alpha = alpha;
    p.rstd_residual = rstd_residual;
    p.rstd_key = rstd_key;
    return p;
  }
  [[nodiscard]] Array packed() const {
    return test::pack_kv(key, value, {.row_padding = 2, .offset = 1});
  }
  [[nodiscard]] std::string saved_bits() const {
    return dot.bits() + alpha.bits() + rstd_residual.bits() + rstd_key.bits();
  }
};

void run(const std::string& impl, const LayerForward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  const Buffer workspace = workspace_for(context, p);
  layer_fwd(context, p);
}

// weight_hidden * weight_embed.
Array fused_weights(const Layer& layer) {
  Array fused(DType::f32, {layer.s.n, layer.s.d});
  Context context = context_for("");
  fused_weight(context,
               {.weight_hidden = layer.hidden, .weight_embed = layer.embed, .weight_fused = fused});
  return fused;
}

template <class Body>
void for_each_case(const Body& body) {
  test::for_each_case("engram.layer_fwd", shapes(), body);
}

TEST(LayerForward, EveryImplementationIsCloseToTheReference) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const auto third = static_cast<int32_t>(s.T / 3);
    const Layer want(s, {0, third, third, static_cast<int32_t>(s.T)});
    const Layer got(s, {0, third, third, static_cast<int32_t>(s.T)});
    run("reference", want.saving(want.with_state()));
    run(impl, got.saving(got.with_state()));
    test::expect_close(impl, got.out, want.out, "out");
    test::expect_close(impl, got.alpha, want.alpha, "alpha");
    test::expect_close(impl, got.new_state, want.new_state, "state");
  });
}

TEST(LayerForward, WithoutConvolutionIsTheGate) {
  for_each_case([](const std::string& impl, const Shape& s) {
    Layer layer(s);
    for (int64_t t = 0; t < s.T; t += 3) layer.mask.element<uint8_t>(t) = 1;
    const Array fused = fused_weights(layer);
    const Layer gate(s);
    Context context = context_for(impl);
    gate_fwd(context, {.residual = layer.residual,
                       .key = layer.key,
                       .value = layer.value,
                       .weight_fused = fused,
                       .image_token_mask = layer.mask,
                       .out = gate.out,
                       .dot = gate.dot,
                       .alpha = gate.alpha,
                       .rstd_residual = gate.rstd_residual,
                       .rstd_key = gate.rstd_key,
                       .eps = 1e-6,
                       .clamp = 1e-6});
    for (const auto rounding : {LayerForward::Rounding::once, LayerForward::Rounding::twice}) {
      LayerForward p = layer.saving(layer.gate_only());
      p.rounding = rounding;
      run(impl, p);
      EXPECT_EQ(layer.out.bits(), gate.out.bits());
      EXPECT_EQ(layer.saved_bits(), gate.saved_bits());
    }
    // The convolution changes no statistic.
    run(impl, layer.saving(layer.params()));
    EXPECT_EQ(layer.saved_bits(), gate.saved_bits()) << "with convolution";
  });
}

TEST(LayerForward, ZeroTapsAreTheGateToo) {
  for_each_case([](const std::string& impl, const Shape& s) {
    Layer layer(s);
    run(impl, layer.gate_only());
    const std::string want = layer.out.bits();
    layer.conv_weight.fill(0);
    run(impl, layer.params());
    EXPECT_EQ(layer.out.bits(), want);
  });
}

TEST(LayerForward, SavingPackingLayoutAndThreadsChangeNoBit) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const Layer plain(s);
    run(impl, plain.with_state());
    const std::string want = plain.out.bits();
    const std::string want_state = plain.new_state.bits();

    const Layer saving(s);
    run(impl, saving.saving(saving.with_state()));
    EXPECT_EQ(saving.out.bits(), want) << "save";

    for (const int threads : {2, 8}) {
      const Layer many(s);
      run(impl, many.saving(many.with_state()), threads);
      EXPECT_EQ(many.out.bits(), want) << threads << " threads";
      EXPECT_EQ(many.new_state.bits(), want_state) << threads << " threads";
      EXPECT_EQ(many.saved_bits(), saving.saved_bits()) << threads << " threads";
    }

    const Array kv = plain.packed();
    const Array residual = plain.residual.copy({.row_padding = 3, .offset = 1});
    const Array hidden = plain.hidden.copy({.row_padding = 1, .offset = 1});
    const Array embed = plain.embed.copy({.row_padding = 3, .offset = 1});
    const Array conv_weight = plain.conv_weight.copy({.row_padding = 1, .offset = 2});
    const Array conv_norm = plain.conv_norm.copy({.row_padding = 5, .offset = 1});
    const Array state = plain.state.copy({.row_padding = 3, .offset = 1});
    const Array out(s.type, {s.T, s.n, s.d}, {.row_padding = 5, .offset = 3});
    LayerForward p = plain.with_state();
    p.key = p.value = {};
    p.kv = kv;
    p.residual = residual;
    p.weight_hidden = hidden;
    p.weight_embed = embed;
    p.conv_weight = conv_weight;
    p.conv_norm_weight = conv_norm;
    p.state = p.new_state = state;  // in place
    p.out = out;
    run(impl, p, 2);
    EXPECT_EQ(out.bits(), want) << "packed, strided, misaligned";
    EXPECT_EQ(state.bits(), want_state) << "packed, strided, misaligned";
  });
}

TEST(LayerForward, LongRunsOnManyThreadsChangeNoBit) {
  for (const std::string& impl : implementations("engram.layer_fwd")) {
    if (impl.rfind("reference", 0) == 0) continue;
    const Shape s{300, 2, 96, 4, 3, DType::bf16};
    const Layer one(s, {0, 100, 101, 250, 300});
    run(impl, one.saving(one.params()));
    for (int threads = 2; threads <= 8; ++threads) {
      const Layer many(s, {0, 100, 101, 250, 300});
      run(impl, many.saving(many.params()), threads);
      EXPECT_EQ(many.out.bits(), one.out.bits()) << impl << " " << threads;
      EXPECT_EQ(many.saved_bits(), one.saved_bits()) << impl << " " << threads;
    }
  }
}

TEST(LayerForward, ASequenceDependsOnItselfAlone) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const int64_t cut = s.T / 2;
    const Layer batch(s, {0, static_cast<int32_t>(cut), static_cast<int32_t>(s.T)});
    run(impl, batch.params());
    const std::string want = batch.out.bits();
    for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, {cut, s.T}}) {
      LayerForward p = batch.params();
      p.cu_seqlens = {};
      for (Tensor* t : {&p.residual, &p.key, &p.value, &p.image_token_mask, &p.out}) {
        *t = t->slice(0, begin, end);
      }
      run(impl, p);
    }
    EXPECT_EQ(batch.out.bits(), want);
  });
}

TEST(LayerForward, ChunksWithStateEqualOnePass) {
  for_each_case([](const std::string& impl, const Shape& s) {
    Layer whole(s);
    for (int64_t t = 0; t < s.T; ++t) whole.mask.element<uint8_t>(t) = t % 7 == 3;
    run(impl, whole.with_state());
    test::for_each_chunk_size(s.T, [&](const auto& feed) {
      const Layer pieces(s);
      const Array state = whole.state.copy();
      feed([&](int64_t begin, int64_t end) {
        LayerForward p = whole.params();
        p.residual = whole.residual.rows(begin, end);
        p.key = whole.key.rows(begin, end);
        p.value = whole.value.rows(begin, end);
        p.image_token_mask = whole.mask.rows(begin, end);
        p.out = pieces.out.rows(begin, end);
        p.state = p.new_state = state;
        run(impl, p);
      });
      EXPECT_EQ(pieces.out.bits(), whole.out.bits());
      EXPECT_EQ(state.bits(), whole.new_state.bits());
    });
  });
}

TEST(LayerForward, MaskedTokensPassThroughAndReadNoKv) {
  for_each_case([](const std::string& impl, const Shape& s) {
    Layer masked(s);
    Layer finite(s);
    const auto is_masked = [](int64_t t) { return t % 3 == 0; };
    for (int64_t t = 0; t < s.T; ++t) {
      if (!is_masked(t)) continue;
      masked.mask.element<uint8_t>(t) = finite.mask.element<uint8_t>(t) = 1;
      for (int64_t i = 0; i < s.n * s.d; ++i) masked.key.set(t * s.n * s.d + i, kNan);
      for (int64_t i = 0; i < s.d; ++i) masked.value.set(t * s.d + i, kNan);
      masked.residual.set(t * s.n * s.d, kNan);
    }
    for (Array* x : {&masked.dot, &masked.alpha, &masked.rstd_residual, &masked.rstd_key}) {
      x->fill(7);
    }
    run(impl, masked.saving(masked.with_state()));
    run(impl, finite.saving(finite.with_state()));
    for (int64_t t = 0; t < s.T; ++t) {
      EXPECT_EQ(masked.out.bits(t, t + 1),
                (is_masked(t) ? masked.residual : finite.out).bits(t, t + 1))
          << t;
    }
    EXPECT_EQ(masked.saved_bits(), finite.saved_bits());
    EXPECT_EQ(masked.alpha.get(0), 0);
    EXPECT_EQ(masked.new_state.bits(), finite.new_state.bits());
  });
}

// 1.14: the norm of alpha*v without forming it. With fp32 streams the layer equals gate (mode
// value), convolution and residual sum, to fp32 accuracy.
TEST(LayerForward, TheFusedNormIsTheNormOfTheGatedValue) {
  for (const std::string& impl : implementations("engram.layer_fwd")) {
    for (const Shape& s : shapes()) {
      if (s.type != DType::f32) continue;
      const Layer layer(s);
      run(impl, layer.params());
      const Array fused = fused_weights(layer);
      const Array gated(s.type, {s.T, s.n, s.d});
      const Array y(s.type, {s.T, s.n, s.d});
      Context context = context_for(impl);
      gate_fwd(context, {.residual = layer.residual,
                         .key = layer.key,
                         .value = layer.value,
                         .weight_fused = fused,
                         .out = gated,
                         .eps = 1e-6,
                         .clamp = 1e-6,
                         .mode = GateForward::Mode::value});
      const ConvForward conv{.gated_value = gated,
                             .conv_weight = layer.conv_weight,
                             .conv_norm_weight = layer.conv_norm,
                             .out = y,
                             .dilation = s.dilation,
                             .conv_eps = 1e-5};
      const Buffer workspace = workspace_for(context, conv);
      conv_fwd(context, conv);
      for (int64_t i = 0; i < y.size(); ++i) {
        ASSERT_NEAR(layer.out.get(i), layer.residual.get(i) + y.get(i), 1e-5) << impl << " " << s;
      }
    }
  }
}

// out(twice) = round(gate + silu(c)) where gate is the rounded output without convolution; silu(c)
// is recovered, up to fp32 rounding, from an fp32 run on the same values.
TEST(LayerForward, RoundingOnceAndTwiceAreWhatTheySay) {
  for (const std::string& impl : implementations("engram.layer_fwd")) {
    for (const DType type : {DType::bf16, DType::f16}) {
      const Shape s{33, 4, 64, 4, 3, type};
      Layer low(s);
      Layer high({33, 4, 64, 4, 3, DType::f32});
      high.residual = low.residual.copy(DType::f32);
      high.key = low.key.copy(DType::f32);
      high.value = low.value.copy(DType::f32);
      run(impl, high.gate_only());
      const Array gate_exact = high.out.copy();
      run(impl, high.params());
      run(impl, low.gate_only());
      const Array gate_rounded = low.out.copy();
      Array once(type, {s.T, s.n, s.d});
      Array twice(type, {s.T, s.n, s.d});
      for (int64_t i = 0; i < once.size(); ++i) {
        const float silu = high.out.get(i) - gate_exact.get(i);
        once.set(i, high.out.get(i));
        twice.set(i, gate_rounded.get(i) + silu);
      }
      LayerForward p = low.params();
      run(impl, p);
      const Array got_once = low.out.copy();
      p.rounding = LayerForward::Rounding::twice;
      run(impl, p);
      int64_t once_differs = 0;
      int64_t twice_differs = 0;
      int64_t modes_differ = 0;
      for (int64_t i = 0; i < once.size(); ++i) {
        once_differs += got_once.get(i) != once.get(i);
        twice_differs += low.out.get(i) != twice.get(i);
        modes_differ += got_once.get(i) != low.out.get(i);
      }
      // A last-bit error of the fp32 sum moves few roundings; the modes differ in many.
      EXPECT_LT(once_differs, once.size() / 100) << impl;
      EXPECT_LT(twice_differs, once.size() / 100) << impl;
      EXPECT_GT(modes_differ, once.size() / 20) << impl;
    }
    // In F32 too: the sum is rounded before silu(c) is added.
    const Layer f32({33, 4, 64, 4, 3, DType::f32});
    LayerForward p = f32.params();
    run(impl, p);
    const Array got_once = f32.out.copy();
    p.rounding = LayerForward::Rounding::twice;
    run(impl, p);
    test::expect_close(impl, f32.out, got_once, "twice");
  }
}

TEST(LayerForward, ANanGateReachesItsStreamAndItsTaps) {
  for (const std::string& impl : implementations("engram.layer_fwd")) {
    const Shape s{9, 3, 33, 3, 2, DType::f32};
    Layer layer(s);
    layer.key.set(2 * 99 + 33 + 5, kNan);  // token 2, stream 1
    run(impl, layer.params());
    for (int64_t i = 0; i < layer.out.size(); ++i) {
      const int64_t t = i / 99;
      const bool want = i / 33 % 3 == 1 && (t == 2 || t == 4 || t == 6);
      EXPECT_EQ(std::isnan(layer.out.get(i)), want) << impl << " at " << i;
    }
  }
}

TEST(LayerForward, NoTokensKeepTheState) {
  for (const std::string& impl : implementations("engram.layer_fwd")) {
    const Layer layer({0, 2, 5, 3, 2, DType::bf16}, {0, 0, 0});
    LayerForward p = layer.with_state();
    p.residual = p.out = Tensor(nullptr, DType::bf16, {0, 2, 5});
    p.key = p.value = p.image_token_mask = {};
    p.kv = Tensor(nullptr, DType::bf16, {0, 3, 5});
    run(impl, p, 2);
    EXPECT_EQ(layer.new_state.bits(), layer.state.bits()) << impl;
    p = layer.gate_only();
    p.residual = p.out = Tensor(nullptr, DType::bf16, {0, 2, 5});
    p.key = p.value = p.image_token_mask = {};
    p.kv = Tensor(nullptr, DType::bf16, {0, 3, 5});
    run(impl, p, 2);
  }
}

TEST(LayerForward, RefusesWhatTheContractForbids) {
  const Layer g({6, 2, 8, 4, 3, DType::bf16}, {0, 2, 6});
  const auto refused = [&](const std::function<void(LayerForward&)>& change) {
    LayerForward p = g.saving(g.with_state());
    change(p);
    return error_of([&] { run("", p); });
  };
  EXPECT_EQ(refused([](LayerForward&) {}), "none");
  EXPECT_EQ(refused([](LayerForward& p) { p.conv_norm_weight = {}; }),
            "engram.layer_fwd: tensor 'conv_weight': expected all or none of 'conv_weight "
            "conv_norm_weight', got 'conv_weight'");
  EXPECT_EQ(refused([](LayerForward& p) { p.conv_weight = p.conv_norm_weight = {}; }),
            "engram.layer_fwd: tensor 'state': expected none without 'conv_weight', got "
            "F32[2,9,2,8]");
  EXPECT_EQ(refused([](LayerForward& p) { p.dilation.reset(); }),
            "engram.layer_fwd: attribute 'dilation': expected a value with 'conv_weight', got "
            "none");
  EXPECT_EQ(refused([](LayerForward& p) { p.conv_eps.reset(); }),
            "engram.layer_fwd: attribute 'conv_eps': expected a value with 'conv_weight', got "
            "none");
  EXPECT_EQ(refused([](LayerForward& p) { p.conv_eps = -1; }),
            "engram.layer_fwd: attribute 'conv_eps': expected a finite number > 0, got -1");
  EXPECT_EQ(refused([](LayerForward& p) { p.alpha = {}; }),
            "engram.layer_fwd: tensor 'dot': expected all or none of 'dot alpha rstd_residual "
            "rstd_key', got 'dot', 'rstd_residual', 'rstd_key'");
  EXPECT_EQ(refused([](LayerForward& p) { p.out = p.residual; }),
            "engram.layer_fwd: tensor 'out': expected memory apart from 'residual', got "
            "overlapping memory");
  EXPECT_EQ(refused([](LayerForward& p) { p.new_state = {}; }),
            "engram.layer_fwd: tensor 'state': expected F32[2,9,2,8], got none");
  g.borders.element<int32_t>(2) = 7;
  EXPECT_EQ(refused([](LayerForward&) {}),
            "engram.layer_fwd: tensor 'cu_seqlens': expected a last element T = 6, got 7 at "
            "position 2");
}

}  // namespace
}  // namespace ehc::engram
