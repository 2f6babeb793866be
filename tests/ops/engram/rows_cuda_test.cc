// Table rows on a device: what cases cannot say. Skipped without one.
#include <cmath>

#include "core/cuda_support.h"
#include "ehc/engram/dequant_rows.h"
#include "ehc/engram/gather.h"
#include "ehc/engram/gather_bwd.h"
#include "ehc/engram/gather_dequant.h"
#include "ehc/engram/momentum_update.h"
#include "ehc/engram/optimizer_step.h"
#include "ehc/engram/quantize_rows.h"
#include "ehc/engram/sinkhorn.h"
#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;

class RowsOnCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_support::device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

// A contiguous copy of an array in device memory.
class OnDevice {
 public:
  OnDevice(const Context& context, const Array& array)
      : tensor_(nullptr, array.view().dtype, array.view().shape, array.view().rank) {
    const std::string bits = array.bits();
    memory_ = Buffer(context, bits.size());
    memory_.upload(bits.data());
    tensor_.data = memory_.data();
    tensor_.device = Device::cuda;
  }
  operator Tensor() const { return tensor_; }  // NOLINT: used as a tensor
  [[nodiscard]] std::string bits() const {
    std::string out(memory_.bytes(), 0);
    memory_.download(out.data());
    return out;
  }
  [[nodiscard]] std::vector<float> floats() const {
    std::vector<float> out(memory_.bytes() / sizeof(float));
    memory_.download(out.data());
    return out;
  }

 private:
  Buffer memory_;
  Tensor tensor_;
};

template <class P, class Run>
void run(Context& context, const P& params, const Run& operation) {
  const Buffer workspace(context, workspace_bytes(context, params));
  context.set_workspace(workspace.data(), workspace.bytes());
  operation(context, params);
  synchronize(context);
  context.set_workspace(nullptr, 0);
}
constexpr auto kGather = [](Context& c, const auto& p) { gather_bwd(c, p); };

Array zeros(DType type, std::vector<int64_t> shape) { return {type, std::move(shape)}; }

enum class Pattern { few, many, none, same, long_rows };

Array make_indices(DType type, int64_t tokens, int64_t columns, int64_t rows, Pattern pattern) {
  Array out(type, {tokens, columns});
  std::mt19937_64 generator(7);
  for (int64_t i = 0; i < out.size(); ++i) {
    int64_t row = static_cast<int64_t>(generator() % static_cast<uint64_t>(rows));
    if (pattern == Pattern::few) row = row / 7 * 7;
    if (pattern == Pattern::none) row = -1;
    if (pattern == Pattern::same) row = rows - 1;
    if (pattern == Pattern::long_rows && generator() % 4 != 0) row %= 5;
    if (generator() % 8 == 0) row = pattern == Pattern::same ? row : -1;
    if (type == DType::i64) {
      out.element<int64_t>(i) = row;
    } else {
      out.element<int32_t>(i) = static_cast<int32_t>(row);
    }
  }
  return out;
}

