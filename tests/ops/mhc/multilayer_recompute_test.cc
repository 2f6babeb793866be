#include "ehc/mhc/multilayer_recompute.h"

#include "core/dynamic_call.h"
#include "ehc/mhc/post.h"
#include "ehc/mhc/pre_apply.h"
#include "tests/ops/mhc/support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;
using test::kNan;
using test::Layout;
using Shape = test::StreamShape;

constexpr const char* kName = "mhc.multilayer_recompute";

std::vector<Tensor> views(const std::vector<Array>& arrays) {
  return {arrays.begin(), arrays.end()};
}

std::string bits_of(const std::vector<Array>& arrays) {
  std::string bits;
  for (const Array& array : arrays) bits += array.bits();
  return bits;
}

// `layers` layers of which the first `posts` have a post, and the outputs of one call.
struct Block {
  Shape s;
  Array residual;
  std::vector<Array> pre, layer_output, post, comb, layer_input, new_residual;

  Block(const Shape& shape, int layers, int posts, Layout layout = {})
      : s(shape), residual(Array::random(s.type, {s.T, s.n, s.d}, 1).copy(layout)) {
    for (int l = 0; l < layers; ++l) {
      const auto seed = static_cast<uint32_t>(10 * l);
      // Sizes that neither grow nor vanish over many layers.
      pre.push_back(Array::random(DType::f32, {s.T, s.n}, seed + 2).copy(layout));
      layer_input.emplace_back(s.type, std::vector<int64_t>{s.T, s.d}, layout);
      if (l >= posts) continue;
      layer_output.push_back(Array::random(s.type, {s.T, s.d}, seed + 3).copy(layout));
      post.push_back(Array::random(DType::f32, {s.T, s.n}, seed + 4).copy(layout));
      const float share = 1.0F / static_cast<float>(s.n);
      comb.push_back(
          Array::random(DType::f32, {s.T, s.n, s.n}, seed + 5, share, share / 4).copy(layout));
      new_residual.emplace_back(s.type, std::vector<int64_t>{s.T, s.n, s.d}, layout);
    }
  }
  [[nodiscard]] std::string bits() const { return bits_of(layer_input) + bits_of(new_residual); }
};

// The views of a block, for tests that change some.
struct Views {
  Tensor residual;
  std::vector<Tensor> pre, layer_output, post, comb, layer_input, new_residual;

  explicit Views(const Block& b)
      : residual(b.residual),
        pre(views(b.pre)),
        layer_output(views(b.layer_output)),
        post(views(b.post)),
        comb(views(b.comb)),
        layer_input(views(b.layer_input)),
        new_residual(views(b.new_residual)) {}

  template <class Visit>
  void each(const Visit& visit) {
    visit(residual);
    for (auto* list : {&pre, &layer_output, &post, &comb, &layer_input, &new_residual}) {
      for (Tensor& t : *list) visit(t);
    }
  }
  void run(const std::string& impl, int threads = 1) const {
    Context context = context_for(impl, threads);
    multilayer_recompute(context, {.residual = residual,
                                   .pre = pre,
                                   .layer_output = layer_output,
                                   .post = post,
                                   .comb = comb,
                                   .layer_input = layer_input,
                                   .new_residual = new_residual});
  }
};

void run_layer_by_layer(const Block& b, const std::string& impl) {
  Context context = context_for(impl);
  Tensor x = b.residual;
  for (size_t l = 0; l < b.pre.size(); ++l) {
    pre_apply_fwd(context, {.residual = x, .pre = b.pre[l], .layer_input = b.layer_input[l]});
    if (l >= b.post.size()) break;
    post_fwd(context, {.layer_output = b.layer_output[l],
                       .residual = x,
                       .post = b.post[l],
                       .comb = b.comb[l],
                       .new_residual = b.new_residual[l]});
    x = b.new_residual[l];
  }
}

struct Depth {
  int layers, posts;
};

