#include "ehc/engram/optimizer_step.h"

#include <cmath>

#include "ehc/engram/momentum_update.h"
#include "ehc/engram/sinkhorn.h"
#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::expect_close;
using test::implementations;
using test::kInf;
using test::kNan;
using test::Layout;
using test::workspace_for;

struct Types {
  DType weight = DType::f32;
  DType grad = DType::f32;
  DType momentum = DType::f32;
};
constexpr Types kTypes[] = {{DType::f32, DType::f32, DType::f32},
                            {DType::bf16, DType::bf16, DType::bf16},
                            {DType::f32, DType::bf16, DType::f32},
                            {DType::bf16, DType::f32, DType::bf16},
                            {DType::f32, DType::f32, DType::bf16}};

struct Table {
  Array weight;
  Array grad;
  Array momentum;

  [[nodiscard]] int64_t rows() const { return weight.view().shape[0]; }
  [[nodiscard]] int64_t width() const { return weight.view().shape[1]; }
  [[nodiscard]] Table copy(Layout layout = {}) const {
    return {weight.copy(layout), grad.copy(layout), momentum.copy(layout)};
  }
};

Table random_table(int64_t rows, int64_t width, uint32_t seed, Types types = {}) {
  return {Array::random(types.weight, {rows, width}, seed),
          Array::random(types.grad, {rows, width}, seed + 1),
          Array::random(types.momentum, {rows, width}, seed + 2, 0, 0.3F)};
}

void set_row(Array& array, int64_t row, float factor) {
  const int64_t width = array.view().shape[1];
  for (int64_t i = row * width; i < (row + 1) * width; ++i) array.set(i, array.get(i) * factor);
}

struct Constants {
  double lr = 0.1;
  double eps = 1e-20;
  int64_t repeat = 5;
  bool nesterov = true;
  double tau = 1e-3;
};

template <class P>
void set_constants(P& p, const Constants& c) {
  p.lr = c.lr;
  p.eps = c.eps;
  p.repeat = c.repeat;
  p.nesterov = c.nesterov;
  p.tau = c.tau;
}

// Weight and momentum after a step; in place it takes them from `table`.
Table dense_step(const std::string& impl, Table& table, const Constants& constants, int threads = 1,
                 bool in_place = false) {
  Table out{Array(table.weight.view().dtype, {table.rows(), table.width()}),
            {},
            Array(table.momentum.view().dtype, {table.rows(), table.width()})};
  OptimizerStep p = {.weight = table.weight,
                     .grad = table.grad,
                     .momentum = table.momentum,
                     .new_weight = in_place ? table.weight : out.weight,
                     .new_momentum = in_place ? table.momentum : out.momentum};
  set_constants(p, constants);
  Context context = context_for(impl, threads);
  const Buffer workspace = workspace_for(context, p);
  optimizer_step(context, p);
  if (in_place) return table.copy();
  return out;
}

// The rows of a table that have a gradient.
struct Listed {
  Array rows;
  Array grad;

  Listed(const Array& dense, const std::vector<int64_t>& list, DType index)
      : rows(index, {static_cast<int64_t>(list.size())}),
        grad(dense.view().dtype, {static_cast<int64_t>(list.size()), dense.view().shape[1]}) {
    const int64_t width = dense.view().shape[1];
    for (size_t u = 0; u < list.size(); ++u) {
      const auto at = static_cast<int64_t>(u);
      if (index == DType::i64) {
        rows.element<int64_t>(at) = list[u];
      } else {
        rows.element<int32_t>(at) = static_cast<int32_t>(list[u]);
      }
      for (int64_t j = 0; j < width; ++j) grad.set(at * width + j, dense.get(list[u] * width + j));
    }
  }
};

template <class P, class Run>
Table listed_step(const std::string& impl, Table& table, const Listed& listed,
                  const Constants& constants, const Run& run, bool in_place, int threads = 1) {
  Table out{Array(table.weight.view().dtype, {table.rows(), table.width()}),
            {},
            Array(table.momentum.view().dtype, {table.rows(), table.width()})};
  P p = {.weight = table.weight,
         .unique_rows = listed.rows,
         .grad_rows = listed.grad,
         .momentum = table.momentum,
         .new_weight = in_place ? table.weight : out.weight,
         .new_momentum = in_place ? table.momentum : out.momentum};
  set_constants(p, constants);
  Context context = context_for(impl, threads);
  const Buffer workspace = workspace_for(context, p);
  run(context, p);
  if (in_place) return table.copy();
  return out;
}

