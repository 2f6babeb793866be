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

struct Conv {
  Shape s;
  Array value, weight, norm, mask, borders, state;
  Array out, new_state;

  explicit Conv(const Shape& shape, const std::vector<int32_t>& cu_seqlens = {}, uint32_t seed = 1)
      : s(shape),
        value(Array::random(s.type, {s.T, s.n, s.d}, seed)),
        weight(Array::random(s.weight_type, {s.n, s.d, s.w}, seed + 1, 0, 0.5F)),
        norm(Array::random(s.norm_type, {s.n, s.d}, seed + 2, 1, 0.25F)),
        mask(DType::boolean, {s.T}),
        borders(test::borders_of(cu_seqlens)),
        out(s.type, {s.T, s.n, s.d}) {
    const int64_t sequences = std::max<int64_t>(1, borders.size() - 1);
    const std::vector<int64_t> dims = {sequences, (s.w - 1) * s.dilation, s.n, s.d};
    state = Array(DType::f32, dims);
    new_state = Array(DType::f32, dims);
  }

  [[nodiscard]] ConvForward params() const {
    return {.gated_value = value,
            .conv_weight = weight,
            .conv_norm_weight = norm,
            .cu_seqlens = borders.size() > 0 ? Tensor(borders) : Tensor(),
            .image_token_mask = mask,
            .out = out,
            .dilation = s.dilation,
            .conv_eps = 1e-5};
  }
  [[nodiscard]] ConvForward with_state() const {
    ConvForward p = params();
    p.state = state;
    p.new_state = new_state;
    return p;
  }
};

void run(const std::string& impl, const ConvForward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  const Buffer workspace = test::workspace_for(context, p);
  conv_fwd(context, p);
}

template <class Body>
void for_each_case(const Body& body) {
  test::for_each_case("engram.conv_fwd", test::conv_shapes(), body);
}

TEST(ConvForward, EveryImplementationIsCloseToTheReference) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const Conv want(s, test::thirds(s.T));
    run("reference", want.with_state());
    const Conv got(s, test::thirds(s.T));
    run(impl, got.with_state());
    test::expect_close(impl, got.out, want.out, "out");
    test::expect_close(impl, got.new_state, want.new_state, "state");
  });
}

// The definition, written out for one channel.
TEST(ConvForward, TapsAreCausalAndStayInTheirSequence) {
  const Shape s{9, 1, 1, 3, 2, DType::f32, DType::f32, DType::f32};
  for (const std::string& impl : implementations("engram.conv_fwd")) {
    Conv conv(s, {0, 6, 9});
    run(impl, conv.params());
    for (int64_t t = 0; t < s.T; ++t) {
      const int64_t start = t < 6 ? 0 : 6;
      double c = 0;
      for (int64_t k = 0; k < 3; ++k) {
        const int64_t from = t - (2 - k) * 2;
        if (from < start) continue;
        const double v = conv.value.get(from);
        c += conv.weight.get(k) * (v / std::sqrt(v * v + 1e-5) * conv.norm.get(0));
      }
      EXPECT_NEAR(conv.out.get(t), conv.value.get(t) + c / (1 + std::exp(-c)), 2e-6)
          << impl << " " << t;
    }
  }
}

TEST(ConvForward, LayoutAndThreadsChangeNoBit) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const Conv plain(s);
    run(impl, plain.with_state());
    for (const int threads : {2, 3, 8}) {
      const Conv many(s);
      run(impl, many.with_state(), threads);
      EXPECT_EQ(many.out.bits(), plain.out.bits()) << threads << " threads";
      EXPECT_EQ(many.new_state.bits(), plain.new_state.bits()) << threads << " threads";
    }
    const Array value = plain.value.copy({.row_padding = 3, .offset = 1});
    const Array weight = plain.weight.copy({.row_padding = 2, .offset = 1});
    const Array norm = plain.norm.copy({.row_padding = 1, .offset = 3});
    const Array state = plain.state.copy({.row_padding = 5, .offset = 2});
    const Array out(s.type, {s.T, s.n, s.d}, {.row_padding = 7, .offset = 5});
    ConvForward p = plain.with_state();
    p.gated_value = value;
    p.conv_weight = weight;
    p.conv_norm_weight = norm;
    p.state = p.new_state = state;  // in place
    p.out = out;
    run(impl, p, 2);
    EXPECT_EQ(out.bits(), plain.out.bits()) << "strided";
    EXPECT_EQ(state.bits(), plain.new_state.bits()) << "strided, in place";
  });
}

