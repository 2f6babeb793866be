#include "ehc/engram/gather_bwd.h"

#include <map>

#include "ehc/engram/gather.h"
#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;

constexpr const char* kName = "engram.gather_bwd";

std::vector<std::string> implementations() { return test::implementations(kName); }
// Those that share the order of summation.
std::vector<std::string> kernels() {
  std::vector<std::string> names;
  for (const std::string& impl : implementations()) {
    if (impl.substr(0, 4) == "cpu.") names.push_back(impl);
  }
  return names;
}

void run(const std::string& impl, int threads, const GatherBackward& params) {
  Context context = context_for(impl, threads);
  const Buffer workspace = test::workspace_for(context, params);
  gather_bwd(context, params);
}

// mixed: of -1 and all rows; same: nothing but the last row; runs: few rows, each named often.
enum class Pattern { mixed, absent, same, runs };

Array make_indices(DType type, int64_t tokens, int64_t columns, int64_t rows, Pattern pattern,
                   uint32_t seed, test::Layout layout = {}) {
  Array indices(type, {tokens, columns}, layout);
  std::mt19937 generator(seed);
  for (int64_t i = 0; i < indices.size(); ++i) {
    int64_t index = -1;
    if (pattern == Pattern::mixed) index = static_cast<int64_t>(generator() % (rows + 1)) - 1;
    if (pattern == Pattern::same) index = rows - 1;
    if (pattern == Pattern::runs) index = i % 7 == 0 ? -1 : (i * i % 11 % 3) * (rows / 3);
    if (type == DType::i64) {
      indices.element<int64_t>(i) = index;
    } else {
      indices.element<int32_t>(i) = static_cast<int32_t>(index);
    }
  }
  return indices;
}

int64_t index_at(const Array& indices, int64_t i) {
  return indices.view().dtype == DType::i64 ? indices.element<int64_t>(i)
                                            : indices.element<int32_t>(i);
}

// By row, its summands' positions in ascending order.
std::map<int64_t, std::vector<int64_t>> positions_of(const Array& indices) {
  std::map<int64_t, std::vector<int64_t>> positions;
  for (int64_t i = 0; i < indices.size(); ++i) {
    if (const int64_t row = index_at(indices, i); row >= 0) positions[row].push_back(i);
  }
  return positions;
}

// The promised order: chains of 256 from +0 (the last of up to 511), added likewise.
float sum_of(const std::vector<float>& terms) {
  const size_t count = std::max<size_t>(1, terms.size() / 256);
  std::vector<float> chains(count, 0.0F);
  for (size_t i = 0; i < terms.size(); ++i) chains[std::min(i / 256, count - 1)] += terms[i];
  return count == 1 ? chains[0] : sum_of(chains);
}

// [rows, width] of the promised sums.
Array expected_table(const Array& grad, const Array& indices, int64_t rows, int64_t width) {
  Array table(DType::f32, {rows, width});
  for (const auto& [row, positions] : positions_of(indices)) {
    for (int64_t i = 0; i < width; ++i) {
      std::vector<float> terms;
      for (const int64_t at : positions) terms.push_back(grad.get(at * width + i));
      table.set(row * width + i, sum_of(terms));
    }
  }
  return table;
}

struct Shape {
  int64_t tokens, columns, width, rows;
  Pattern pattern;
};

constexpr Shape kShapes[] = {
    {0, 3, 7, 5, Pattern::mixed},      {1, 1, 1, 1, Pattern::same},
    {2, 4, 64, 9, Pattern::mixed},     {31, 3, 33, 1000, Pattern::mixed},
    {33, 5, 100, 20, Pattern::absent}, {33, 16, 160, 37, Pattern::mixed},
    {31, 2, 257, 3, Pattern::same},    {300, 16, 9, 41, Pattern::runs},
    {700, 8, 40, 30, Pattern::same},   {256, 2, 16, 4000, Pattern::same},
    {64, 4, 1, 70000, Pattern::mixed}, {0, 2, 8, 0, Pattern::absent},
};