TEST(MultilayerRecompute, EqualsTheStepsLayerByLayer) {
  constexpr Depth kDepths[] = {{1, 0}, {1, 1}, {3, 2}, {3, 3}, {10, 9}, {10, 10}};
  int at = 0;
  for (const int64_t d : {1, 7, 64, 257, 1030, 2100}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      for (const int64_t n : {int64_t{4}, int64_t{1 + at * 3 % 8}}) {
        const Depth depth = kDepths[at++ % 6];
        const Shape s{d > 1000 ? 2 : 5, n, d, type};
        for (const std::string& impl : implementations(kName)) {
          SCOPED_TRACE(::testing::Message() << impl << " " << s << " " << depth.layers);
          const Block want(s, depth.layers, depth.posts);
          run_layer_by_layer(want, impl);
          const Block got(s, depth.layers, depth.posts);
          Views(got).run(impl);
          EXPECT_EQ(got.bits(), want.bits());
        }
      }
    }
  }
}

// More layers than are described at a time.
TEST(MultilayerRecompute, ManyLayersEqualTheStepsToo) {
  for (const Depth depth : {Depth{64, 64}, Depth{65, 64}, Depth{130, 130}}) {
    const Shape s{3, 4, 33, DType::bf16};
    for (const std::string& impl : implementations(kName)) {
      const Block want(s, depth.layers, depth.posts);
      run_layer_by_layer(want, impl);
      const Block got(s, depth.layers, depth.posts);
      Views(got).run(impl, 2);
      EXPECT_EQ(got.bits(), want.bits()) << impl << " " << depth.layers;
    }
  }
}

TEST(MultilayerRecompute, LayoutAndThreadsChangeNoBit) {
  for (const Shape& s : {Shape{1, 4, 5003, DType::bf16}, Shape{5, 3, 257, DType::f32},
                         Shape{33, 2, 64, DType::f16}}) {
    for (const std::string& impl : implementations(kName)) {
      const Block plain(s, 3, 3);
      Views(plain).run(impl);
      for (const Layout& layout : test::kLayouts) {
        const Block other(s, 3, 3, layout);
        Views(other).run(impl, 3);
        EXPECT_EQ(other.bits(), plain.bits()) << impl << " " << s << " " << layout.offset;
      }
      for (int threads = 2; threads <= 8; ++threads) {
        const Block other(s, 3, 3);
        Views(other).run(impl, threads);
        EXPECT_EQ(other.bits(), plain.bits()) << impl << " " << s << " " << threads;
      }
    }
  }
}

TEST(MultilayerRecompute, ATokenDependsOnItselfAlone) {
  const Shape s{6, 4, 100, DType::bf16};
  for (const std::string& impl : implementations(kName)) {
    const Block whole(s, 3, 2);
    Views(whole).run(impl);
    for (int64_t t = 0; t < s.T; ++t) {
      const Block one(s, 3, 2);
      Views part(one);
      part.each([&](Tensor& x) { x = x.slice(0, t, t + 1); });
      part.run(impl);
      for (size_t l = 0; l < 3; ++l) {
        EXPECT_EQ(one.layer_input[l].bits(t, t + 1), whole.layer_input[l].bits(t, t + 1)) << impl;
        if (l == 2) break;
        EXPECT_EQ(one.new_residual[l].bits(t, t + 1), whole.new_residual[l].bits(t, t + 1)) << impl;
      }
    }
  }
}

TEST(MultilayerRecompute, LeadingDimensionsAreTokens) {
  for (const std::string& impl : implementations(kName)) {
    const Block b({6, 3, 16, DType::bf16}, 2, 2, {.row_padding = 5});
    Views(b).run(impl);
    const std::string want = b.bits();
    Views split(b);
    split.each([](Tensor& t) {  // [6, ...] as [2, 3, ...]
      for (int k = t.rank; k > 0; --k) {
        t.shape[k] = t.shape[k - 1];
        t.stride[k] = t.stride[k - 1];
      }
      t.shape[0] = 2;
      t.shape[1] = 3;
      t.stride[0] = 3 * t.stride[1];
      ++t.rank;
    });
    for (const auto* outputs : {&b.layer_input, &b.new_residual}) {
      for (const Array& output : *outputs) {
        for (int64_t i = 0; i < output.size(); ++i) const_cast<Array&>(output).set(i, 7);
      }
    }
    split.run(impl, 2);
    EXPECT_EQ(b.bits(), want) << impl;
    split.post[1].stride[0] += 1;
    EXPECT_EQ(error_of([&] { split.run(impl); }),
              std::string(kName) +
                  ": tensor 'post.1': expected leading dimensions that flatten to "
                  "one stride, got stride 25 at dimension 0");
  }
}