Table sparse_step(const std::string& impl, Table& table, const Listed& listed,
                  const Constants& constants, bool in_place = false) {
  return listed_step<OptimizerStepSparse>(impl, table, listed, constants, &optimizer_step_sparse,
                                          in_place, 2);
}

Table lazy_step(const std::string& impl, Table& table, const Listed& listed,
                const Constants& constants, bool in_place = false) {
  return listed_step<OptimizerStepLazy>(impl, table, listed, constants, &optimizer_step_lazy,
                                        in_place, 2);
}

// The step by the operators it is made of.
Table by_operators(const std::string& impl, const Table& table, const Constants& constants) {
  const int64_t rows = table.rows();
  const int64_t width = table.width();
  Context context = context_for(impl);
  Array update(DType::f32, {rows, width});
  Array momentum(table.momentum.view().dtype, {rows, width});
  momentum_update(context, {.grad = table.grad,
                            .momentum = table.momentum,
                            .update = update,
                            .new_momentum = momentum,
                            .beta = 0.95,
                            .nesterov = constants.nesterov});
  Array row_scale(DType::f32, {rows});
  Array col_scale(DType::f32, {width});
  Array norm(DType::f32, {rows});
  Array ignored(DType::f32, {rows});
  Array partial(DType::f32, {sinkhorn_partials(rows), width});
  Array sums(DType::f32, {width});
  row_scale.fill(1);
  col_scale.fill(1);
  const auto step = [&](Array& new_scale) {
    sinkhorn_step(context, {.update = update,
                            .row_scale = row_scale,
                            .col_scale = col_scale,
                            .row_norm = norm,
                            .new_row_scale = new_scale,
                            .col_partial = partial,
                            .eps = constants.eps});
  };
  step(ignored);
  double total = 0;  // in the order of the chunks
  const int64_t chunk = std::max<int64_t>(32, (rows + 127) / 128);
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    double sum = 0;
    for (int64_t r = begin; r < std::min(rows, begin + chunk); ++r) sum += double{norm.get(r)};
    total += sum;
  }
  const double threshold =
      double{static_cast<float>(constants.tau)} * total / static_cast<double>(rows);
  for (int64_t r = 0; r < rows; ++r) row_scale.set(r, double{norm.get(r)} > threshold ? 1 : 0);
  for (int64_t k = 0; k < constants.repeat; ++k) {
    step(row_scale);
    sinkhorn_step_reduce(context, {.col_partial = partial,
                                   .col_scale = col_scale,
                                   .col_sumsq = sums,
                                   .new_col_scale = col_scale,
                                   .eps = constants.eps});
  }
  Array change(DType::f32, {rows, width});
  sinkhorn_finalize(context, {.update = update,
                              .row_scale = row_scale,
                              .col_scale = col_scale,
                              .out = change,
                              .eps = constants.eps,
                              .alpha = std::sqrt(static_cast<double>(width))});
  const auto rate = static_cast<float>(constants.lr * 0.18);
  Array weight(table.weight.view().dtype, {rows, width});
  for (int64_t i = 0; i < weight.size(); ++i) {
    weight.set(i, std::fmaf(-rate, change.get(i), table.weight.get(i)));
  }
  return {std::move(weight), {}, std::move(momentum)};
}

TEST(OptimizerStep, IsItsOperatorsBitForBit) {
  uint32_t seed = 1;
  for (const Types& types : kTypes) {
    for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{1, 1},
                                      {2, 7},
                                      {31, 64},
                                      {33, 257},
                                      {200, 96},
                                      {4300, 20},
                                      {40, 1100}}) {
      Table table = random_table(rows, width, ++seed, types);
      for (int64_t r = 0; r < rows; r += 7) {  // zero or, in every other case, far below the mean
        const float factor = r % 2 == 0 || seed % 2 == 0 ? 0 : 1e-4F;
        set_row(table.grad, r, factor);
        set_row(table.momentum, r, factor);
      }
      const Constants constants = {.nesterov = seed % 3 != 0};
      for (const std::string& impl : implementations("engram.optimizer_step")) {
        if (impl.starts_with("reference")) continue;  // scales are kept in its own type
        SCOPED_TRACE(impl + " " + std::to_string(rows) + "x" + std::to_string(width));
        const Table want = by_operators(impl, table, constants);
        const Table got = dense_step(impl, table, constants);
        EXPECT_EQ(got.momentum.bits(), want.momentum.bits());
        EXPECT_EQ(got.weight.bits(), want.weight.bits());
      }
    }
  }
}

