#include "ehc/engram/kv_projection_bwd.h"

#include "ehc/engram/kv_projection.h"
#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;

constexpr const char* kName = "engram.kv_projection_bwd";

std::vector<std::string> implementations() { return test::implementations(kName); }

void run(const std::string& impl, int threads, const KvProjectionBackward& params) {
  Context context = context_for(impl, threads);
  const Buffer workspace = test::workspace_for(context, params);
  kv_projection_bwd(context, params);
}

struct Shape {
  int64_t tokens, depth, streams, width;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "T=" << s.tokens << " E=" << s.depth << " n=" << s.streams << " d=" << s.width;
}

const std::vector<Shape> kShapes = {{0, 16, 2, 8},    {1, 1, 1, 1},    {2, 48, 4, 19},
                                    {31, 33, 2, 96},  {33, 257, 3, 7}, {13, 70, 8, 64},
                                    {245, 24, 1, 70}, {600, 20, 2, 9}, {3, 530, 1, 130}};

struct Inputs {
  Array grad_kv, embedding, weight, weight_target, bias_target;
  bool accumulate;

  Inputs(const Shape& s, DType type, uint32_t seed)
      : grad_kv(Array::random(type, {s.tokens, s.streams + 1, s.width}, seed)),
        embedding(Array::random(type, {s.tokens, s.depth}, seed + 1)),
        weight(Array::random(type, {s.streams + 1, s.width, s.depth}, seed + 2, 0, 0.1F)),
        weight_target(Array::random(DType::f32, {s.streams + 1, s.width, s.depth}, seed + 3)),
        bias_target(Array::random(DType::f32, {s.streams + 1, s.width}, seed + 4)),
        accumulate(seed % 2 == 0) {}
};

struct Outputs {
  Array embedding, weight, bias;

  Outputs(const Shape& s, DType type, test::Layout layout = {})
      : embedding(type, {s.tokens, s.depth}, layout),
        weight(DType::f32, {s.streams + 1, s.width, s.depth}, layout),
        bias(DType::f32, {s.streams + 1, s.width}, layout) {
    for (Array* array : {&embedding, &weight, &bias}) array->fill(7);
  }
  [[nodiscard]] std::string bits() const { return embedding.bits() + weight.bits() + bias.bits(); }
};

KvProjectionBackward params_of(const Inputs& in, const Outputs& out) {
  return {.grad_kv = in.grad_kv,
          .embedding = in.embedding,
          .weight = in.weight,
          .grad_weight_acc = in.accumulate ? in.weight_target : Tensor{},
          .grad_bias_acc = in.accumulate ? in.bias_target : Tensor{},
          .grad_embedding = out.embedding,
          .grad_weight = out.weight,
          .grad_bias = out.bias};
}

// Every implementation against double sums; the same bits for any threads, strides and alignment,
// and in place.
TEST(KvProjectionBackward, IsExactToFp32OnAnyThreads) {
  uint32_t seed = 1;
  for (const Shape& s : kShapes) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      const Inputs in(s, type, seed += 7);
      const Outputs expected(s, type);
      run("reference", 1, params_of(in, expected));
      for (const std::string& impl : implementations()) {
        std::ostringstream text;
        text << impl << " " << name_of(type) << " " << s;
        SCOPED_TRACE(text.str());
        // Hundreds of terms that nearly cancel: the room of plain fp32 sums.
        const std::string room =
            s.tokens + (s.streams + 1) * s.width > 200 ? "reference.f32" : impl;
        const Outputs got(s, type);
        run(impl, 1, params_of(in, got));
        test::expect_close(room, got.embedding, expected.embedding, "embedding");
        test::expect_close(room, got.weight, expected.weight, "weight");
        test::expect_close(room, got.bias, expected.bias, "bias");
        for (const int threads : {2, 3, 8}) {
          const test::Layout layout = {threads, threads % 3};
          Inputs other = {s, type, seed};
          for (Array* array : {&other.grad_kv, &other.embedding, &other.weight,
                               &other.weight_target, &other.bias_target}) {
            *array = array->copy(layout);
          }
          const Outputs again(s, type, layout);
          KvProjectionBackward params = params_of(other, again);
          if (threads == 8 && in.accumulate) {
            params.grad_weight = params.grad_weight_acc;
            params.grad_bias = params.grad_bias_acc;
          }
          run(impl, threads, params);
          if (threads == 8 && in.accumulate) {
            EXPECT_EQ(other.weight_target.bits() + other.bias_target.bits(),
                      got.weight.bits() + got.bias.bits());
          } else {
            EXPECT_EQ(again.bits(), got.bits()) << threads;
          }
        }
      }
    }
  }
}

