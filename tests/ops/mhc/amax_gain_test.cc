#include "ehc/mhc/amax_gain.h"

#include "tests/ops/mhc/support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;
using test::kNan;

struct Gains {
  Array forward, backward, composite_forward, composite_backward;

  Gains(int64_t layers, int64_t tokens)
      : forward(DType::f32, {layers, tokens}),
        backward(DType::f32, {layers, tokens}),
        composite_forward(DType::f32, {tokens}),
        composite_backward(DType::f32, {tokens}) {}

  [[nodiscard]] std::string bits() const {
    return forward.bits() + backward.bits() + composite_forward.bits() + composite_backward.bits();
  }
};

Gains run(const std::string& impl, const Tensor& comb, int threads = 1) {
  Gains gains(comb.shape[0], comb.shape[1]);
  Context context = context_for(impl, threads);
  amax_gain(context, {.comb = comb,
                      .forward_gain = gains.forward,
                      .backward_gain = gains.backward,
                      .composite_forward_gain = gains.composite_forward,
                      .composite_backward_gain = gains.composite_backward});
  return gains;
}

// A map with one entry: stream `from` goes to stream `to`.
void put(Array& comb, int64_t layer, int64_t from, int64_t to, float x) {
  comb.set((layer * 4 + from) * 4 + to, x);
}

TEST(AmaxGain, FollowsTheStreams) {
  Array comb(DType::f32, {2, 1, 4, 4});
  put(comb, 0, 1, 2, -3);   // layer 0: 1 -> 2
  put(comb, 0, 0, 2, 4);    //          0 -> 2
  put(comb, 1, 2, 3, 0.5);  // layer 1: 2 -> 3
  put(comb, 1, 2, 0, 2);    //          2 -> 0
  for (const std::string& impl : implementations("mhc.amax_gain")) {
    const Gains gains = run(impl, comb);
    EXPECT_EQ(gains.forward.get(0), 7) << "stream 2 gets 3 + 4";
    EXPECT_EQ(gains.backward.get(0), 4) << "stream 0 gives 4";
    EXPECT_EQ(gains.forward.get(1), 2);
    EXPECT_EQ(gains.backward.get(1), 2.5);
    // Layer 0 comes first: 0 -> 3 is 2, 1 -> 3 is -1.5, 0 -> 0 is 8, 1 -> 0 is -6.
    EXPECT_EQ(gains.composite_forward.get(0), 14);
    EXPECT_EQ(gains.composite_backward.get(0), 10);
  }
}

TEST(AmaxGain, OfDoublyStochasticMapsIsOne) {
  for (const int64_t n : {1, 2, 3, 8}) {
    Array comb(DType::f32, {30, 5, n, n});
    // A mean of two permutations, which differ from layer to layer.
    for (int64_t m = 0; m < 150; ++m) {
      for (int64_t i = 0; i < n; ++i) {
        for (const int64_t o : {(i + m) % n, (n - 1 - i + m / 7) % n}) {
          comb.set((m * n + i) * n + o, comb.get((m * n + i) * n + o) + 0.5F);
        }
      }
    }
    for (const std::string& impl : implementations("mhc.amax_gain")) {
      const Gains gains = run(impl, comb, 2);
      for (int64_t k = 0; k < 150; ++k) {
        EXPECT_EQ(gains.forward.get(k), 1);
        EXPECT_EQ(gains.backward.get(k), 1);
      }
      for (int64_t t = 0; t < 5; ++t) {
        EXPECT_NEAR(gains.composite_forward.get(t), 1, 1e-6);
        EXPECT_NEAR(gains.composite_backward.get(t), 1, 1e-6);
      }
    }
  }
}

TEST(AmaxGain, WithoutLayersNothingGrows) {
  for (const std::string& impl : implementations("mhc.amax_gain")) {
    const Gains gains = run(impl, Tensor(nullptr, DType::f32, {0, 2, 3, 3}));
    EXPECT_EQ(gains.composite_forward.get(1), 1);
    EXPECT_EQ(gains.composite_backward.get(1), 1);
    run(impl, Tensor(nullptr, DType::f32, {3, 0, 4, 4}));
  }
}

TEST(AmaxGain, NanStaysInItsLayerAndToken) {
  Array comb = Array::random(DType::f32, {3, 2, 4, 4}, 1);
  comb.set(2 * 16 + 5, kNan);  // layer 1, token 0, from stream 1 to stream 1
  for (const std::string& impl : implementations("mhc.amax_gain")) {
    const Gains gains = run(impl, comb);
    for (int64_t k = 0; k < 6; ++k) {
      EXPECT_EQ(std::isnan(gains.forward.get(k)), k == 2);
      EXPECT_EQ(std::isnan(gains.backward.get(k)), k == 2);
    }
    for (int64_t t = 0; t < 2; ++t) {
      EXPECT_EQ(std::isnan(gains.composite_forward.get(t)), t == 0);
      EXPECT_EQ(std::isnan(gains.composite_backward.get(t)), t == 0);
    }
  }
}

TEST(AmaxGain, LayoutThreadsAndNeighboursChangeNoBit) {
  const Array comb = Array::random(DType::f32, {3, 700, 5, 5}, 1);
  for (const std::string& impl : implementations("mhc.amax_gain")) {
    const Gains plain = run(impl, comb);
    const Array strided = comb.copy({.row_padding = 3, .offset = 1});
    for (const int threads : {2, 3, 8}) EXPECT_EQ(run(impl, strided, threads).bits(), plain.bits());
    const Gains alone = run(impl, comb.view().slice(1, 611, 612));
    EXPECT_EQ(alone.composite_forward.bits(), plain.composite_forward.bits(611, 612));
  }
}

TEST(AmaxGain, RefusesOtherShapes) {
  const Array comb(DType::f32, {3, 2, 4, 5});
  EXPECT_EQ(error_of([&] { run("", comb); }),
            "mhc.amax_gain: tensor 'comb': expected F32[3,2,4,4], got F32[3,2,4,5]");
  const Array wide(DType::f32, {3, 2, 9, 9});
  EXPECT_EQ(error_of([&] { run("", wide); }),
            "mhc.amax_gain: tensor 'comb': expected n in [1,8], got F32[3,2,9,9]");
}

}  // namespace
}  // namespace ehc::mhc
