#include "ehc/mhc/expand.h"

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

void run(const std::string& impl, const ExpandForward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  expand_fwd(context, p);
}
void run(const std::string& impl, const ExpandBackward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  expand_bwd(context, p);
}

TEST(Expand, CopiesEveryBit) {
  for (const Shape& s : test::stream_shapes()) {
    Array hidden = Array::random(s.type, {s.T, s.d}, 1);
    // A signalling NaN with a payload, which arithmetic would change.
    if (s.type == DType::f32) {
      hidden.element<uint32_t>(0) = 0x7f812345U;
    } else {
      hidden.element<uint16_t>(0) = s.type == DType::f16 ? 0x7c12 : 0x7f92;
    }
    std::string want;
    for (int64_t t = 0; t < s.T; ++t) {
      for (int64_t i = 0; i < s.n; ++i) want += hidden.bits(t, t + 1);
    }
    for (const std::string& impl : implementations("mhc.expand_fwd")) {
      for (const Layout& layout : test::kLayouts) {
        const Array from = hidden.copy(layout);
        const Array residual(s.type, {s.T, s.n, s.d}, layout);
        run(impl, {.hidden = from, .residual = residual, .n = s.n}, 3);
        EXPECT_EQ(residual.bits(), want) << impl << " " << s;
      }
    }
  }
}

TEST(ExpandBackward, EveryKernelAddsInTheOrderOfTheStreams) {
  for (const Shape& s : test::stream_shapes()) {
    const Array grad = Array::random(s.type, {s.T, s.n, s.d}, 1);
    Array want(s.type, {s.T, s.d});
    for (int64_t k = 0; k < want.size(); ++k) {
      float sum = 0;
      for (int64_t i = 0; i < s.n; ++i) sum += grad.get((k / s.d * s.n + i) * s.d + k % s.d);
      want.set(k, sum);
    }
    for (const std::string& impl : exact_implementations("mhc.expand_bwd")) {
      for (const Layout& layout : test::kLayouts) {
        const Array from = grad.copy(layout);
        const Array hidden(s.type, {s.T, s.d}, layout);
        run(impl, {.grad_residual = from, .grad_hidden = hidden}, 3);
        EXPECT_EQ(hidden.bits(), want.bits()) << impl << " " << s;
      }
    }
    const Array exact(s.type, {s.T, s.d});
    run("reference", {.grad_residual = grad, .grad_hidden = exact});
    test::expect_close("cpu", want, exact, "reference");
  }
}

TEST(ExpandBackward, EqualsFiniteDifferences) {
  Array hidden = Array::random(DType::f32, {3, 5}, 1);
  const Array grad = Array::random(DType::f32, {3, 4, 5}, 2);
  const Array residual(DType::f32, {3, 4, 5});
  const auto loss = [&] {
    run("reference", {.hidden = hidden, .residual = residual, .n = 4});
    return test::inner_product(grad, residual);
  };
  const std::vector<double> of_hidden = test::slopes(hidden, loss);
  for (const std::string& impl : implementations("mhc.expand_bwd")) {
    const Array grad_hidden(DType::f32, {3, 5});
    run(impl, {.grad_residual = grad, .grad_hidden = grad_hidden});
    test::expect_slopes(grad_hidden, of_hidden, impl);
  }
}

TEST(ExpandBackward, NanAndInfinityStayInTheirColumn) {
  for (const float bad : {kNan, kInf, -kInf}) {
    Array grad = Array::random(DType::bf16, {2, 4, 97}, 1);
    grad.set(3 * 97 + 96, bad);  // token 0, stream 3, last column
    for (const std::string& impl : implementations("mhc.expand_bwd")) {
      const Array hidden(DType::bf16, {2, 97});
      run(impl, {.grad_residual = grad, .grad_hidden = hidden});
      for (int64_t i = 0; i < 2 * 97; ++i) {
        EXPECT_EQ(std::isfinite(hidden.get(i)), i != 96) << impl << " " << i;
      }
    }
  }
}

// Few wide tokens are cut by columns.
TEST(Expand, ThreadsChangeNoBit) {
  const Array hidden = Array::random(DType::bf16, {2, 5001}, 1);
  for (const std::string& impl : implementations("mhc.expand_fwd")) {
    std::string want;
    for (int threads = 1; threads <= 8; ++threads) {
      const Array residual(DType::bf16, {2, 4, 5001});
      const Array back(DType::bf16, {2, 5001});
      run(impl, {.hidden = hidden, .residual = residual, .n = 4}, threads);
      run(impl, {.grad_residual = residual, .grad_hidden = back}, threads);
      const std::string got = residual.bits() + back.bits();
      if (threads == 1) want = got;
      EXPECT_EQ(got, want) << impl << " " << threads;
    }
  }
}

TEST(Expand, NoTokensTouchNothing) {
  for (const std::string& impl : implementations("mhc.expand_fwd")) {
    const Tensor row(nullptr, DType::f16, {0, 64});
    const Tensor streams(nullptr, DType::f16, {0, 4, 64});
    run(impl, {.hidden = row, .residual = streams, .n = 4}, 2);
    run(impl, {.grad_residual = streams, .grad_hidden = row}, 2);
  }
}

TEST(Expand, RefusesWhatTheContractForbids) {
  const Array hidden(DType::bf16, {3, 8});
  const Array residual(DType::bf16, {3, 4, 8});
  const auto refused = [&](const ExpandForward& p) { return error_of([&] { run("", p); }); };
  EXPECT_EQ(refused({.hidden = hidden, .residual = residual}),
            "mhc.expand_fwd: attribute 'n': expected a value, got none");
  for (const int64_t n : {0, 9}) {
    EXPECT_EQ(refused({.hidden = hidden, .residual = residual, .n = n}),
              "mhc.expand_fwd: attribute 'n': expected in [1,8], got " + std::to_string(n));
  }
  EXPECT_EQ(refused({.hidden = hidden, .residual = residual, .n = 3}),
            "mhc.expand_fwd: tensor 'residual': expected BF16[3,3,8], got BF16[3,4,8]");
  EXPECT_EQ(refused({.hidden = residual.view().select(1, 0), .residual = residual, .n = 4}),
            "mhc.expand_fwd: tensor 'residual': expected memory apart from 'hidden', got "
            "overlapping memory");
}

}  // namespace
}  // namespace ehc::mhc