// Long sums, over (j, i) and over t, still meet the default rule of `ehc op --check`.
TEST(KvProjectionBackward, LongSumsStayExactToFp32) {
  for (const Shape s : {Shape{6, 12, 4, 1500}, {5000, 12, 1, 8}}) {
    const Inputs in(s, DType::f32, 1);
    const Outputs expected(s, DType::f32);
    run("reference", 2, params_of(in, expected));
    for (const std::string& impl : implementations()) {
      if (impl == "reference.f32") continue;  // serial sums
      const Outputs got(s, DType::f32);
      run(impl, 2, params_of(in, got));
      test::expect_close(impl, got.embedding, expected.embedding, impl);
      test::expect_close(impl, got.weight, expected.weight, impl);
      test::expect_close(impl, got.bias, expected.bias, impl);
    }
  }
}

// With the built-in product a token's gradient does not depend on the batch at all.
TEST(KvProjectionBackward, BuiltinTokensDoNotDependOnTheBatch) {
  const Shape s = {500, 130, 2, 20};
  const Inputs in(s, DType::bf16, 1);
  const Outputs batch(s, DType::bf16);
  run("cpu.builtin", 2, params_of(in, batch));
  for (const int64_t t : {0, 11, 12, 239, 240, 499}) {
    const Outputs alone({1, 130, 2, 20}, DType::bf16);
    KvProjectionBackward params = params_of(in, alone);
    params.grad_kv = in.grad_kv.rows(t, t + 1);
    params.embedding = in.embedding.rows(t, t + 1);
    run("cpu.builtin", 1, params);
    EXPECT_EQ(alone.embedding.bits(), batch.embedding.bits(t, t + 1)) << t;
  }
}

// The products are the forward's transposes: <kv, g> as a function of e, W and b. Exact for small
// integers.
TEST(KvProjectionBackward, IsTheTransposeOfTheForward) {
  const Shape s = {9, 14, 2, 5};
  Inputs in(s, DType::f32, 1);
  std::mt19937 generator(3);
  Array bias(DType::f32, {3, 5});
  for (Array* array : {&in.grad_kv, &in.embedding, &in.weight, &bias}) {
    for (int64_t i = 0; i < array->size(); ++i) {
      array->set(i, static_cast<float>(generator() % 9) - 4);
    }
  }
  const auto inner = [](const Array& x, const Array& y) {
    float sum = 0;
    for (int64_t i = 0; i < x.size(); ++i) sum += x.get(i) * y.get(i);
    return sum;
  };
  for (const std::string& impl : implementations()) {
    const Outputs out(s, DType::f32);
    run(impl, 1, params_of(in, out));
    Array kv(DType::f32, {9, 3, 5});
    Context context = context_for("reference");
    kv_projection_fwd(context, {.embedding = in.embedding, .weight = in.weight, .kv = kv});
    EXPECT_EQ(inner(kv, in.grad_kv), inner(in.embedding, out.embedding)) << impl;
    EXPECT_EQ(inner(kv, in.grad_kv), inner(in.weight, out.weight)) << impl;
    const Array with_bias(DType::f32, {9, 3, 5});
    kv_projection_fwd(
        context, {.embedding = in.embedding, .weight = in.weight, .bias = bias, .kv = with_bias});
    EXPECT_EQ(inner(with_bias, in.grad_kv) - inner(kv, in.grad_kv), inner(bias, out.bias)) << impl;
  }
}

TEST(KvProjectionBackward, NanReachesItsOwnOutputsOnly) {
  const Shape s = {3, 40, 1, 5};
  Inputs in(s, DType::f32, 1);
  in.grad_kv.set(13, test::kNan);  // token 1, branch 0, element 3
  for (const std::string& impl : implementations()) {
    const Outputs out(s, DType::f32);
    run(impl, 1, params_of(in, out));
    for (int64_t i = 0; i < 120; ++i) {
      EXPECT_EQ(std::isnan(out.embedding.get(i)), i / 40 == 1) << impl << i;
    }
    for (int64_t i = 0; i < 400; ++i) {
      EXPECT_EQ(std::isnan(out.weight.get(i)), i / 40 == 3) << impl << i;
    }
    for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(std::isnan(out.bias.get(i)), i == 3) << impl << i;
  }
}

TEST(KvProjectionBackward, RefusesASmallWorkspace) {
  const Shape s = {3, 40, 1, 5};
  const Inputs in(s, DType::f32, 1);
  const Outputs out(s, DType::f32);
  Context context = context_for("cpu.builtin");
  const size_t bytes = workspace_bytes(context, params_of(in, out));
  const Buffer workspace(context, bytes);
  context.set_workspace(workspace.data(), bytes - 1);
  EXPECT_EQ(error_of([&] { kv_projection_bwd(context, params_of(in, out)); }),
            "engram.kv_projection_bwd: workspace: expected at least " + std::to_string(bytes) +
                " bytes, got " + std::to_string(bytes - 1));
}

}  // namespace
}  // namespace ehc::engram
