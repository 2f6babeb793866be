#include "ehc/mhc/pre_big_fuse.h"

#include "ehc/mhc/pre_apply.h"
#include "ehc/mhc/split.h"
#include "tests/ops/mhc/mix_support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::error_of;
using test::implementations;
using test::kNan;
using test::Layout;

struct Pre {
  int64_t T, n, d, S, G, N;
  DType type;
  SinkhornConvention convention = SinkhornConvention::deepseek;
  RmsForm form = RmsForm::mean;
  Array mul, sqr, scale, base, residual, weight, layer_input, post, comb;

  // `groups` 0: without that axis.
  Pre(int64_t tokens, int64_t streams, int64_t hidden, DType activation, int64_t splits = 2,
      int64_t groups = 0, Layout layout = {})
      : T(tokens),
        n(streams),
        d(hidden),
        S(splits),
        G(groups),
        N(n * n + 2 * n),
        type(activation),
        mul(Array::random(DType::f32,
                          G > 0 ? std::vector<int64_t>{S, T, G, N} : std::vector<int64_t>{S, T, N},
                          1)
                .copy(layout)),
        sqr(Array::random(DType::f32,
                          G > 0 ? std::vector<int64_t>{S, T, G} : std::vector<int64_t>{S, T}, 2, 9)
                .copy(layout)),
        scale(Array::random(DType::f32, {3}, 3, 1)),
        base(Array::random(DType::f32, {N}, 4)),
        residual(Array::random(type, {T, n, d}, 5).copy(layout)),
        weight(Array::random(DType::f32, {d}, 6, 1, 0.25F)),
        layer_input(type, {T, d}, layout),
        post(DType::f32, {T, n}, layout),
        comb(DType::f32, {T, n, n}, layout) {}

  [[nodiscard]] PreBigFuse params() const {
    return {.mul_partial = mul,
            .sqr_partial = sqr,
            .scale = scale,
            .base = base,
            .residual = residual,
            .layer_input = layer_input,
            .post = post,
            .comb = comb,
            .norm_eps = 1e-6,
            .pre_eps = 1e-2,
            .post_mult = 2,
            .repeat = 20,
            .sinkhorn_eps = 1e-6,
            .convention = convention,
            .rms = form};
  }
  [[nodiscard]] std::string bits() const { return layer_input.bits() + post.bits() + comb.bits(); }

  // The operators one after the other.
  [[nodiscard]] Pre unfused(const std::string& impl) const {
    Pre out(T, n, d, type, S, G);
    const std::vector<int64_t> grouped =
        G > 0 ? std::vector<int64_t>{T, G, N} : std::vector<int64_t>{T, N};
    const Array mixes(DType::f32, {T, N});
    const Array sums(DType::f32, grouped);
    const Array squares(DType::f32, std::vector<int64_t>(grouped.begin(), grouped.end() - 1));
    const Array pre(DType::f32, {T, n});
    const Array logits(DType::f32, {T, n, n});
    Context context = test::context_for(impl);
    reduce_partials_fwd(context, {.mul_partial = mul,
                                  .sqr_partial = sqr,
                                  .mixes = mixes,
                                  .mul = sums,
                                  .sqr = squares,
                                  .k = n * d,
                                  .norm_eps = 1e-6,
                                  .rms = form});
    split_fwd(context, {.mixes = mixes,
                        .scale = scale,
                        .base = base,
                        .pre = pre,
                        .post = out.post,
                        .comb_logits = logits,
                        .pre_eps = 1e-2,
                        .post_mult = 2});
    sinkhorn_fwd(context, {.comb_logits = logits,
                           .comb = out.comb,
                           .repeat = 20,
                           .eps = 1e-6,
                           .convention = convention});
    pre_apply_fwd(context, {.residual = residual, .pre = pre, .layer_input = out.layer_input});
    return out;
  }
};

std::vector<std::string> kernels() { return implementations("mhc.pre_big_fuse"); }

void run(const std::string& impl, const PreBigFuse& p, int threads = 1) {
  test::run_on(
      impl, [](Context& c, const auto& q) { pre_big_fuse(c, q); }, p, threads);
}

TEST(PreBigFuse, HasTheBitsOfItsSteps) {
  for (const auto& [T, n, d, S, G] : {std::tuple<int, int, int, int, int>{1, 4, 64, 1, 0},
                                      {130, 4, 33, 3, 0},
                                      {67, 2, 96, 16, 0},
                                      {9, 8, 40, 2, 4},
                                      {3, 5, 300, 2, 1},
                                      {5, 1, 7, 2, 7}}) {
    for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
      for (const SinkhornConvention convention :
           {SinkhornConvention::deepseek, SinkhornConvention::megatron, SinkhornConvention::log}) {
        for (const std::string& impl : kernels()) {
          Pre p(T, n, d, type, S, G);
          p.convention = convention;
          p.form = convention == SinkhornConvention::megatron ? RmsForm::norm : RmsForm::mean;
          run(impl, p.params());
          EXPECT_EQ(p.bits(), p.unfused(impl).bits()) << impl << " T=" << T << " n=" << n;
        }
      }
    }
  }
}

