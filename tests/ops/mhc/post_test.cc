#include "ehc/mhc/post.h"

#include "tests/ops/mhc/support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::exact_implementations;
using test::implementations;
using test::kInf;
using test::kNan;
using test::Layout;
using Shape = test::StreamShape;

// Inputs of both calls and their outputs.
struct Post {
  Shape s;
  Array layer_output, residual, post, comb, grad;
  Array new_residual, grad_layer_output, grad_residual, grad_post, grad_comb;

  explicit Post(const Shape& shape, uint32_t seed = 1)
      : s(shape),
        layer_output(Array::random(s.type, {s.T, s.d}, seed)),
        residual(Array::random(s.type, {s.T, s.n, s.d}, seed + 1)),
        post(Array::random(DType::f32, {s.T, s.n}, seed + 2)),
        comb(Array::random(DType::f32, {s.T, s.n, s.n}, seed + 3)),
        grad(Array::random(s.type, {s.T, s.n, s.d}, seed + 4)),
        new_residual(s.type, {s.T, s.n, s.d}),
        grad_layer_output(s.type, {s.T, s.d}),
        grad_residual(s.type, {s.T, s.n, s.d}),
        grad_post(DType::f32, {s.T, s.n}),
        grad_comb(DType::f32, {s.T, s.n, s.n}) {}

  [[nodiscard]] PostForward forward() const {
    return {.layer_output = layer_output,
            .residual = residual,
            .post = post,
            .comb = comb,
            .new_residual = new_residual};
  }
  [[nodiscard]] PostBackward backward() const {
    return {.grad_new_residual = grad,
            .layer_output = layer_output,
            .residual = residual,
            .post = post,
            .comb = comb,
            .grad_layer_output = grad_layer_output,
            .grad_residual = grad_residual,
            .grad_post = grad_post,
            .grad_comb = grad_comb};
  }
  [[nodiscard]] std::string gradient_bits() const {
    return grad_layer_output.bits() + grad_residual.bits() + grad_post.bits() + grad_comb.bits();
  }
};

void run(const std::string& impl, const PostForward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  post_fwd(context, p);
}
void run(const std::string& impl, const PostBackward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  post_bwd(context, p);
}

// The contract's order, one element at a time.
Array mixed(const Post& p) {
  const auto [T, n, d, type] = p.s;
  Array out(type, {T, n, d});
  for (int64_t k = 0; k < out.size(); ++k) {
    const int64_t t = k / d / n;
    const int64_t o = k / d % n;
    float sum = p.post.get(t * n + o) * p.layer_output.get(t * d + k % d);
    for (int64_t i = 0; i < n; ++i) {
      sum = std::fma(p.comb.get((t * n + i) * n + o), p.residual.get((t * n + i) * d + k % d), sum);
    }
    out.set(k, sum);
  }
  return out;
}

// sum_o coefficients[row, o] * grad_o for rows of the layer output or of the streams.
Array gradient(const Post& p, const Array& coefficients, int64_t rows) {
  const auto [T, n, d, type] = p.s;
  Array out(type, {T, rows, d});
  for (int64_t k = 0; k < out.size(); ++k) {
    float sum = 0;
    for (int64_t o = 0; o < n; ++o) {
      sum = std::fma(coefficients.get(k / d * n + o),
                     p.grad.get((k / d / rows * n + o) * d + k % d), sum);
    }
    out.set(k, sum);
  }
  return out;
}

TEST(Post, EveryKernelGivesTheBitsOfTheFormula) {
  for (const Shape& s : test::stream_shapes()) {
    const Post p(s);
    const std::string want = mixed(p).bits();
    for (const std::string& impl : exact_implementations("mhc.post_fwd")) {
      for (const Layout& layout : test::kLayouts) {
        const Array layer_output = p.layer_output.copy(layout);
        const Array residual = p.residual.copy(layout);
        const Array post = p.post.copy(layout);
        const Array comb = p.comb.copy(layout);
        const Array out(s.type, {s.T, s.n, s.d}, layout);
        PostForward call = {.layer_output = layer_output,
                            .residual = residual,
                            .post = post,
                            .comb = comb,
                            .new_residual = out};
        run(impl, call, 3);
        EXPECT_EQ(out.bits(), want) << impl << " " << s;
        call.new_residual = residual;
        run(impl, call, 3);
        EXPECT_EQ(residual.bits(), want) << "in place, " << impl << " " << s;
      }
    }
  }
}