// Dense, in place and sparse, against the bits of the CPU.
TEST_F(RowsOnCuda, GradientsHaveTheBitsOfTheCpu) {
  struct Shape {
    int64_t tokens, columns, rows, width;
    DType type, index;
    Pattern pattern;
  };
  const Shape shapes[] = {
      {1, 1, 1, 1, DType::f32, DType::i32, Pattern::many},
      {257, 3, 1000, 7, DType::bf16, DType::i32, Pattern::few},
      {1000, 16, 70000, 64, DType::bf16, DType::i64, Pattern::many},
      {900, 24, 50, 128, DType::f16, DType::i32, Pattern::few},
      {700, 24, 3, 40, DType::f32, DType::i32, Pattern::none},
      {2000, 12, 9, 20, DType::f32, DType::i32, Pattern::same},
      {20000, 16, 300, 8, DType::bf16, DType::i32, Pattern::same},
      {3000, 12, 4000, 33, DType::bf16, DType::i64, Pattern::long_rows},
      {600, 24, 40000, 600, DType::bf16, DType::i32, Pattern::long_rows},
  };
  Context cpu = Context::cpu(2);
  Context cuda = Context::cuda(0, nullptr);
  for (const Shape& s : shapes) {
    SCOPED_TRACE("T=" + std::to_string(s.tokens) + " rows=" + std::to_string(s.rows));
    const int64_t capacity = s.tokens * s.columns;
    const Array grad = Array::random(s.type, {s.tokens, s.columns * s.width}, 1);
    const Array indices = make_indices(s.index, s.tokens, s.columns, s.rows, s.pattern);
    const Array target = Array::random(DType::f32, {s.rows, s.width}, 2);
    const OnDevice grad_on(cuda, grad), indices_on(cuda, indices);

    Array table = zeros(DType::f32, {s.rows, s.width});
    run(cpu,
        GatherBackward{
            .grad_embedding = grad, .indices = indices, .rows = s.rows, .grad_table = table},
        kGather);
    const OnDevice table_on(cuda, Array::random(DType::f32, {s.rows, s.width}, 3));
    for (int repeat = 0; repeat < 3; ++repeat) {
      run(cuda,
          GatherBackward{.grad_embedding = grad_on,
                         .indices = indices_on,
                         .rows = s.rows,
                         .grad_table = table_on},
          kGather);
      ASSERT_EQ(table_on.bits() == table.bits(), true);
    }

    Array place = target.copy();
    const OnDevice place_on(cuda, target);
    run(cpu,
        GatherBackward{.grad_embedding = grad,
                       .indices = indices,
                       .grad_table_acc = place,
                       .grad_table = place},
        kGather);
    run(cuda,
        GatherBackward{.grad_embedding = grad_on,
                       .indices = indices_on,
                       .grad_table_acc = place_on,
                       .grad_table = place_on},
        kGather);
    ASSERT_EQ(place_on.bits() == place.bits(), true);

    Array unique = zeros(s.index, {capacity});
    Array sums = zeros(DType::f32, {capacity, s.width});
    const OnDevice unique_on(cuda, unique), sums_on(cuda, sums);
    const OnDevice count_on(cuda, zeros(DType::i64, {1}));
    int64_t count = 0;
    run(cpu,
        GatherBackward{.grad_embedding = grad,
                       .indices = indices,
                       .rows = s.rows,
                       .unique_rows = unique,
                       .grad_rows = sums,
                       .unique_count = &count},
        kGather);
    run(cuda,
        GatherBackward{.grad_embedding = grad_on,
                       .indices = indices_on,
                       .rows = s.rows,
                       .unique_rows = unique_on,
                       .grad_rows = sums_on,
                       .unique_count = static_cast<Tensor>(count_on).as<int64_t>()},
        kGather);
    ASSERT_EQ(count_on.bits(), std::string(reinterpret_cast<const char*>(&count), sizeof count));
    ASSERT_EQ(unique_on.bits() == unique.bits(), true);
    ASSERT_EQ(sums_on.bits() == sums.bits(), true);
  }
}

TEST_F(RowsOnCuda, SparseGradientOfATableBeyond32Bits) {
  constexpr int64_t kRows = int64_t{1} << 45;
  const Array grad = Array::random(DType::f32, {900, 3 * 5}, 1);
  Array indices = make_indices(DType::i64, 900, 3, 20, Pattern::many);
  for (int64_t i = 0; i < indices.size(); ++i) {
    int64_t& index = indices.element<int64_t>(i);
    if (index >= 0) index = kRows - 20 + index;
  }
  Array unique = zeros(DType::i64, {2700}), sums = zeros(DType::f32, {2700, 5});
  Context cpu = Context::cpu(1);
  Context cuda = Context::cuda(0, nullptr);
  const OnDevice grad_on(cuda, grad), indices_on(cuda, indices), unique_on(cuda, unique),
      sums_on(cuda, sums);
  run(cpu,
      GatherBackward{.grad_embedding = grad,
                     .indices = indices,
                     .rows = kRows,
                     .unique_rows = unique,
                     .grad_rows = sums},
      kGather);
  run(cuda,
      GatherBackward{.grad_embedding = grad_on,
                     .indices = indices_on,
                     .rows = kRows,
                     .unique_rows = unique_on,
                     .grad_rows = sums_on},
      kGather);
  EXPECT_EQ(unique_on.bits() == unique.bits(), true);
  EXPECT_EQ(sums_on.bits() == sums.bits(), true);
}