TEST(MultilayerRecompute, NanReachesOnlyWhatItMust) {
  Block b({2, 4, 40, DType::f32}, 3, 3);
  b.layer_output[1].set(7, kNan);  // token 0, column 7
  for (const std::string& impl : implementations(kName)) {
    Views(b).run(impl);
    for (size_t l = 0; l < 3; ++l) {
      for (int64_t i = 0; i < 2 * 40; ++i) {
        EXPECT_EQ(std::isnan(b.layer_input[l].get(i)), l == 2 && i == 7) << impl << l << " " << i;
      }
      for (int64_t i = 0; i < 2 * 4 * 40; ++i) {
        EXPECT_EQ(std::isnan(b.new_residual[l].get(i)), l >= 1 && i < 160 && i % 40 == 7) << impl;
      }
    }
  }
}

TEST(MultilayerRecompute, NoTokensTouchNothing) {
  for (const std::string& impl : implementations(kName)) {
    const Block b({0, 4, 64, DType::bf16}, 3, 2);
    Views none(b);
    none.each([](Tensor& t) { t.data = nullptr; });
    none.run(impl, 2);
  }
}

TEST(MultilayerRecompute, RefusesListsThatDoNotFit) {
  const Block b({3, 4, 8, DType::bf16}, 3, 2);
  const auto refused = [&](const std::function<void(Views&)>& change) {
    Views v(b);
    change(v);
    const std::string text = error_of([&] { v.run(""); });
    const std::string prefix = std::string(kName) + ": ";
    return text.rfind(prefix, 0) == 0 ? text.substr(prefix.size()) : text;
  };
  EXPECT_EQ(refused([](Views&) {}), "none");
  EXPECT_EQ(refused([](Views& v) { v.pre.clear(); }),
            "tensor 'pre.0': expected F32[T,n], got none");
  EXPECT_EQ(refused([](Views& v) { v.post.clear(); }),
            "tensor 'layer_output.L': expected all or none of 'layer_output.L post.L comb.L', got "
            "'layer_output.L', 'comb.L'");
  EXPECT_EQ(refused([](Views& v) { v.comb.pop_back(); }),
            "tensor 'comb.1': expected F32[3,4,4], got none");
  EXPECT_EQ(refused([](Views& v) { v.post.push_back(v.post[0]); }),
            "tensor 'post.2': expected none ('post.L' has 2), got F32[3,4]");
  EXPECT_EQ(refused([](Views& v) { v.post[1] = {}; }),
            "tensor 'post.1': expected F32[3,4], got none");
  EXPECT_EQ(refused([](Views& v) { v.new_residual.pop_back(); }),
            "tensor 'new_residual.1': expected BF16[3,4,8], got none");
  EXPECT_EQ(refused([](Views& v) { v.layer_input.push_back(v.layer_input[0]); }),
            "tensor 'layer_input.3': expected none ('layer_input.L' has 3), got BF16[3,8]");
  EXPECT_EQ(refused([](Views& v) {
              for (auto* list : {&v.layer_output, &v.post, &v.comb, &v.new_residual}) {
                list->pop_back();
              }
            }),
            "tensor 'layer_output.L': expected 2 or 3 tensors for 3 of 'pre.L', got 1");
  EXPECT_EQ(refused([](Views& v) { v.pre[2].shape[1] = 5; }),
            "tensor 'pre.2': expected F32[3,4], got F32[3,5]");
  EXPECT_EQ(refused([](Views& v) { v.layer_output[1].dtype = DType::f16; }),
            "tensor 'layer_output.1': expected BF16[3,8], got F16[3,8]");
  EXPECT_EQ(refused([](Views& v) { v.comb[1].data = nullptr; }),
            "tensor 'comb.1': expected a pointer to data, got null");
  EXPECT_EQ(refused([](Views& v) { v.layer_output[0].stride[1] = 2; }),
            "tensor 'layer_output.0': expected stride 1 in the last dimension, got 2");
}