TEST(OptimizerStep, AgreesWithTheReference) {
  uint32_t seed = 50;
  for (const Types& types : kTypes) {
    for (const int64_t rows : {0, 1, 2, 31, 33, 150}) {
      for (const int64_t width : {1, 7, 64, 257, 576}) {
        Table table = random_table(rows, width, seed += 3, types);
        const Table want = dense_step("reference", table, {});
        for (const std::string& impl : implementations("engram.optimizer_step")) {
          const std::string what = impl + " " + std::to_string(rows) + "x" + std::to_string(width);
          const Table got = dense_step(impl, table, {});
          expect_close(impl, got.weight, want.weight, what);
          EXPECT_EQ(got.momentum.bits(), want.momentum.bits()) << what;
        }
      }
    }
  }
}

TEST(OptimizerStep, SameBitsForAnyThreadsStridesAndInPlace) {
  for (const Types& types : kTypes) {
    Table table = random_table(200, 70, 7, types);
    for (const std::string& impl : implementations("engram.optimizer_step")) {
      const Table want = dense_step(impl, table, {});
      for (int threads = 2; threads <= 8; threads += impl.starts_with("reference") ? 6 : 1) {
        Table other = table.copy(threads % 2 == 0 ? Layout{3, 1} : Layout{16, 0});
        const Table apart = dense_step(impl, other, {}, threads);
        const Table in_place = dense_step(impl, other, {}, threads, true);
        EXPECT_EQ(apart.weight.bits(), want.weight.bits()) << impl << " " << threads;
        EXPECT_EQ(apart.momentum.bits(), want.momentum.bits()) << impl << " " << threads;
        EXPECT_EQ(in_place.weight.bits(), want.weight.bits()) << impl << " " << threads;
        EXPECT_EQ(in_place.momentum.bits(), want.momentum.bits()) << impl << " " << threads;
      }
    }
  }
}

TEST(OptimizerStep, ZeroRowsAndColumnsKeepTheirWeights) {
  Table table = random_table(70, 40, 9);
  for (Array* state : {&table.grad, &table.momentum}) {
    for (int64_t i = 0; i < state->size(); ++i) {
      if (i / 40 % 9 == 0 || i % 40 == 39 || i % 40 == 0) state->set(i, 0);
    }
  }
  for (const std::string& impl : implementations("engram.optimizer_step")) {
    for (const int64_t repeat : {1, 5, 64}) {
      for (const double tau : {0.0, 1e-3}) {
        const Table got = dense_step(impl, table, {.repeat = repeat, .tau = tau});
        for (int64_t i = 0; i < got.weight.size(); ++i) {
          const bool zero = i / 40 % 9 == 0 || i % 40 == 39 || i % 40 == 0;
          ASSERT_EQ(got.weight.get(i) == table.weight.get(i), zero)
              << impl << " repeat " << repeat << " element " << i;
        }
      }
    }
  }
}

TEST(OptimizerStep, LiveRowsAreStrictlyAboveTheThreshold) {
  struct Case {
    double tau;
    std::vector<float> norms;
    std::vector<bool> live;
  };
  for (const Case& c : {Case{0, {4, 2, 2, 0.125F, 0}, {true, true, true, true, false}},
                        Case{0.1, {4, 2, 2, 0.125F, 0}, {true, true, true, false, false}},
                        Case{0.07, {4, 2, 2, 0.125F, 0}, {true, true, true, true, false}},
                        Case{1, {2, 2}, {false, false}}}) {
    const auto rows = static_cast<int64_t>(c.norms.size());
    Table table{Array(DType::f32, {rows, 4}), Array(DType::f32, {rows, 4}),
                Array(DType::f32, {rows, 4})};
    for (int64_t i = 0; i < 4 * rows; ++i)
      table.grad.set(i, c.norms[static_cast<size_t>(i / 4)] / 2);
    for (const std::string& impl : implementations("engram.optimizer_step")) {
      Array weight(DType::f32, {rows, 4});
      Array momentum(DType::f32, {rows, 4});
      const OptimizerStep p = {.weight = table.weight,
                               .grad = table.grad,
                               .momentum = table.momentum,
                               .new_weight = weight,
                               .new_momentum = momentum,
                               .lr = 1,
                               .eps = 1e-20,
                               .beta = 0,
                               .tau = c.tau};
      Context context = context_for(impl);
      const Buffer workspace = workspace_for(context, p);
      optimizer_step(context, p);
      EXPECT_EQ(momentum.bits(), table.grad.bits()) << impl;  // of all rows
      for (int64_t r = 0; r < rows; ++r) {
        EXPECT_EQ(weight.get(4 * r) != 0, c.live[static_cast<size_t>(r)]) << impl << c.tau << r;
      }
    }
  }
}