// --- beyond 2^31 elements: the last row alone and behind all others ---

// A tensor of device memory, zeros but for its last row.
class Huge {
 public:
  Huge(Context& context, DType type, int64_t rows, int64_t width, const Array& last)
      : memory_(context, static_cast<size_t>(rows * width) * size_of(type)) {
    const int64_t shape[] = {rows, width};
    tensor_ = Tensor(memory_.data(), type, shape, 2);
    tensor_.device = Device::cuda;
    row_bytes_ = static_cast<size_t>(width) * size_of(type);
    // The gradient of no token is a table of zeros.
    const int64_t words[] = {static_cast<int64_t>(memory_.bytes() / sizeof(float)), 1};
    const int64_t nothing[] = {0, 1};
    Tensor zeros(memory_.data(), DType::f32, words, 2), grad(nullptr, DType::f32, nothing, 2);
    Tensor indices(nullptr, DType::i32, nothing, 2);
    zeros.device = grad.device = indices.device = Device::cuda;
    gather_bwd(context,
               {.grad_embedding = grad, .indices = indices, .rows = words[0], .grad_table = zeros});
    synchronize(context);
    if (last.size() == 0) return;
    const std::string bits = last.bits();
    cuda_support::copy_to_device(0, nullptr, last_row(), bits.data(), bits.size());
  }
  operator Tensor() const { return tensor_; }  // NOLINT: used as a tensor
  [[nodiscard]] std::string last_bits() const {
    std::string out(row_bytes_, 0);
    cuda_support::copy_to_host(0, nullptr, out.data(), last_row(), row_bytes_);
    return out;
  }

 private:
  [[nodiscard]] char* last_row() const {
    return static_cast<char*>(memory_.data()) + memory_.bytes() - row_bytes_;
  }
  Buffer memory_;
  Tensor tensor_;
  size_t row_bytes_ = 0;
};