TEST(PostBackward, EveryKernelGivesTheBitsOfTheFormula) {
  for (const Shape& s : test::stream_shapes()) {
    const Post p(s);
    const Post exact(s);
    run("reference", exact.backward());
    const std::string grad_layer_output = gradient(p, p.post, 1).bits();
    const std::string grad_residual = gradient(p, p.comb, s.n).bits();
    for (const std::string& impl : exact_implementations("mhc.post_bwd")) {
      SCOPED_TRACE(::testing::Message() << impl << " " << s);
      run(impl, p.backward());
      EXPECT_EQ(p.grad_layer_output.bits(), grad_layer_output);
      EXPECT_EQ(p.grad_residual.bits(), grad_residual);
      // A sum that cancels is as exact as its terms are large.
      auto rule = cli::default_tolerance(exact.grad_comb);
      rule.abs = 1e-6 * static_cast<double>(s.d);
      EXPECT_TRUE(cli::compare(p.grad_post, exact.grad_post, rule, false).equal);
      EXPECT_TRUE(cli::compare(p.grad_comb, exact.grad_comb, rule, false).equal);

      const std::string want = p.gradient_bits();
      for (const Layout& layout : test::kLayouts) {
        const Array grad = p.grad.copy(layout);
        const Array layer_output = p.layer_output.copy(layout);
        const Array residual = p.residual.copy(layout);
        const Array post = p.post.copy(layout);
        const Array comb = p.comb.copy(layout);
        const Array of_layer(s.type, {s.T, s.d}, layout);
        const Array of_residual(s.type, {s.T, s.n, s.d}, layout);
        const Array of_post(DType::f32, {s.T, s.n}, layout);
        const Array of_comb(DType::f32, {s.T, s.n, s.n}, layout);
        run(impl,
            {.grad_new_residual = grad,
             .layer_output = layer_output,
             .residual = residual,
             .post = post,
             .comb = comb,
             .grad_layer_output = of_layer,
             .grad_residual = of_residual,
             .grad_post = of_post,
             .grad_comb = of_comb},
            3);
        EXPECT_EQ(of_layer.bits() + of_residual.bits() + of_post.bits() + of_comb.bits(), want)
            << layout.offset;
      }
    }
  }
}

// Few wide tokens are cut by columns; the sums of the backward pass are not.
TEST(Post, ThreadsChangeNoBit) {
  for (const Shape& s : {Shape{1, 4, 5003, DType::bf16}, Shape{3, 2, 2048, DType::f32},
                         Shape{37, 5, 96, DType::f16}}) {
    const Post p(s);
    for (const std::string& impl : implementations("mhc.post_fwd")) {
      run(impl, p.forward());
      run(impl, p.backward());
      const std::string want = p.new_residual.bits() + p.gradient_bits();
      for (int threads = 2; threads <= 8; ++threads) {
        const Post other(s);
        run(impl, other.forward(), threads);
        run(impl, other.backward(), threads);
        EXPECT_EQ(other.new_residual.bits() + other.gradient_bits(), want)
            << impl << " " << threads;
      }
    }
  }
}

TEST(Post, ATokenDependsOnItselfAlone) {
  for (const Shape& s : {Shape{7, 4, 257, DType::bf16}, Shape{7, 3, 64, DType::f32}}) {
    const Post whole(s);
    for (const std::string& impl : implementations("mhc.post_fwd")) {
      run(impl, whole.forward());
      run(impl, whole.backward());
      for (int64_t t = 0; t < s.T; ++t) {
        const Post one(s);
        const auto row = [&](const Array& array) { return array.rows(t, t + 1); };
        run(impl, {.layer_output = row(one.layer_output),
                   .residual = row(one.residual),
                   .post = row(one.post),
                   .comb = row(one.comb),
                   .new_residual = one.new_residual.rows(0, 1)});
        run(impl, {.grad_new_residual = row(one.grad),
                   .layer_output = row(one.layer_output),
                   .residual = row(one.residual),
                   .post = row(one.post),
                   .comb = row(one.comb),
                   .grad_layer_output = one.grad_layer_output.rows(0, 1),
                   .grad_residual = one.grad_residual.rows(0, 1),
                   .grad_post = one.grad_post.rows(0, 1),
                   .grad_comb = one.grad_comb.rows(0, 1)});
        const auto expect_row = [&](const Array& got, const Array& want) {
          EXPECT_EQ(got.bits(0, 1), want.bits(t, t + 1)) << impl << " " << t;
        };
        expect_row(one.new_residual, whole.new_residual);
        expect_row(one.grad_layer_output, whole.grad_layer_output);
        expect_row(one.grad_residual, whole.grad_residual);
        expect_row(one.grad_post, whole.grad_post);
        expect_row(one.grad_comb, whole.grad_comb);
      }
    }
  }
}