// The promised order, bit for bit, on every instruction set; and the references to rounding.
TEST(GatherBackward, SumsInThePromisedOrder) {
  uint32_t seed = 1;
  for (const Shape& s : kShapes) {
    for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
      const DType index_type = ++seed % 2 == 0 ? DType::i32 : DType::i64;
      const Array grad = Array::random(type, {s.tokens, s.columns * s.width}, ++seed);
      const Array indices =
          make_indices(index_type, s.tokens, s.columns, s.rows, s.pattern, ++seed);
      const Array expected = expected_table(grad, indices, s.rows, s.width);
      for (const std::string& impl : implementations()) {
        if (impl.substr(0, 4) != "cpu." && s.rows > 10000) continue;  // every row searches
        SCOPED_TRACE(impl + " " + std::string(name_of(type)) + " T=" + std::to_string(s.tokens) +
                     " C=" + std::to_string(s.columns) + " hd=" + std::to_string(s.width));
        Array got(DType::f32, {s.rows, s.width});
        got.fill(5);
        run(impl, 1,
            {.grad_embedding = grad, .indices = indices, .rows = s.rows, .grad_table = got});
        if (impl.substr(0, 4) == "cpu.") {
          EXPECT_EQ(got.bits(), expected.bits());
        } else {
          test::expect_close("reference.f32", got, expected, impl);  // room for long sums
        }
      }
    }
  }
}

// Threads, strides and alignment change no bit; nor does the form, nor a target of zeros.
TEST(GatherBackward, ThreadsLayoutAndFormChangeNoBit) {
  uint32_t seed = 100;
  for (const Shape& s : kShapes) {
    const Array grad = Array::random(DType::bf16, {s.tokens, s.columns * s.width}, ++seed);
    const Array indices = make_indices(DType::i32, s.tokens, s.columns, s.rows, s.pattern, ++seed);
    const Array target = Array::random(DType::f32, {s.rows, s.width}, ++seed);
    const auto rows_named = positions_of(indices);
    for (const std::string& impl : kernels()) {
      SCOPED_TRACE(impl + " T=" + std::to_string(s.tokens) + " hd=" + std::to_string(s.width));
      Array first(DType::f32, {s.rows, s.width});
      run(impl, 1,
          {.grad_embedding = grad, .indices = indices, .rows = s.rows, .grad_table = first});
      for (const int threads : {2, 3, 5, 8}) {
        const test::Layout layout = {threads % 3, threads % 2};
        Array again(DType::f32, {s.rows, s.width}, layout);
        again.fill(test::kNan);
        run(impl, threads,
            {.grad_embedding = grad.copy(layout),
             .indices = indices.copy(layout),
             .rows = s.rows,
             .grad_table = again});
        EXPECT_EQ(again.bits(), first.bits()) << threads;
      }

      const int64_t capacity = s.tokens * s.columns;
      Array unique(DType::i32, {capacity});
      Array sums(DType::f32, {capacity, s.width}, {3, 0});
      int64_t count = -1;
      run(impl, 3,
          {.grad_embedding = grad,
           .indices = indices,
           .rows = s.rows,
           .unique_rows = unique,
           .grad_rows = sums,
           .unique_count = &count});
      ASSERT_EQ(count, static_cast<int64_t>(rows_named.size()));
      int64_t u = 0;
      for (const auto& [row, positions] : rows_named) {
        EXPECT_EQ(unique.element<int32_t>(u), row);
        EXPECT_EQ(sums.bits(u, u + 1), first.bits(row, row + 1));
        ++u;
      }
      for (; u < capacity; ++u) EXPECT_EQ(unique.element<int32_t>(u), -1);

      // target + gradient, apart and in place; rows that are not named keep their bits.
      Array sum(DType::f32, {s.rows, s.width});
      run(impl, 2,
          {.grad_embedding = grad,
           .indices = indices,
           .grad_table_acc = target,
           .grad_table = sum});
      Array place = target.copy({2, 0});
      run(impl, 3,
          {.grad_embedding = grad,
           .indices = indices,
           .grad_table_acc = place,
           .grad_table = place});
      EXPECT_EQ(place.bits(), sum.bits());
      Array expected = target.copy();
      for (const auto& [row, positions] : rows_named) {
        for (int64_t i = row * s.width; i < (row + 1) * s.width; ++i) {
          expected.set(i, target.get(i) + first.get(i));
        }
      }
      EXPECT_EQ(sum.bits(), expected.bits());
    }
  }
}