// No row lives then, and 0 * NaN and 0 * inf reach every weight by way of the columns.
TEST(OptimizerStep, NanAndInfFollowTheFormula) {
  for (const float odd : {kNan, kInf}) {
    Table table = random_table(50, 33, 12);
    table.grad.set(20 * 33 + 4, odd);
    for (const std::string& impl : implementations("engram.optimizer_step")) {
      for (const double tau : {0.0, 1e-3}) {
        const Table got = dense_step(impl, table, {.tau = tau});
        for (int64_t i = 0; i < got.weight.size(); ++i) {
          ASSERT_TRUE(std::isnan(got.weight.get(i))) << impl << " " << odd << " element " << i;
          ASSERT_EQ(std::isfinite(got.momentum.get(i)), i != 20 * 33 + 4) << impl << " " << i;
        }
      }
    }
  }
}

// The sizes of gradients do not matter, also where their squares leave fp32.
TEST(OptimizerStep, ScaleOfTheGradientDoesNotMatter) {
  for (const std::string& impl : implementations("engram.optimizer_step")) {
    if (impl == "reference.f32") continue;
    Table table = random_table(60, 48, 14);
    const Table want = dense_step(impl, table, {.eps = 1e-40});
    for (const float factor : {0x1p-90F, 0x1p90F}) {
      Table other = table.copy();
      for (int64_t r = 0; r < 60; ++r) {
        set_row(other.grad, r, factor);
        set_row(other.momentum, r, factor);
      }
      const Table got = dense_step(impl, other, {.eps = 1e-40});
      expect_close(impl, got.weight, want.weight, impl + " " + std::to_string(factor));
    }
  }
}

const std::vector<std::vector<int64_t>> kLists = {
    {}, {0}, {129}, {0, 1, 2, 31, 32, 33, 64, 100, 128, 129}};

TEST(OptimizerStep, SparseIsDenseWithZeros) {
  for (const Types& types : kTypes) {
    for (const auto& list : kLists) {
      Table table = random_table(130, 45, 20, types);
      for (int64_t i = 0; i < table.momentum.size(); i += 3) {  // underflows to a zero of its sign
        table.momentum.set(i, i % 2 == 0 ? 0x1p-133F : -0x1p-133F);
      }
      const Listed of_32(table.grad, list, DType::i32);
      const Listed of_64(table.grad, list, DType::i64);
      for (int64_t r = 0; r < 130; ++r) {
        if (!std::binary_search(list.begin(), list.end(), r)) set_row(table.grad, r, 0);
      }
      for (int64_t i = 0; i < table.grad.size(); ++i) table.grad.set(i, table.grad.get(i) + 0.0F);
      for (const std::string& impl : implementations("engram.optimizer_step")) {
        const Table want = dense_step(impl, table, {});
        Table moved = table.copy();
        const Table apart = sparse_step(impl, table, of_32, {});
        const Table in_place = sparse_step(impl, moved, of_64, {}, true);
        EXPECT_EQ(apart.weight.bits(), want.weight.bits()) << impl << " " << list.size();
        EXPECT_EQ(apart.momentum.bits(), want.momentum.bits()) << impl << " " << list.size();
        EXPECT_EQ(in_place.weight.bits(), want.weight.bits()) << impl << " " << list.size();
        EXPECT_EQ(in_place.momentum.bits(), want.momentum.bits()) << impl << " " << list.size();
      }
    }
  }
}