TEST(ConvForward, LongRunsOnManyThreadsChangeNoBit) {
  for (const std::string& impl : implementations("engram.conv_fwd")) {
    if (impl.rfind("reference", 0) == 0) continue;
    const Shape s{300, 2, 96, 4, 3, DType::bf16, DType::bf16, DType::bf16};
    const Conv one(s, {0, 100, 101, 250, 300});
    run(impl, one.params());
    for (int threads = 2; threads <= 8; ++threads) {
      const Conv many(s, {0, 100, 101, 250, 300});
      run(impl, many.params(), threads);
      EXPECT_EQ(many.out.bits(), one.out.bits()) << impl << " " << threads;
    }
  }
}

// A sequence gives the same rows alone, and behind others in a batch.
TEST(ConvForward, ASequenceDependsOnItselfAlone) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const int64_t cut = s.T / 2;
    const Conv batch(s, {0, static_cast<int32_t>(cut), static_cast<int32_t>(s.T)});
    run(impl, batch.params());
    const std::string before = batch.out.bits(cut, s.T);
    const std::string first = batch.out.bits(0, cut);
    ConvForward p = batch.params();
    p.cu_seqlens = {};
    for (Tensor* t : {&p.gated_value, &p.out}) *t = t->slice(0, cut, s.T);
    p.image_token_mask = {};
    run(impl, p);
    EXPECT_EQ(batch.out.bits(cut, s.T), before);
    EXPECT_EQ(batch.out.bits(0, cut), first);
  });
}