// Rows beyond 32 bits take the wide entries; a sparse gradient needs no memory for the table.
TEST(GatherBackward, TablesBeyond32Bits) {
  constexpr int64_t kRows = int64_t{1} << 45;
  const Array grad = Array::random(DType::f32, {40, 3 * 5}, 1);
  Array narrow = make_indices(DType::i64, 40, 3, 20, Pattern::mixed, 2);
  Array wide = narrow.copy();
  for (int64_t i = 0; i < wide.size(); ++i) {
    if (index_at(narrow, i) >= 0) wide.element<int64_t>(i) = kRows - 20 + index_at(narrow, i);
  }
  for (const std::string& impl : implementations()) {
    Array unique[2] = {Array(DType::i64, {120}), Array(DType::i64, {120})};
    Array sums[2] = {Array(DType::f32, {120, 5}), Array(DType::f32, {120, 5})};
    int64_t count[2] = {};
    for (const int k : {0, 1}) {
      run(impl, 2,
          {.grad_embedding = grad,
           .indices = k == 0 ? narrow : wide,
           .rows = k == 0 ? 20 : kRows,
           .unique_rows = unique[k],
           .grad_rows = sums[k],
           .unique_count = &count[k]});
    }
    ASSERT_EQ(count[1], count[0]);
    EXPECT_EQ(sums[1].bits(), sums[0].bits()) << impl;
    for (int64_t u = 0; u < count[0]; ++u) {
      EXPECT_EQ(unique[1].element<int64_t>(u), kRows - 20 + unique[0].element<int64_t>(u));
    }
  }
}

TEST(GatherBackward, ManyRowsOnThreadsEqualTheReference) {
  const int64_t tokens = 3000, columns = 12, width = 24, rows = 200000;
  const Array grad = Array::random(DType::bf16, {tokens, columns * width}, 1);
  const Array indices = make_indices(DType::i32, tokens, columns, rows, Pattern::mixed, 2);
  const Array expected = expected_table(grad, indices, rows, width);
  Array got(DType::f32, {rows, width});
  for (const std::string& impl : kernels()) {
    got.fill(1);
    run(impl, 2, {.grad_embedding = grad, .indices = indices, .rows = rows, .grad_table = got});
    EXPECT_EQ(std::memcmp(got.view().data, expected.view().data,
                          static_cast<size_t>(rows * width) * sizeof(float)),
              0)
        << impl;
  }
}

// <gather_fwd(table), grad> has the gradient of the table: exact for small integers.
TEST(GatherBackward, IsTheTransposeOfTheForward) {
  const int64_t tokens = 50, columns = 4, width = 6, rows = 13;
  Array table(DType::f32, {rows, width});
  Array grad(DType::f32, {tokens, columns * width});
  std::mt19937 generator(4);
  for (int64_t i = 0; i < table.size(); ++i) table.set(i, static_cast<float>(generator() % 9) - 4);
  for (int64_t i = 0; i < grad.size(); ++i) grad.set(i, static_cast<float>(generator() % 9) - 4);
  const Array indices = make_indices(DType::i64, tokens, columns, rows, Pattern::mixed, 5);
  Array embedding(DType::f32, {tokens, columns * width});
  Array grad_table(DType::f32, {rows, width});
  Context context = Context::cpu(1);
  gather_fwd(context, {.table = table, .indices = indices, .embedding = embedding});
  run("", 2, {.grad_embedding = grad, .indices = indices, .rows = rows, .grad_table = grad_table});
  float forward = 0, backward = 0;
  for (int64_t i = 0; i < grad.size(); ++i) forward += embedding.get(i) * grad.get(i);
  for (int64_t i = 0; i < table.size(); ++i) backward += table.get(i) * grad_table.get(i);
  EXPECT_EQ(forward, backward);
}