TEST(PostBackward, EqualsFiniteDifferences) {
  for (const int64_t n : {1, 2, 3, 4}) {
    Post p({3, n, 5, DType::f32});
    const auto loss = [&] {
      run("reference", p.forward());
      return test::inner_product(p.grad, p.new_residual);
    };
    const std::vector<double> of_layer = test::slopes(p.layer_output, loss);
    const std::vector<double> of_residual = test::slopes(p.residual, loss);
    const std::vector<double> of_post = test::slopes(p.post, loss);
    const std::vector<double> of_comb = test::slopes(p.comb, loss);
    for (const std::string& impl : implementations("mhc.post_bwd")) {
      run(impl, p.backward());
      test::expect_slopes(p.grad_layer_output, of_layer, impl);
      test::expect_slopes(p.grad_residual, of_residual, impl);
      test::expect_slopes(p.grad_post, of_post, impl);
      test::expect_slopes(p.grad_comb, of_comb, impl);
    }
  }
}

TEST(Post, NanAndInfinityStayInTheirColumnAndToken) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t d : {7, 96, 257}) {
      for (const float bad : {kNan, kInf, -kInf}) {
        Post p({2, 4, d, type});
        p.residual.set(2 * d + d - 1, bad);  // token 0, stream 2, last column
        for (const std::string& impl : implementations("mhc.post_fwd")) {
          run(impl, p.forward());
          run(impl, p.backward());
          for (int64_t i = 0; i < 8 * d; ++i) {
            const bool touched = i < 4 * d && i % d == d - 1;
            EXPECT_EQ(std::isfinite(p.new_residual.get(i)), !touched) << impl << " " << i;
            EXPECT_TRUE(std::isfinite(p.grad_residual.get(i))) << impl << " " << i;
          }
          for (int64_t i = 0; i < 32; ++i) {
            EXPECT_EQ(std::isfinite(p.grad_comb.get(i)), i / 4 != 2) << impl << " " << i;
          }
          for (int64_t i = 0; i < 8; ++i) EXPECT_TRUE(std::isfinite(p.grad_post.get(i))) << impl;
        }
      }
    }
  }
}

TEST(Post, NoTokensTouchNothing) {
  const Tensor none(nullptr, DType::bf16, {0, 4, 64});
  const Tensor row(nullptr, DType::bf16, {0, 64});
  const Tensor post(nullptr, DType::f32, {0, 4});
  const Tensor comb(nullptr, DType::f32, {0, 4, 4});
  for (const std::string& impl : implementations("mhc.post_fwd")) {
    run(impl,
        {.layer_output = row, .residual = none, .post = post, .comb = comb, .new_residual = none},
        2);
    run(impl,
        {.grad_new_residual = none,
         .layer_output = row,
         .residual = none,
         .post = post,
         .comb = comb,
         .grad_layer_output = row,
         .grad_residual = none,
         .grad_post = post,
         .grad_comb = comb},
        2);
  }
}

TEST(Post, RefusesWhatTheContractForbids) {
  const Post made({3, 4, 8, DType::bf16});
  const auto refused = [&](const std::function<void(PostForward&)>& change) {
    PostForward p = made.forward();
    change(p);
    return error_of([&] { run("", p); });
  };
  EXPECT_EQ(refused([](PostForward&) {}), "none");
  const Array wide(DType::bf16, {3, 9, 8});
  EXPECT_EQ(refused([&](PostForward& p) { p.residual = wide; }),
            "mhc.post_fwd: tensor 'residual': expected n in [1,8], got BF16[3,9,8]");
  const Array comb(DType::f32, {3, 4, 5});
  EXPECT_EQ(refused([&](PostForward& p) { p.comb = comb; }),
            "mhc.post_fwd: tensor 'comb': expected F32[3,4,4], got F32[3,4,5]");
  const Array single(DType::f32, {3, 4, 8});
  EXPECT_EQ(refused([&](PostForward& p) { p.residual = single; }),
            "mhc.post_fwd: tensor 'residual': expected BF16[3,n,8], got F32[3,4,8]");
  EXPECT_EQ(refused([](PostForward& p) { p.layer_output = p.new_residual.select(1, 0); }),
            "mhc.post_fwd: tensor 'new_residual': expected memory apart from 'layer_output', got "
            "overlapping memory");
  // In place is the same view, not one that overlaps.
  const Array long_residual(DType::bf16, {4, 4, 8});
  EXPECT_EQ(refused([&](PostForward& p) {
              p.residual = long_residual.rows(0, 3);
              p.new_residual = long_residual.rows(1, 4);
            }),
            "mhc.post_fwd: tensor 'new_residual': expected memory apart from 'residual' or exactly "
            "the same view, got overlapping memory");
  PostBackward p = made.backward();
  p.grad_residual = p.residual;
  EXPECT_EQ(error_of([&] { run("", p); }),
            "mhc.post_bwd: tensor 'grad_residual': expected memory apart from 'residual', got "
            "overlapping memory");
}

}  // namespace
}  // namespace ehc::mhc