TEST_F(RowsOnCuda, RowsBeyond31Bits) {
  constexpr int64_t kWidth = 256, kRows = (int64_t{1} << 31) / kWidth + 3;
  Context cuda = Context::cuda(0, nullptr);
  const Array f32 = Array::random(DType::f32, {1, kWidth}, 1);
  const Array scale = Array::random(DType::f32, {1, 1}, 2, 1, 0.1F);
  const Array none(DType::f32, {0});
  // Calls operation(rows, out) for one row and for many; the last rows are the same.
  const auto same_last = [&](DType type, int64_t width, const auto& operation) {
    const Huge alone(cuda, type, 1, width, none);
    operation(int64_t{1}, alone);
    const Huge many(cuda, type, kRows, width, none);
    operation(kRows, many);
    synchronize(cuda);
    EXPECT_EQ(many.last_bits() == alone.last_bits(), true);
  };
  {
    const Huge one(cuda, DType::f32, 1, kWidth, f32), all(cuda, DType::f32, kRows, kWidth, f32);
    Buffer scales(cuda, kRows);
    same_last(DType::f8_e4m3, kWidth, [&](int64_t rows, const Huge& out) {
      const int64_t shape[] = {rows, 1};
      Tensor scale_rows(scales.data(), DType::f8_e8m0, shape, 2);
      scale_rows.device = Device::cuda;
      quantize_rows(
          cuda,
          {.values = rows == 1 ? one : all, .group = kWidth, .weight = out, .scale = scale_rows});
    });
    same_last(DType::f32, kWidth, [&](int64_t rows, const Huge& out) {
      const Huge momentum(cuda, DType::bf16, rows, kWidth, none);
      momentum_update(cuda, {.grad = rows == 1 ? one : all,
                             .momentum = momentum,
                             .update = out,
                             .new_momentum = momentum,
                             .beta = 0.5,
                             .nesterov = true});
      synchronize(cuda);
    });
    const Huge row_scale(cuda, DType::f32, kRows, 1, scale),
        one_scale(cuda, DType::f32, 1, 1, scale);
    const OnDevice col_scale(cuda, Array::random(DType::f32, {kWidth}, 3, 1, 0.1F));
    same_last(DType::f32, kWidth, [&](int64_t rows, const Huge& out) {
      Tensor scales_of_rows = rows == 1 ? one_scale : row_scale;
      scales_of_rows.rank = 1;
      sinkhorn_finalize(cuda, {.update = rows == 1 ? one : all,
                               .row_scale = scales_of_rows,
                               .col_scale = col_scale,
                               .out = out,
                               .eps = 1e-20,
                               .alpha = 3});
    });
  }
  {
    Array weight(DType::u8, {1, kWidth}), exponent(DType::u8, {1, 1});
    for (int64_t i = 0; i < kWidth; ++i) weight.element<uint8_t>(i) = static_cast<uint8_t>(i * 37);
    exponent.element<uint8_t>(0) = 120;
    const Huge one(cuda, DType::u8, 1, kWidth, weight), all(cuda, DType::u8, kRows, kWidth, weight);
    const Huge one_scale(cuda, DType::u8, 1, 1, exponent);
    const Huge all_scales(cuda, DType::u8, kRows, 1, exponent);
    same_last(DType::bf16, kWidth, [&](int64_t rows, const Huge& out) {
      dequant_rows(cuda, {.weight = rows == 1 ? one : all,
                          .scale = rows == 1 ? one_scale : all_scales,
                          .group = kWidth,
                          .values = out});
    });
    // The last row of the table, gathered to the last place of the embedding.
    Array last(DType::i64, {1, 1});
    last.element<int64_t>(0) = kRows - 1;
    const Huge index(cuda, DType::i64, 1, 1, last), indices(cuda, DType::i64, kRows, 1, last);
    same_last(DType::bf16, kWidth, [&](int64_t rows, const Huge& out) {
      gather_dequant(cuda, {.weight = all,
                            .scale = all_scales,
                            .indices = rows == 1 ? index : indices,
                            .group = kWidth,
                            .embedding = out});
    });
    const Huge table(cuda, DType::bf16, kRows, kWidth, Array::random(DType::bf16, {1, kWidth}, 5));
    same_last(DType::bf16, kWidth, [&](int64_t rows, const Huge& out) {
      gather_fwd(cuda, {.table = table, .indices = rows == 1 ? index : indices, .embedding = out});
    });
    // The other indices are 0: their row is of very many chains.
    std::string sums[2];
    for (const int64_t tokens : {int64_t{1}, kRows}) {
      const Huge out(cuda, DType::f32, kRows, kWidth, none);
      const Huge grad(cuda, DType::bf16, tokens, kWidth,
                      Array::random(DType::bf16, {1, kWidth}, 6));
      run(cuda,
          GatherBackward{.grad_embedding = grad,
                         .indices = tokens == 1 ? index : indices,
                         .rows = kRows,
                         .grad_table = out},
          kGather);
      sums[tokens == 1 ? 0 : 1] = out.last_bits();
    }
    EXPECT_EQ(sums[0] == sums[1], true);
  }
}

// --- the optimizer ---

constexpr int64_t kRepeat = 3;
constexpr double kRate = 0.1, kEps = 1e-20;

// Every third row has a gradient; the momentum of others is alive too, or zero.
struct Step {
  Array weight, grad, momentum, listed, rows;

  Step(int64_t count, int64_t width, DType type)
      : weight(Array::random(type, {count, width}, 1)),
        grad(Array::random(type, {count, width}, 2)),
        momentum(Array::random(type, {count, width}, 3, 0, 0.3F)),
        listed(type, {(count + 2) / 3, width}),
        rows(DType::i32, {(count + 2) / 3}) {
    for (int64_t r = 0; r < count; ++r) {
      if (r % 3 == 0) rows.element<int32_t>(r / 3) = static_cast<int32_t>(r);
      for (int64_t j = 0; j < width; ++j) {
        if (r % 3 == 0) {
          listed.set(r / 3 * width + j, grad.get(r * width + j));
        } else {
          grad.set(r * width + j, 0);
        }
        if (r % 7 == 1) momentum.set(r * width + j, 0);
      }
    }
  }
};