TEST(GatherBackward, NanAndInfReachTheirOwnRowsOnly) {
  Array grad = Array::random(DType::bf16, {3, 2 * 40}, 1);
  grad.set(41, test::kNan);          // (0, 1)
  grad.set(2 * 80 + 3, test::kInf);  // (2, 0)
  const int32_t indices[] = {0, 1, 2, -1, 3, 0};
  for (const std::string& impl : implementations()) {
    Array table(DType::f32, {5, 40});
    run(impl, 2,
        {.grad_embedding = grad,
         .indices = {indices, DType::i32, {3, 2}},
         .rows = 5,
         .grad_table = table});
    for (int64_t i = 0; i < table.size(); ++i) {
      EXPECT_EQ(std::isnan(table.get(i)), i == 41) << impl << i;
      EXPECT_EQ(std::isinf(table.get(i)), i == 3 * 40 + 3) << impl << i;
    }
  }
}

TEST(GatherBackward, RefusesWrongArguments) {
  const Array grad = Array::random(DType::f32, {2, 3 * 8}, 1);
  Array table(DType::f32, {4, 8});
  const std::string before = table.bits();
  const auto refusal = [&](std::vector<int64_t> values, GatherBackward params) {
    params.grad_embedding = grad;
    params.indices = Tensor(values.data(), DType::i64, {2, 3});
    Context context = Context::cpu(1);
    const std::string text = error_of([&] { gather_bwd(context, params); });
    EXPECT_EQ(table.bits(), before);
    return text;
  };
  const std::string name = "engram.gather_bwd: ";
  const std::string index = name + "tensor 'indices': expected -1 or a row below 4, got ";
  EXPECT_EQ(refusal({0, 1, 2, 3, 4, 0}, {.rows = 4, .grad_table = table}),
            index + "4 at position [1,1]");
  EXPECT_EQ(refusal({0, 1, -2, 3, 3, 0}, {.rows = 4, .grad_table = table}),
            index + "-2 at position [0,2]");
  const std::vector<int64_t> good = {0, 1, 2, 3, -1, 0};
  EXPECT_EQ(refusal(good, {.grad_table = table}),
            name + "attribute 'rows': expected a value without 'grad_table_acc', got none");
  EXPECT_EQ(refusal(good, {.rows = 5, .grad_table = table}),
            name + "tensor 'grad_table': expected F32[5,8], got F32[4,8]");
  Array unique(DType::i64, {6});
  Array sums(DType::f32, {6, 8});
  EXPECT_EQ(
      refusal(good, {.rows = 4, .grad_table = table, .unique_rows = unique, .grad_rows = sums}),
      name +
          "tensor 'grad_table': expected either side of 'grad_table | unique_rows "
          "grad_rows', got 'grad_table', 'unique_rows', 'grad_rows'");
  EXPECT_EQ(refusal(good, {.grad_table_acc = table, .unique_rows = unique, .grad_rows = sums}),
            name +
                "tensor 'grad_table_acc': expected none: the sparse form has no target, got "
                "F32[4,8]");
  const std::string small = refusal(good, {.rows = 4, .grad_table = table});
  EXPECT_EQ(small.substr(0, name.size() + 29), name + "workspace: expected at least ");
}

}  // namespace
}  // namespace ehc::engram