// Any chunks with the state carried on give the bits of one pass; F32 outputs, any F32 state.
TEST(ConvForward, ChunksWithStateEqualOnePass) {
  for_each_case([](const std::string& impl, const Shape& s) {
    Conv whole(s);
    for (int64_t t = 0; t < s.T; ++t) whole.mask.element<uint8_t>(t) = t % 7 == 3;
    whole.state = Array::random(DType::f32, {1, (s.w - 1) * s.dilation, s.n, s.d}, 9);
    run(impl, whole.with_state());
    test::for_each_chunk_size(s.T, [&](const auto& feed) {
      const Conv pieces(s);
      const Array state = whole.state.copy();
      feed([&](int64_t begin, int64_t end) {
        ConvForward p = whole.params();
        p.gated_value = whole.value.rows(begin, end);
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

// Two sequences advance by different steps, one of them empty at times.
TEST(ConvForward, ChunksOfSeveralSequencesEqualOnePass) {
  for (const std::string& impl : implementations("engram.conv_fwd")) {
    const Shape s{20, 3, 40, 4, 3, DType::f32, DType::f32, DType::f32};
    const Conv whole(s, {0, 8, 20});
    run(impl, whole.with_state());
    const Conv pieces(s, {0, 8, 20});
    const Array state = pieces.state.copy();
    int64_t at[2] = {0, 8};
    const int64_t steps[][2] = {{3, 0}, {0, 5}, {5, 1}, {0, 6}};
    for (const auto& step : steps) {
      const int64_t tokens = step[0] + step[1];
      const Array value(s.type, {tokens, s.n, s.d});
      const Array out(s.type, {tokens, s.n, s.d});
      const auto row = static_cast<size_t>(s.n * s.d * 4);
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t from = t < step[0] ? at[0] + t : at[1] + t - step[0];
        std::memcpy(value.rows(t, t + 1).data, whole.value.rows(from, from + 1).data, row);
      }
      const int32_t borders[3] = {0, static_cast<int32_t>(step[0]), static_cast<int32_t>(tokens)};
      ConvForward p = whole.params();
      p.image_token_mask = {};
      p.gated_value = value;
      p.out = out;
      p.cu_seqlens = {borders, DType::i32, {3}};
      p.state = p.new_state = state;
      run(impl, p, 2);
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t to = t < step[0] ? at[0] + t : at[1] + t - step[0];
        std::memcpy(pieces.out.rows(to, to + 1).data, out.rows(t, t + 1).data, row);
      }
      at[0] += step[0];
      at[1] += step[1];
    }
    EXPECT_EQ(pieces.out.bits(), whole.out.bits()) << impl;
    EXPECT_EQ(state.bits(), whole.new_state.bits()) << impl;
  }
}

TEST(ConvForward, ZeroTapsPassTheValueThrough) {
  for_each_case([](const std::string& impl, const Shape& s) {
    Conv conv(s);
    conv.weight.fill(0);
    run(impl, conv.params());
    EXPECT_EQ(conv.out.bits(), conv.value.bits());
  });
}

// Masked rows are not read, give 0, and still count as positions: the others see zeros there.
TEST(ConvForward, MaskedTokensAreZerosThatCount) {
  for_each_case([](const std::string& impl, const Shape& s) {
    Conv masked(s);
    Conv zeroed(s);
    const auto is_masked = [](int64_t t) { return t % 3 == 1; };
    for (int64_t t = 0; t < s.T; ++t) {
      if (!is_masked(t)) continue;
      masked.mask.element<uint8_t>(t) = 1;
      for (int64_t i = t * s.n * s.d; i < (t + 1) * s.n * s.d; ++i) {
        masked.value.set(i, kNan);
        zeroed.value.set(i, 0);
      }
    }
    masked.out.fill(7);
    run(impl, masked.with_state());
    run(impl, zeroed.with_state());
    for (int64_t t = 0; t < s.T; ++t) {
      const std::string got = masked.out.bits(t, t + 1);
      EXPECT_EQ(got, is_masked(t) ? std::string(got.size(), '\0') : zeroed.out.bits(t, t + 1)) << t;
    }
    EXPECT_EQ(masked.new_state.bits(), zeroed.new_state.bits());
  });
}

TEST(ConvForward, NanAndInfinityReachWhatTheFormulaNames) {
  for (const std::string& impl : implementations("engram.conv_fwd")) {
    for (const float bad : {kNan, kInf}) {
      const Shape s{9, 3, 33, 3, 2, DType::f32, DType::f32, DType::f32};
      Conv conv(s);
      conv.value.set(2 * 99 + 33 + 32, bad);  // token 2, stream 1, last channel
      run(impl, conv.params());
      for (int64_t i = 0; i < conv.out.size(); ++i) {
        const int64_t t = i / 99;
        const bool row = i / 33 % 3 == 1 && (t == 2 || t == 4 || t == 6);
        // inf normalises its row to zeros, and itself to NaN
        const bool want = row && (std::isnan(bad) || i % 33 == 32);
        EXPECT_EQ(std::isnan(conv.out.get(i)), want) << impl << " " << bad << " at " << i;
      }
    }
  }
}

TEST(ConvForward, NoTokensKeepTheState) {
  for (const std::string& impl : implementations("engram.conv_fwd")) {
    const Shape s{0, 2, 5, 3, 2, DType::bf16, DType::bf16, DType::f32};
    Conv conv(s, {0, 0, 0});
    conv.state = Array::random(DType::f32, {2, 4, 2, 5}, 3);
    ConvForward p = conv.with_state();
    p.gated_value = p.out = Tensor(nullptr, DType::bf16, {0, 2, 5});
    p.image_token_mask = {};
    run(impl, p, 2);
    EXPECT_EQ(conv.new_state.bits(), conv.state.bits()) << impl;
  }
}

TEST(ConvForward, ATapBeyondTheSequenceIsLeftOutWhateverTheDilation) {
  for (const std::string& impl : implementations("engram.conv_fwd")) {
    const Shape far{5, 2, 9, 4, int64_t{1} << 62, DType::f32, DType::f32, DType::f32};
    const Shape near{5, 2, 9, 4, 5, DType::f32, DType::f32, DType::f32};
    const Conv want(near);
    run(impl, want.params());
    ConvForward p = want.params();
    p.dilation = far.dilation;
    const std::string bits = want.out.bits();
    run(impl, p);
    EXPECT_EQ(want.out.bits(), bits) << impl;
  }
}

TEST(ConvForward, RefusesWhatTheContractForbids) {
  const Shape s{6, 2, 8, 4, 3, DType::bf16, DType::bf16, DType::bf16};
  Conv g(s, {0, 2, 6});
  const auto refused = [&](const std::function<void(ConvForward&)>& change) {
    ConvForward p = g.with_state();
    change(p);
    return error_of([&] { run("", p); });
  };
  EXPECT_EQ(refused([](ConvForward&) {}), "none");
  EXPECT_EQ(refused([](ConvForward& p) { p.new_state = {}; }),
            "engram.conv_fwd: tensor 'state': expected F32[2,9,2,8], got none");
  EXPECT_EQ(refused([](ConvForward& p) { p.state = {}; }),
            "engram.conv_fwd: tensor 'state': expected no such output here (it needs state), got "
            "F32[2,9,2,8]");
  EXPECT_EQ(refused([](ConvForward& p) { p.dilation = 2; }),
            "engram.conv_fwd: tensor 'state': expected F32[2,6,2,8], got F32[2,9,2,8]");
  EXPECT_EQ(refused([](ConvForward& p) { p.cu_seqlens = {}; }),
            "engram.conv_fwd: tensor 'state': expected F32[1,9,2,8], got F32[2,9,2,8]");
  EXPECT_EQ(refused([](ConvForward& p) { p.dilation.reset(); }),
            "engram.conv_fwd: attribute 'dilation': expected a value, got none");
  EXPECT_EQ(refused([](ConvForward& p) { p.dilation = 0; }),
            "engram.conv_fwd: attribute 'dilation': expected >= 1, got 0");
  EXPECT_EQ(refused([](ConvForward& p) { p.out = p.gated_value; }),
            "engram.conv_fwd: tensor 'out': expected memory apart from 'gated_value', got "
            "overlapping memory");
  const auto borders = [&](std::vector<int32_t> list) {
    for (size_t i = 0; i < 3; ++i) g.borders.element<int32_t>(static_cast<int64_t>(i)) = list[i];
    return refused([](ConvForward&) {});
  };
  EXPECT_EQ(borders({1, 2, 6}),
            "engram.conv_fwd: tensor 'cu_seqlens': expected a first element 0, got 1 at position "
            "0");
  EXPECT_EQ(borders({0, 7, 6}),
            "engram.conv_fwd: tensor 'cu_seqlens': expected elements that do not decrease, got 6 "
            "at position 2");
  EXPECT_EQ(borders({0, 2, 5}),
            "engram.conv_fwd: tensor 'cu_seqlens': expected a last element T = 6, got 5 at "
            "position 2");
}

TEST(ConvForward, AsksForItsWorkspace) {
  const Shape s{6, 2, 8, 4, 3, DType::f32, DType::f32, DType::f32};
  const Conv g(s);
  Context context = context_for("");
  const size_t bytes = workspace_bytes(context, g.params());
  const std::vector<char> memory(bytes);
  context.set_workspace(const_cast<char*>(memory.data()), bytes - 1);
  EXPECT_EQ(error_of([&] { conv_fwd(context, g.params()); }),
            "engram.conv_fwd: workspace: expected at least " + std::to_string(bytes) +
                " bytes, got " + std::to_string(bytes - 1));
}

}  // namespace
}  // namespace ehc::engram