TEST(OptimizerStep, LazyTouchesTheListedRowsAlone) {
  for (const Types& types : kTypes) {
    for (const auto& list : kLists) {
      Table table = random_table(130, 45, 30, types);
      const auto count = static_cast<int64_t>(list.size());
      Table alone{Array(types.weight, {count, 45}), Array(types.grad, {count, 45}),
                  Array(types.momentum, {count, 45})};
      for (int64_t i = 0; i < count * 45; ++i) {
        const int64_t from = list[static_cast<size_t>(i / 45)] * 45 + i % 45;
        alone.weight.set(i, table.weight.get(from));
        alone.grad.set(i, table.grad.get(from));
        alone.momentum.set(i, table.momentum.get(from));
      }
      const Listed listed(table.grad, list, count % 2 == 0 ? DType::i32 : DType::i64);
      for (int64_t r = 0; r < 130; ++r) {  // nobody looks at these
        if (!std::binary_search(list.begin(), list.end(), r)) set_row(table.momentum, r, kNan);
      }
      for (const std::string& impl : implementations("engram.optimizer_step")) {
        const Table want = dense_step(impl, alone, {});
        Table moved = table.copy();
        const Table apart = lazy_step(impl, table, listed, {});
        const Table in_place = lazy_step(impl, moved, listed, {}, true);
        EXPECT_EQ(apart.weight.bits(), in_place.weight.bits()) << impl;
        EXPECT_EQ(apart.momentum.bits(), in_place.momentum.bits()) << impl;
        for (int64_t r = 0, u = 0; r < 130; ++r) {
          const bool is_listed = u < count && list[static_cast<size_t>(u)] == r;
          const auto expected = [&](const Array& before, const Array& after) {
            return is_listed ? after.bits(u, u + 1) : before.bits(r, r + 1);
          };
          ASSERT_EQ(apart.weight.bits(r, r + 1), expected(table.weight, want.weight)) << impl << r;
          ASSERT_EQ(apart.momentum.bits(r, r + 1), expected(table.momentum, want.momentum))
              << impl << r;
          u += is_listed ? 1 : 0;
        }
      }
    }
  }
}

TEST(OptimizerStep, RefusesBadRows) {
  Table table = random_table(20, 4, 40);
  const auto refusal = [&](const std::vector<int64_t>& list, DType type) {
    Listed listed(table.grad, std::vector<int64_t>(list.size(), 0), type);
    for (size_t u = 0; u < list.size(); ++u) {
      const auto at = static_cast<int64_t>(u);
      if (type == DType::i64) listed.rows.element<int64_t>(at) = list[u];
      if (type == DType::i32) listed.rows.element<int32_t>(at) = static_cast<int32_t>(list[u]);
    }
    const std::string sparse = error_of([&] { sparse_step("", table, listed, {}); });
    const std::string lazy = error_of([&] { lazy_step("", table, listed, {}); });
    EXPECT_EQ(sparse.substr(sparse.find(':')), lazy.substr(lazy.find(':')));
    return sparse;
  };
  const std::string rule =
      "engram.optimizer_step_sparse: tensor 'unique_rows': expected strictly ascending rows below "
      "20, got ";
  for (const DType type : {DType::i32, DType::i64}) {
    EXPECT_EQ(refusal({1, 1}, type), rule + "1 at position 1");
    EXPECT_EQ(refusal({2, 1}, type), rule + "1 at position 1");
    EXPECT_EQ(refusal({-1, 1}, type), rule + "-1 at position 0");
    EXPECT_EQ(refusal({1, 20}, type), rule + "20 at position 1");
  }
}

TEST(OptimizerStep, RefusesWhatTheTableForbids) {
  Table table = random_table(8, 16, 41);
  OptimizerStep p = {.weight = table.weight,
                     .grad = table.grad,
                     .momentum = table.momentum,
                     .new_weight = table.weight,
                     .new_momentum = table.momentum,
                     .lr = 0.1,
                     .eps = 1e-20};
  Context context = Context::cpu(1);
  const size_t bytes = workspace_bytes(context, p);
  EXPECT_GE(bytes, 8 * 16 * sizeof(float));
  EXPECT_EQ(error_of([&] { optimizer_step(context, p); }),
            "engram.optimizer_step: workspace: expected at least " + std::to_string(bytes) +
                " bytes, got 0");
  const Buffer workspace = workspace_for(context, p);
  p.repeat = 65;
  EXPECT_EQ(error_of([&] { optimizer_step(context, p); }),
            "engram.optimizer_step: attribute 'repeat': expected in [1,64], got 65");
  p.repeat = 5;
  p.new_weight = table.momentum;
  EXPECT_EQ(error_of([&] { optimizer_step(context, p); }),
            "engram.optimizer_step: tensor 'weight': expected memory apart from 'momentum', got "
            "overlapping memory");
  p.new_weight = table.weight;
  p.lr.reset();
  EXPECT_EQ(error_of([&] { optimizer_step(context, p); }),
            "engram.optimizer_step: attribute 'lr': expected a value, got none");
}

}  // namespace
}  // namespace ehc::engram