template <class P>
void set_constants(P& p) {
  p.lr = kRate;
  p.eps = kEps;
  p.repeat = kRepeat;
}

TEST_F(RowsOnCuda, SparseStepIsTheDenseOneAndLazyThatOfItsRows) {
  Context cuda = Context::cuda(0, nullptr);
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const int64_t width : {7, 64, 200, 300, 1100, 9000}) {
      const int64_t count = width > 1000 ? 70 : 300;
      SCOPED_TRACE(std::to_string(width));
      const Step s(count, width, type);
      const OnDevice weight(cuda, s.weight), grad(cuda, s.grad), momentum(cuda, s.momentum);
      const OnDevice listed(cuda, s.listed), rows(cuda, s.rows);
      const OnDevice dense_weight(cuda, s.grad), dense_momentum(cuda, s.grad);
      OptimizerStep dense = {.weight = weight,
                             .grad = grad,
                             .momentum = momentum,
                             .new_weight = dense_weight,
                             .new_momentum = dense_momentum};
      set_constants(dense);
      run(cuda, dense, [](Context& c, const auto& p) { optimizer_step(c, p); });

      const OnDevice sparse_weight(cuda, s.grad), sparse_momentum(cuda, s.grad);
      OptimizerStepSparse sparse = {.weight = weight,
                                    .unique_rows = rows,
                                    .grad_rows = listed,
                                    .momentum = momentum,
                                    .new_weight = sparse_weight,
                                    .new_momentum = sparse_momentum};
      set_constants(sparse);
      run(cuda, sparse, [](Context& c, const auto& p) { optimizer_step_sparse(c, p); });
      EXPECT_EQ(sparse_weight.bits() == dense_weight.bits(), true);
      EXPECT_EQ(sparse_momentum.bits() == dense_momentum.bits(), true);

      // In place, where the kernels write what others read.
      const OnDevice place_weight(cuda, s.weight), place_momentum(cuda, s.momentum);
      dense.weight = dense.new_weight = place_weight;
      dense.momentum = dense.new_momentum = place_momentum;
      run(cuda, dense, [](Context& c, const auto& p) { optimizer_step(c, p); });
      EXPECT_EQ(place_weight.bits() == dense_weight.bits(), true);
      EXPECT_EQ(place_momentum.bits() == dense_momentum.bits(), true);

      // A lazy step, against a table of the listed rows.
      const int64_t few = (count + 2) / 3;
      Array few_weight(type, {few, width}), few_momentum(type, {few, width});
      for (int64_t i = 0; i < few * width; ++i) {
        few_weight.set(i, s.weight.get(i / width * 3 * width + i % width));
        few_momentum.set(i, s.momentum.get(i / width * 3 * width + i % width));
      }
      const OnDevice table_weight(cuda, few_weight), table_momentum(cuda, few_momentum);
      OptimizerStep table = {.weight = table_weight,
                             .grad = listed,
                             .momentum = table_momentum,
                             .new_weight = table_weight,
                             .new_momentum = table_momentum};
      set_constants(table);
      run(cuda, table, [](Context& c, const auto& p) { optimizer_step(c, p); });
      const OnDevice lazy_weight(cuda, s.grad), lazy_momentum(cuda, s.grad);
      OptimizerStepLazy lazy = {.weight = weight,
                                .unique_rows = rows,
                                .grad_rows = listed,
                                .momentum = momentum,
                                .new_weight = lazy_weight,
                                .new_momentum = lazy_momentum};
      set_constants(lazy);
      run(cuda, lazy, [](Context& c, const auto& p) { optimizer_step_lazy(c, p); });
      const size_t row = static_cast<size_t>(width) * size_of(type);
      const std::string got[] = {lazy_weight.bits(), lazy_momentum.bits()};
      const std::string moved[] = {table_weight.bits(), table_momentum.bits()};
      const std::string kept[] = {s.weight.bits(), s.momentum.bits()};
      for (const int k : {0, 1}) {
        for (size_t r = 0; r < static_cast<size_t>(count); ++r) {
          const std::string& from = r % 3 == 0 ? moved[k] : kept[k];
          EXPECT_EQ(got[k].substr(r * row, row) == from.substr((r % 3 == 0 ? r / 3 : r) * row, row),
                    true)
              << k << " " << r;
        }
      }
    }
  }
}