// The norm acts on the rounded row, and is rounded once more.
TEST(PreBigFuse, NormalisesTheRoundedRow) {
  for (const int64_t d : {1, 33, 64, 257}) {
    for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
      for (const DType weight_type : {DType::f32, DType::bf16}) {
        for (const std::string& impl : kernels()) {
          const Pre p(5, 4, d, type);
          const Array weight = p.weight.copy(weight_type);
          PreBigFuse params = p.params();
          params.layer_norm_weight = weight;
          params.layer_norm_eps = 1e-6;
          run(impl, params);
          const Pre plain = p.unfused(impl);
          EXPECT_EQ(p.post.bits() + p.comb.bits(), plain.post.bits() + plain.comb.bits());
          Array want(type, {5, d});
          for (int64_t t = 0; t < 5; ++t) {
            double squares = 0;
            for (int64_t c = 0; c < d; ++c) {
              squares += std::pow(plain.layer_input.get(t * d + c), 2);
            }
            const double r = 1 / std::sqrt(squares / static_cast<double>(d) + 1e-6);
            for (int64_t c = 0; c < d; ++c) {
              const double y = plain.layer_input.get(t * d + c) * r * weight.get(c);
              store_float(want.view().data, type, t * d + c, y);
            }
          }
          test::expect_close(impl, p.layer_input, want, impl);
        }
      }
    }
  }
}

TEST(PreBigFuse, ThreadsAndLayoutsChangeNoBit) {
  for (const auto& [T, d] : {std::pair<int, int>{300, 33}, {2, 3000}}) {
    for (const bool normalises : {false, true}) {
      for (const std::string& impl : kernels()) {
        const auto params = [&](const Pre& p) {
          PreBigFuse out = p.params();
          if (normalises) out.layer_norm_weight = p.weight, out.layer_norm_eps = 1e-6;
          return out;
        };
        const Pre p(T, 4, d, DType::bf16);
        run(impl, params(p));
        for (int threads = 2; threads <= 8; ++threads) {
          const Pre other(T, 4, d, DType::bf16);
          run(impl, params(other), threads);
          EXPECT_EQ(other.bits(), p.bits()) << impl << " " << threads;
        }
        for (const Layout& layout : test::kLayouts) {
          const Pre other(T, 4, d, DType::bf16, 2, 0, layout);
          run(impl, params(other));
          EXPECT_EQ(other.bits(), p.bits()) << impl << " " << layout.row_padding;
        }
      }
    }
  }
}

TEST(PreBigFuse, ATokenDependsOnItselfAlone) {
  for (const std::string& impl : kernels()) {
    const Pre whole(70, 4, 96, DType::bf16);
    run(impl, whole.params());
    for (const int64_t t : {0, 17, 69}) {
      const Pre one(1, 4, 96, DType::bf16);
      PreBigFuse p = one.params();
      p.mul_partial = whole.mul.view().slice(1, t, t + 1);
      p.sqr_partial = whole.sqr.view().slice(1, t, t + 1);
      p.residual = whole.residual.rows(t, t + 1);
      run(impl, p);
      EXPECT_EQ(one.layer_input.bits(), whole.layer_input.bits(t, t + 1)) << impl << " " << t;
      EXPECT_EQ(one.post.bits(), whole.post.bits(t, t + 1)) << impl << " " << t;
      EXPECT_EQ(one.comb.bits(), whole.comb.bits(t, t + 1)) << impl << " " << t;
    }
  }
}

TEST(PreBigFuse, NanStaysInItsToken) {
  Pre p(3, 4, 40, DType::bf16);
  p.sqr.set(1, kNan);  // split 0, token 1
  for (const std::string& impl : kernels()) {
    run(impl, p.params());
    for (int64_t i = 0; i < 120; ++i) {
      EXPECT_EQ(std::isnan(p.layer_input.get(i)), i / 40 == 1) << impl;
    }
    for (int64_t i = 0; i < 48; ++i) EXPECT_EQ(std::isnan(p.comb.get(i)), i / 16 == 1) << impl;
  }
}

TEST(PreBigFuse, NoTokensTouchNothing) {
  for (const std::string& impl : kernels()) run(impl, Pre(0, 4, 64, DType::bf16).params(), 2);
}

TEST(PreBigFuse, RefusesWhatTheContractForbids) {
  const Pre p(3, 4, 8, DType::bf16);
  Context context = Context::cpu(1);
  const auto refused = [&](const std::function<void(PreBigFuse&)>& change) {
    PreBigFuse params = p.params();
    change(params);
    return error_of([&] { pre_big_fuse(context, params); });
  };
  const Pre narrow(3, 3, 8, DType::bf16);
  EXPECT_EQ(refused([&](PreBigFuse& q) { q.mul_partial = narrow.mul, q.base = narrow.base; }),
            "mhc.pre_big_fuse: tensor 'mul_partial': expected N = n*n + 2*n = 24 columns, got "
            "F32[2,3,15]");
  const Pre uneven(3, 4, 8, DType::bf16, 2, 5);
  EXPECT_EQ(refused([&](PreBigFuse& q) { q.mul_partial = uneven.mul, q.sqr_partial = uneven.sqr; }),
            "mhc.pre_big_fuse: tensor 'mul_partial': expected G that divides n*d = 32, got "
            "F32[2,3,5,24]");
  EXPECT_EQ(refused([&](PreBigFuse& q) { q.layer_norm_weight = p.weight; }),
            "mhc.pre_big_fuse: attribute 'layer_norm_eps': expected a value with "
            "'layer_norm_weight', got none");
  EXPECT_EQ(refused([](PreBigFuse& q) { q.repeat = 0; }),
            "mhc.pre_big_fuse: attribute 'repeat': expected in [1,64], got 0");
  EXPECT_EQ(refused([](PreBigFuse& q) { q.layer_input = q.residual.select(1, 0); }),
            "mhc.pre_big_fuse: tensor 'layer_input': expected memory apart from 'residual', got "
            "overlapping memory");
  EXPECT_EQ(refused([](PreBigFuse&) {}).rfind("mhc.pre_big_fuse: workspace: expected at least ", 0),
            0U);
}

}  // namespace
}  // namespace ehc::mhc