TEST(MultilayerRecompute, RefusesOutputsThatShareMemory) {
  const Block b({3, 4, 8, DType::bf16}, 3, 2);
  const auto refused = [&](const std::function<void(Views&)>& change) {
    Views v(b);
    change(v);
    return error_of([&] { v.run(""); });
  };
  const auto apart = [](const std::string& output, const std::string& other) {
    return std::string(kName) + ": tensor '" + output + "': expected memory apart from '" + other +
           "', got overlapping memory";
  };
  EXPECT_EQ(refused([](Views& v) { v.new_residual[1] = v.residual; }),
            apart("new_residual.1", "residual"));
  EXPECT_EQ(refused([](Views& v) { v.new_residual[1] = v.new_residual[0]; }),
            apart("new_residual.0", "new_residual.1"));
  EXPECT_EQ(refused([](Views& v) { v.layer_input[2] = v.layer_output[1]; }),
            apart("layer_input.2", "layer_output.1"));
  EXPECT_EQ(refused([](Views& v) { v.layer_input[0] = v.new_residual[1].select(1, 2); }),
            apart("layer_input.0", "new_residual.1"));
}

// The tensors of a list by name, in any order; what a call by name makes of the outputs.
TEST(MultilayerRecompute, ByName) {
  const Block b({3, 4, 8, DType::bf16}, 2, 1);
  DynamicCall call(*find_operator(kName));
  call.set_input("pre.1", b.pre[1]);
  call.set_input("residual", b.residual);
  call.set_input("pre.0", b.pre[0]);
  call.set_input("comb.0", b.comb[0]);
  call.set_input("post.0", b.post[0]);
  call.set_input("layer_output.0", b.layer_output[0]);
  const std::vector<Tensor> made = call.outputs();
  std::string names;
  for (size_t slot = 0; slot < call.slots(); ++slot) {
    names += call.name_of(slot) + (made[slot].present() ? " " + describe(made[slot]) : "") + "\n";
  }
  EXPECT_EQ(names,
            "residual\npre.0\npre.1\nlayer_output.0\npost.0\ncomb.0\nlayer_input.0 BF16[3,8]\n"
            "layer_input.1 BF16[3,8]\nnew_residual.0 BF16[3,4,8]\n");
  call.set_output("layer_input.0", b.layer_input[0]);
  call.set_output("layer_input.1", b.layer_input[1]);
  call.set_output("new_residual.0", b.new_residual[0]);
  Context context = Context::cpu(1);
  call.run(context);
  const std::string got = b.bits();
  Views(b).run("");
  EXPECT_EQ(got, b.bits());

  const auto message = [&](const char* name) {
    return error_of([&] { call.set_input(name, b.pre[0]); });
  };
  for (const char* name : {"pre", "pre.", "pre.x", "pre.01", "pre.-1", "pre.12345"}) {
    EXPECT_EQ(message(name), std::string(kName) + ": tensor '" + name +
                                 "': expected inputs named residual pre.L layer_output.L post.L "
                                 "comb.L, got " +
                                 name);
  }
  EXPECT_EQ(message("pre.L"), std::string(kName) +
                                  ": tensor 'pre.L': expected tensors by their own names, 'pre.0' "
                                  "and so on, got pre.L");
  call.set_input("pre.3", b.pre[0]);
  EXPECT_EQ(error_of([&] { call.outputs(); }),
            std::string(kName) + ": tensor 'pre.2': expected F32[3,4], got none");
}

}  // namespace
}  // namespace ehc::mhc
