#include "ehc/engram/momentum_update.h"

#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;
using test::kInf;
using test::kNan;

constexpr DType kTypes[] = {DType::f32, DType::bf16};

struct Moments {
  Array update;
  Array momentum;
};

// Each rounding written out. A product of fp32 numbers is exact in double, and so is its rounding.
Moments expected(const Array& grad, const Array& momentum, double beta, bool nesterov) {
  const Tensor g = grad.view();
  Moments out{Array(DType::f32, {g.shape[0], g.shape[1]}),
              Array(momentum.view().dtype, {g.shape[0], g.shape[1]})};
  const auto decay = static_cast<float>(beta);
  const auto fresh = static_cast<float>(1.0 - beta);
  for (int64_t i = 0; i < grad.size(); ++i) {
    const auto gained = static_cast<float>(double{fresh} * double{grad.get(i)});
    const float moved = std::fmaf(momentum.get(i), decay, gained);
    const auto kept = static_cast<float>(double{decay} * double{moved});
    out.update.set(i, nesterov ? std::fmaf(grad.get(i), fresh, kept) : moved);
    out.momentum.set(i, moved);
  }
  return out;
}

// Values of all sizes, zeros of both signs, subnormals, and numbers that are none.
Array numbers(DType type, int64_t rows, int64_t width, uint32_t seed) {
  Array values = Array::random(type, {rows, width}, seed);
  const float odd[] = {0.0F, -0.0F, 0x1p-140F, -0x1p-133F, 3e38F, kInf, -kInf, kNan, 1e-30F};
  for (int64_t i = 0; i < values.size(); i += 5) {
    values.set(i, odd[(i / 5 + seed) % std::size(odd)]);
  }
  return values;
}

void expect_bits(const Array& got, const Array& want, const std::string& what) {
  for (int64_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want.get(i)) && std::isnan(got.get(i))) continue;  // any NaN for NaN
    ASSERT_EQ(float_bits(got.get(i)), float_bits(want.get(i))) << what << " element " << i;
  }
}

TEST(MomentumUpdate, EveryKernelRoundsLikeTheFormula) {
  uint32_t seed = 1;
  for (const DType grad_type : kTypes) {
    for (const DType momentum_type : kTypes) {
      for (const int64_t width : {1, 7, 16, 31, 32, 33, 96, 257}) {
        const int64_t rows = width % 2 == 0 ? 33 : 2;
        const Array grad = numbers(grad_type, rows, width, ++seed);
        const Array momentum = numbers(momentum_type, rows, width, ++seed);
        for (const double beta : {0.0, 0.95, 1.0}) {
          const bool nesterov = seed % 4 != 0;
          const Moments want = expected(grad, momentum, beta, nesterov);
          for (const std::string& impl : implementations("engram.momentum_update")) {
            for (const test::Layout layout : {test::Layout{0, 0}, test::Layout{7, 1}}) {
              Moments got{Array(DType::f32, {rows, width}, layout),
                          Array(momentum_type, {rows, width}, layout)};
              Context context = context_for(impl, 3);
              momentum_update(context, {.grad = grad.copy(layout),
                                        .momentum = momentum.copy(layout),
                                        .update = got.update,
                                        .new_momentum = got.momentum,
                                        .beta = beta,
                                        .nesterov = nesterov});
              const std::string what = impl + " width " + std::to_string(width);
              expect_bits(got.update, want.update, what);
              expect_bits(got.momentum, want.momentum, what);
            }
          }
        }
      }
    }
  }
}

TEST(MomentumUpdate, InPlace) {
  const Array grad = Array::random(DType::bf16, {33, 70}, 1);
  for (const DType type : kTypes) {
    const Array momentum = Array::random(type, {33, 70}, 2);
    for (const std::string& impl : implementations("engram.momentum_update")) {
      Array update(DType::f32, {33, 70});
      Array apart(type, {33, 70});
      Array in_place = momentum.copy();
      Context context = context_for(impl, 2);
      for (const bool shared : {false, true}) {
        momentum_update(context, {.grad = grad,
                                  .momentum = shared ? in_place : momentum,
                                  .update = update,
                                  .new_momentum = shared ? in_place : apart,
                                  .beta = 0.9,
                                  .nesterov = true});
      }
      EXPECT_EQ(in_place.bits(), apart.bits()) << impl;
    }
  }
}

TEST(MomentumUpdate, OneMinusBetaIsFormedInDouble) {
  Array grad(DType::f32, {1, 1});
  grad.set(0, 1);
  const Array momentum(DType::bf16, {1, 1});
  for (const std::string& impl : implementations("engram.momentum_update")) {
    Array update(DType::f32, {1, 1});
    Array moved(DType::bf16, {1, 1});
    Context context = context_for(impl);
    momentum_update(context, {.grad = grad,
                              .momentum = momentum,
                              .update = update,
                              .new_momentum = moved,
                              .beta = 0.95,
                              .nesterov = false});
    EXPECT_EQ(update.get(0), 0.05F) << impl;  // 1 - 0.95F is 0.0500000119
    EXPECT_EQ(moved.get(0), 0x1.9ap-5F) << impl;
  }
}

TEST(MomentumUpdate, RefusesAnotherTypeForTheNewMomentum) {
  const Array grad(DType::f32, {2, 3});
  const Array momentum(DType::bf16, {2, 3});
  Array update(DType::f32, {2, 3});
  Context context = Context::cpu(1);
  MomentumUpdate call = {.grad = grad,
                         .momentum = momentum,
                         .update = update,
                         .new_momentum = grad,
                         .beta = 0.9,
                         .nesterov = true};
  EXPECT_EQ(error_of([&] { momentum_update(context, call); }),
            "engram.momentum_update: tensor 'momentum': expected BF16[2,3], got F32[2,3]");
  call.new_momentum = momentum;
  call.nesterov.reset();
  EXPECT_EQ(error_of([&] { momentum_update(context, call); }),
            "engram.momentum_update: attribute 'nesterov': expected a value, got none");
  call.nesterov = true;
  call.beta = 1.5;
  EXPECT_EQ(error_of([&] { momentum_update(context, call); }),
            "engram.momentum_update: attribute 'beta': expected a finite number in [0,1], got 1.5");
}

}  // namespace
}  // namespace ehc::engram
