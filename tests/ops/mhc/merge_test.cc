#include "ehc/mhc/merge.h"

#include "tests/ops/mhc/mix_support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::kInf;
using test::kNan;
using test::Layout;

struct Merge {
  int64_t M, K;
  Array fn, weight, grad, fn_target, weight_target, merged, grad_fn, grad_weight;

  Merge(int64_t mixes, int64_t columns, Layout layout = {})
      : M(mixes),
        K(columns),
        fn(Array::random(DType::f32, {M, K}, 1).copy(layout)),
        weight(Array::random(DType::f32, {K}, 2, 1).copy(layout)),
        grad(Array::random(DType::f32, {M, K}, 3).copy(layout)),
        fn_target(Array::random(DType::f32, {M, K}, 4).copy(layout)),
        weight_target(Array::random(DType::f32, {K}, 5).copy(layout)),
        merged(DType::f32, {M, K}, layout),
        grad_fn(DType::f32, {M, K}, layout),
        grad_weight(DType::f32, {K}, layout) {}

  [[nodiscard]] MergeForward forward() const {
    return {.fn = fn, .norm_weight = weight, .fn_merged = merged};
  }
  [[nodiscard]] MergeBackward backward(bool adds) const {
    return {.grad_fn_merged = grad,
            .fn = fn,
            .norm_weight = weight,
            .grad_fn_acc = adds ? fn_target.view() : Tensor(),
            .grad_norm_weight_acc = adds ? weight_target.view() : Tensor(),
            .grad_fn = grad_fn,
            .grad_norm_weight = grad_weight};
  }
};

void run(const std::string& impl, const MergeForward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  merge_fwd(context, p);
}
void run(const std::string& impl, const MergeBackward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  merge_bwd(context, p);
}

constexpr std::pair<int, int> kShapes[] = {{1, 1},   {24, 33},  {80, 64},
                                           {3, 257}, {4, 1100}, {24, 7168}};

// The contract's order, one element at a time; there is one right result in fp32.
TEST(Merge, EveryKernelGivesTheBitsOfTheFormula) {
  for (const auto& [M, K] : kShapes) {
    for (const Layout& layout : test::kLayouts) {
      const Merge m(M, K, layout);
      for (const std::string& impl : test::exact_implementations("mhc.merge_fwd")) {
        SCOPED_TRACE(::testing::Message() << impl << " M=" << M << " K=" << K);
        run(impl, m.forward(), 3);
        for (const bool adds : {false, true}) {
          run(impl, m.backward(adds), 3);
          for (int64_t k = 0; k < K; ++k) {
            float sum = 0;
            for (int64_t j = 0; j < M; ++j) {
              const int64_t at = j * K + k;
              ASSERT_EQ(m.merged.get(at), m.fn.get(at) * m.weight.get(k));
              ASSERT_EQ(m.grad_fn.get(at), std::fma(m.grad.get(at), m.weight.get(k),
                                                    adds ? m.fn_target.get(at) : 0.0F));
              sum = std::fma(m.grad.get(at), m.fn.get(at), sum);
            }
            ASSERT_EQ(m.grad_weight.get(k), (adds ? m.weight_target.get(k) : 0) + sum);
          }
        }
      }
    }
  }
}

TEST(Merge, ThreadsAndPlaceChangeNoBit) {
  for (const std::string& impl : test::implementations("mhc.merge_bwd")) {
    const Merge m(24, 5000);
    run(impl, m.forward());
    run(impl, m.backward(true));
    const std::string want = m.merged.bits() + m.grad_fn.bits() + m.grad_weight.bits();
    for (int threads = 2; threads <= 8; ++threads) {
      const Merge other(24, 5000);
      run(impl, other.forward(), threads);
      MergeBackward p = other.backward(true);
      p.grad_fn = p.grad_fn_acc;
      p.grad_norm_weight = p.grad_norm_weight_acc;
      run(impl, p, threads);
      EXPECT_EQ(other.merged.bits() + other.fn_target.bits() + other.weight_target.bits(), want)
          << impl << " in place, " << threads;
    }
  }
}

TEST(MergeBackward, EqualsFiniteDifferences) {
  Merge m(3, 5);
  const auto loss = [&] {
    run("reference", m.forward());
    return test::inner_product(m.grad, m.merged);
  };
  const std::vector<double> of_fn = test::slopes(m.fn, loss);
  const std::vector<double> of_weight = test::slopes(m.weight, loss);
  for (const std::string& impl : test::implementations("mhc.merge_bwd")) {
    run(impl, m.backward(false));
    test::expect_slopes(m.grad_fn, of_fn, impl);
    test::expect_slopes(m.grad_weight, of_weight, impl);
  }
}

TEST(Merge, NanAndInfinityStayInTheirColumn) {
  for (const float bad : {kNan, kInf}) {
    Merge m(4, 100);
    m.fn.set(250, bad);  // row 2, column 50
    for (const std::string& impl : test::implementations("mhc.merge_bwd")) {
      run(impl, m.forward());
      run(impl, m.backward(false));
      for (int64_t i = 0; i < 400; ++i) {
        EXPECT_EQ(std::isfinite(m.merged.get(i)), i != 250) << impl;
        EXPECT_TRUE(std::isfinite(m.grad_fn.get(i))) << impl;
      }
      for (int64_t k = 0; k < 100; ++k) {
        EXPECT_EQ(std::isfinite(m.grad_weight.get(k)), k != 50) << impl;
      }
    }
  }
}

TEST(Merge, RefusesWhatTheContractForbids) {
  const Merge m(4, 8);
  Context context = Context::cpu(1);
  const Array wide(DType::f32, {81, 8});
  const Array narrow(DType::f32, {7});
  MergeForward f = m.forward();
  f.fn = wide;
  EXPECT_EQ(error_of([&] { merge_fwd(context, f); }),
            "mhc.merge_fwd: tensor 'fn': expected M in [1,80], got F32[81,8]");
  f = m.forward();
  f.norm_weight = narrow;
  EXPECT_EQ(error_of([&] { merge_fwd(context, f); }),
            "mhc.merge_fwd: tensor 'norm_weight': expected F32[8], got F32[7]");
  f = m.forward();
  f.fn_merged = f.fn;
  EXPECT_EQ(error_of([&] { merge_fwd(context, f); }),
            "mhc.merge_fwd: tensor 'fn_merged': expected memory apart from 'fn', got overlapping "
            "memory");
  MergeBackward b = m.backward(true);
  b.grad_fn = b.fn;
  EXPECT_EQ(error_of([&] { merge_bwd(context, b); }),
            "mhc.merge_bwd: tensor 'grad_fn': expected memory apart from 'fn', got overlapping "
            "memory");
  b = m.backward(true);
  b.grad_norm_weight = b.grad_fn_acc.select(0, 0);
  EXPECT_EQ(error_of([&] { merge_bwd(context, b); }),
            "mhc.merge_bwd: tensor 'grad_norm_weight': expected memory apart from 'grad_fn_acc', "
            "got overlapping memory");
}

}  // namespace
}  // namespace ehc::mhc
