#include "ehc/engram/grad_w_reduce.h"

#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;

struct Shape {
  int64_t P, n, d;
  DType hidden, embed;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "P=" << s.P << " n=" << s.n << " d=" << s.d << " " << name_of(s.hidden) << " "
             << name_of(s.embed);
}

std::vector<Shape> shapes() {
  std::vector<Shape> list;
  const int64_t partials[] = {0, 1, 2, 5, 40};
  int at = 0;
  for (const int64_t d : {1, 7, 31, 32, 33, 64, 257, 2100}) {
    for (const DType hidden : {DType::f32, DType::bf16}) {
      for (const DType embed : {DType::f32, DType::bf16}) {
        list.push_back({partials[at % 5], d > 900 ? 1 + at % 2 : 1 + at % 8, d, hidden, embed});
        ++at;
      }
    }
  }
  return list;
}

struct Reduce {
  Shape s;
  Array partial, hidden, embed, hidden_target, embed_target, grad_hidden, grad_embed;

  explicit Reduce(const Shape& shape, test::Layout layout = {})
      : s(shape),
        partial(Array::random(DType::f32, {s.P, s.n, s.d}, 1).copy(layout)),
        hidden(Array::random(s.hidden, {s.n, s.d}, 2, 1, 0.25F).copy(layout)),
        embed(Array::random(s.embed, {s.n, s.d}, 3, 1, 0.25F).copy(layout)),
        hidden_target(Array::random(DType::f32, {s.n, s.d}, 4, 0, 3).copy(layout)),
        embed_target(Array::random(DType::f32, {s.n, s.d}, 5, 0, 3).copy(layout)),
        grad_hidden(DType::f32, {s.n, s.d}, layout),
        grad_embed(DType::f32, {s.n, s.d}, layout) {}

  [[nodiscard]] GradWReduce params(bool targets) const {
    GradWReduce p = {.grad_weight_partial = partial,
                     .weight_hidden = hidden,
                     .weight_embed = embed,
                     .grad_weight_hidden = grad_hidden,
                     .grad_weight_embed = grad_embed};
    if (targets) {
      p.grad_weight_hidden_acc = hidden_target;
      p.grad_weight_embed_acc = embed_target;
    }
    return p;
  }
  [[nodiscard]] std::string bits() const { return grad_hidden.bits() + grad_embed.bits(); }
};

void run(const std::string& impl, const GradWReduce& p, int threads = 1) {
  Context context = context_for(impl, threads);
  grad_w_reduce(context, p);
}

template <class Body>
void for_each_case(const Body& body) {
  test::for_each_case("engram.grad_w_reduce", shapes(), body);
}

// Sums in ascending order and one fma: there is one right result in fp32.
TEST(GradWReduce, EveryKernelGivesTheSameBits) {
  for_each_case([](const std::string& impl, const Shape& s) {
    for (const bool targets : {false, true}) {
      const Reduce r(s);
      run(impl, r.params(targets));
      if (impl == "reference") {
        for (int64_t i = 0; i < s.n * s.d; ++i) {
          double sum = 0;
          for (int64_t p = 0; p < s.P; ++p) sum += r.partial.get(p * s.n * s.d + i);
          const double hidden = targets ? r.hidden_target.get(i) : 0;
          const double embed = targets ? r.embed_target.get(i) : 0;
          EXPECT_EQ(r.grad_hidden.get(i), static_cast<float>(sum * r.embed.get(i) + hidden));
          EXPECT_EQ(r.grad_embed.get(i), static_cast<float>(sum * r.hidden.get(i) + embed));
        }
        continue;
      }
      const Reduce want(s);
      run("reference", want.params(targets));
      test::expect_close("reference.f32", r.grad_hidden, want.grad_hidden, "grad_weight_hidden");
      test::expect_close("reference.f32", r.grad_embed, want.grad_embed, "grad_weight_embed");
      run("reference.f32", want.params(targets));
      EXPECT_EQ(r.bits(), want.bits()) << "targets " << targets;
    }
  });
}

TEST(GradWReduce, PlaceLayoutAndThreadsChangeNoBit) {
  for_each_case([](const std::string& impl, const Shape& s) {
    const Reduce plain(s);
    run(impl, plain.params(true));
    const Reduce strided(s, {.row_padding = 3, .offset = 1});
    run(impl, strided.params(true), 3);
    EXPECT_EQ(strided.bits(), plain.bits()) << "strided, misaligned, three threads";

    const Reduce inplace(s);
    GradWReduce p = inplace.params(true);
    p.grad_weight_hidden = p.grad_weight_hidden_acc;
    p.grad_weight_embed = p.grad_weight_embed_acc;
    run(impl, p, 8);
    EXPECT_EQ(inplace.hidden_target.bits() + inplace.embed_target.bits(), plain.bits())
        << "in place";

    p = plain.params(false);
    p.grad_weight_embed_acc = plain.embed_target;
    const std::string embed = plain.grad_embed.bits();
    run(impl, p);
    EXPECT_EQ(plain.grad_embed.bits(), embed) << "one target";
  });
}

TEST(GradWReduce, NoPartialsLeaveTheTargets) {
  for (const std::string& impl : implementations("engram.grad_w_reduce")) {
    Reduce r({0, 3, 37, DType::bf16, DType::f32});
    r.grad_hidden.fill(7);
    r.grad_embed.fill(7);
    GradWReduce p = r.params(false);
    p.grad_weight_partial = {nullptr, DType::f32, {0, 3, 37}};
    run(impl, p);
    for (int64_t i = 0; i < 3 * 37; ++i) EXPECT_EQ(r.grad_hidden.get(i), 0) << impl;
    p = r.params(true);
    p.grad_weight_partial = {nullptr, DType::f32, {0, 3, 37}};
    run(impl, p);
    EXPECT_EQ(r.grad_hidden.bits(), r.hidden_target.bits()) << impl;
    EXPECT_EQ(r.grad_embed.bits(), r.embed_target.bits()) << impl;
  }
}

TEST(GradWReduce, RefusesWhatTheContractForbids) {
  const Reduce r({2, 2, 8, DType::bf16, DType::bf16});
  const auto refused = [&](const std::function<void(GradWReduce&)>& change) {
    GradWReduce p = r.params(true);
    change(p);
    return error_of([&] { run("", p); });
  };
  EXPECT_EQ(refused([](GradWReduce&) {}), "none");
  EXPECT_EQ(refused([](GradWReduce& p) { p.weight_embed = p.weight_embed.slice(1, 0, 7); }),
            "engram.grad_w_reduce: tensor 'weight_embed': expected F32/BF16[2,8], got BF16[2,7]");
  EXPECT_EQ(refused([](GradWReduce& p) { p.grad_weight_hidden = p.grad_weight_embed_acc; }),
            "engram.grad_w_reduce: tensor 'grad_weight_hidden': expected memory apart from "
            "'grad_weight_embed_acc', got overlapping memory");
  EXPECT_EQ(refused([](GradWReduce& p) { p.grad_weight_hidden = p.grad_weight_embed; }),
            "engram.grad_w_reduce: tensor 'grad_weight_hidden': expected memory apart from "
            "'grad_weight_embed', got overlapping memory");
}

}  // namespace
}  // namespace ehc::engram