// The bits of the operators one after the other.
TEST_F(RowsOnCuda, StepIsTheComposition) {
  Context cuda = Context::cuda(0, nullptr);
  for (const int64_t width : {1, 7, 64, 130, 300, 600, 3000, 9000}) {
    SCOPED_TRACE(std::to_string(width));
    const int64_t count = width > 1000 ? 70 : 300;
    const Step s(count, width, DType::f32);
    const OnDevice weight(cuda, s.weight), grad(cuda, s.grad), momentum(cuda, s.momentum);
    const OnDevice new_weight(cuda, s.grad), new_momentum(cuda, s.grad), moved(cuda, s.grad);
    OptimizerStep step = {.weight = weight,
                          .grad = grad,
                          .momentum = momentum,
                          .new_weight = new_weight,
                          .new_momentum = new_momentum};
    set_constants(step);
    run(cuda, step, [](Context& c, const auto& p) { optimizer_step(c, p); });

    const OnDevice update(cuda, s.grad), delta(cuda, s.grad);
    momentum_update(cuda, {.grad = grad,
                           .momentum = momentum,
                           .update = update,
                           .new_momentum = moved,
                           .beta = 0.95,
                           .nesterov = true});
    Array ones = zeros(DType::f32, {count}), col_ones = zeros(DType::f32, {width});
    ones.fill(1);
    col_ones.fill(1);
    const OnDevice norm(cuda, ones), scratch(cuda, ones), col_scale(cuda, col_ones);
    const OnDevice squares(cuda, col_ones);
    const OnDevice partial(cuda, zeros(DType::f32, {sinkhorn_partials(count), width}));
    const auto row_step = [&](const OnDevice& scale) {
      run(cuda,
          SinkhornStep{.update = update,
                       .row_scale = scale,
                       .col_scale = col_scale,
                       .row_norm = norm,
                       .new_row_scale = scale,
                       .col_partial = partial,
                       .eps = kEps},
          [](Context& c, const auto& p) { sinkhorn_step(c, p); });
    };
    row_step(scratch);
    double total = 0;
    const std::vector<float> norms = norm.floats();
    for (const float x : norms) total += static_cast<double>(x);
    Array live = ones.copy();
    const double threshold =
        static_cast<double>(static_cast<float>(1e-3)) * total / static_cast<double>(count);
    for (int64_t r = 0; r < count; ++r) {
      live.set(r, static_cast<double>(norms[static_cast<size_t>(r)]) > threshold ? 1.0F : 0.0F);
    }
    const OnDevice row_scale(cuda, live);
    for (int64_t k = 0; k < kRepeat; ++k) {
      row_step(row_scale);
      sinkhorn_step_reduce(cuda, {.col_partial = partial,
                                  .col_scale = col_scale,
                                  .col_sumsq = squares,
                                  .new_col_scale = col_scale,
                                  .eps = kEps});
    }
    sinkhorn_finalize(cuda, {.update = update,
                             .row_scale = row_scale,
                             .col_scale = col_scale,
                             .out = delta,
                             .eps = kEps,
                             .alpha = std::sqrt(static_cast<double>(width))});
    synchronize(cuda);
    const std::vector<float> change = delta.floats(), got = new_weight.floats();
    const auto rate = static_cast<float>(kRate * 0.18);
    int64_t different = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const float w = s.weight.get(static_cast<int64_t>(i));
      const bool lives = live.get(static_cast<int64_t>(i) / width) != 0;
      if (got[i] != (lives ? std::fma(-rate, change[i], w) : w)) ++different;
    }
    EXPECT_EQ(different, 0);
    EXPECT_EQ(new_momentum.bits() == moved.bits(), true);
  }
}

}  // namespace
}  // namespace ehc::engram
