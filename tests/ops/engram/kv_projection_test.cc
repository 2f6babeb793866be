#include "ehc/engram/kv_projection.h"

#include "ehc/memory.h"
#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::error_of;

constexpr const char* kName = "engram.kv_projection_fwd";

std::vector<std::string> implementations() { return test::implementations(kName); }

void project(const std::string& implementation, int threads, const KvProjectionForward& params) {
  Context context = test::context_for(implementation, threads);
  const Buffer workspace(context, workspace_bytes(context, params));
  context.set_workspace(workspace.data(), workspace.bytes());
  kv_projection_fwd(context, params);
}

struct Shape {
  int64_t tokens, depth, streams, width;
};

// Every implementation against double sums; the same bits for any threads, strides and alignment.
TEST(KvProjection, IsExactToFp32OnAnyThreads) {
  uint32_t seed = 1;
  for (const Shape s : {Shape{0, 16, 2, 8},
                        {1, 1, 1, 1},
                        {2, 48, 4, 19},
                        {31, 33, 2, 96},
                        {33, 257, 3, 100},
                        {13, 700, 8, 64},
                        {481, 40, 1, 17}}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      const Array embedding = Array::random(type, {s.tokens, s.depth}, ++seed);
      const Array weight = Array::random(type, {s.streams + 1, s.width, s.depth}, ++seed, 0, 0.1F);
      const Array bias = Array::random(type, {s.streams + 1, s.width}, ++seed);
      const std::vector<int64_t> shape = {s.tokens, s.streams + 1, s.width};
      const auto params = [&](const Tensor& e, const Tensor& w, const Tensor& b,
                              const Tensor& out) {
        return KvProjectionForward{
            .embedding = e, .weight = w, .bias = seed % 2 == 0 ? b : Tensor{}, .kv = out};
      };
      Array expected(type, shape);
      project("reference", 1, params(embedding, weight, bias, expected));
      for (const std::string& impl : implementations()) {
        Array got(type, shape);
        project(impl, 1, params(embedding, weight, bias, got));
        test::expect_close(impl, got, expected,
                           impl + " " + std::string(name_of(type)) +
                               " T=" + std::to_string(s.tokens) + " E=" + std::to_string(s.depth));
        const test::Layout layout = {5, 1};
        Array other(type, shape, layout);
        project(impl, 3,
                params(embedding.copy(layout), weight.copy(layout), bias.copy(layout), other));
        EXPECT_EQ(other.bits(), got.bits()) << impl;
      }
    }
  }
}

// Sums of 6144 products still meet the default rule of `ehc op --check`.
TEST(KvProjection, LongSumsStayExactToFp32) {
  const Array embedding = Array::random(DType::f32, {24, 6144}, 1);
  const Array weight = Array::random(DType::f32, {3, 64, 6144}, 2, 0, 0.1F);
  Array expected(DType::f32, {24, 3, 64});
  project("reference", 2, {.embedding = embedding, .weight = weight, .kv = expected});
  for (const std::string& impl : implementations()) {
    if (impl == "reference.f32") continue;  // one serial sum
    Array got(DType::f32, {24, 3, 64});
    project(impl, 2, {.embedding = embedding, .weight = weight, .kv = got});
    test::expect_close(impl, got, expected, impl);
  }
}

TEST(KvProjection, BuiltinTokensDoNotDependOnTheBatch) {
  const Array embedding = Array::random(DType::bf16, {500, 130}, 1);
  const Array weight = Array::random(DType::bf16, {3, 20, 130}, 2);
  Array batch(DType::bf16, {500, 3, 20});
  project("cpu.builtin", 2, {.embedding = embedding, .weight = weight, .kv = batch});
  for (const int64_t t : {0, 11, 12, 479, 480, 499}) {
    Array alone(DType::bf16, {1, 3, 20});
    project("cpu.builtin", 1,
            {.embedding = embedding.rows(t, t + 1), .weight = weight, .kv = alone});
    EXPECT_EQ(alone.bits(), batch.bits(t, t + 1)) << t;
  }
}

TEST(KvProjection, NanAndInfReachTheirOwnOutputsOnly) {
  Array embedding = Array::random(DType::f32, {3, 40}, 1);
  const Array weight = Array::random(DType::f32, {2, 5, 40}, 2);
  embedding.set(40, std::numeric_limits<float>::quiet_NaN());
  for (const std::string& impl : implementations()) {
    Array kv(DType::f32, {3, 2, 5});
    project(impl, 1, {.embedding = embedding, .weight = weight, .kv = kv});
    for (int64_t i = 0; i < 30; ++i) EXPECT_EQ(std::isnan(kv.get(i)), i / 10 == 1) << impl << i;
  }
}

TEST(KvProjection, RefusesASmallWorkspace) {
  const Array embedding = Array::random(DType::f32, {3, 40}, 1);
  const Array weight = Array::random(DType::f32, {2, 5, 40}, 2);
  Array kv(DType::f32, {3, 2, 5});
  const KvProjectionForward params = {.embedding = embedding, .weight = weight, .kv = kv};
  Context context = test::context_for("cpu.builtin");
  const size_t bytes = workspace_bytes(context, params);
  const std::string text = "engram.kv_projection_fwd: workspace: expected at least " +
                           std::to_string(bytes) + " bytes, got ";
  EXPECT_EQ(error_of([&] { kv_projection_fwd(context, params); }), text + "0");
  const Buffer workspace(context, bytes);
  context.set_workspace(workspace.data(), bytes - 1);
  EXPECT_EQ(error_of([&] { kv_projection_fwd(context, params); }),
            text + std::to_string(bytes - 1));
}

}  // namespace
}  // namespace ehc::engram
