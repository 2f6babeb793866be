// The scaling inside the Engram optimizer, iteration by iteration: the rows and the columns of an
// update are brought to equal norms in turn, and in the end every row gets the norm alpha.
//
// The update itself is never rewritten: only one scale per row and one per column change.
#include <ehc/engram/sinkhorn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numbers>
#include <random>
#include <vector>

namespace {

constexpr int64_t kRows = 3;
constexpr int64_t kColumns = 4;
constexpr int kSteps = 8;
constexpr double kEps = 1e-20;
constexpr double kAlpha = 2;

// Pairs of normal numbers from 53-bit uniform ones, by Box and Muller.
std::vector<float> normals(size_t count) {
  std::mt19937 generator(1);
  const auto uniform = [&] {
    const uint64_t high = generator();
    const uint64_t bits = (high << 32 | generator()) & ((uint64_t{1} << 53) - 1);
    return static_cast<double>(bits) * 0x1p-53;
  };
  std::vector<float> out;
  while (out.size() < count) {
    const double angle = 2 * std::numbers::pi * uniform();
    const double radius = std::sqrt(-2 * std::log1p(-uniform()));
    out.push_back(static_cast<float>(radius * std::cos(angle)));
    out.push_back(static_cast<float>(radius * std::sin(angle)));
  }
  return out;
}

template <class Numbers>
void print(const char* label, const Numbers& numbers, int digits) {
  std::printf("%s [", label);
  const char* gap = "";
  for (const float x : numbers) {
    std::printf("%s%.*f", gap, digits, static_cast<double>(x));
    gap = " ";
  }
  std::printf("]\n");
}

float norm(const float* row) {
  float sum = 0;
  for (int64_t j = 0; j < kColumns; ++j) sum += row[j] * row[j];
  return std::sqrt(sum);
}

std::array<float, kRows> row_norms(const std::vector<float>& matrix) {
  std::array<float, kRows> out{};
  for (int64_t r = 0; r < kRows; ++r) {
    out[static_cast<size_t>(r)] = norm(matrix.data() + r * kColumns);
  }
  return out;
}

}  // namespace

int main() {
  const std::vector<float> update = normals(kRows * kColumns);
  std::array<float, kRows> row_scale{}, row_norm{};
  std::array<float, kColumns> col_scale{}, col_sumsq{};
  row_scale.fill(1);
  col_scale.fill(1);
  std::vector<float> out(update.size());
  const int64_t parts = ehc::engram::sinkhorn_partials(kRows);
  std::vector<float> col_partial(static_cast<size_t>(parts * kColumns));

  using ehc::DType;
  using ehc::Tensor;
  const Tensor update_view(update.data(), DType::f32, {kRows, kColumns});
  const Tensor rows(row_scale.data(), DType::f32, {kRows});
  const Tensor columns(col_scale.data(), DType::f32, {kColumns});
  const Tensor partial(col_partial.data(), DType::f32, {parts, kColumns});

  // The update with its present scales.
  const auto scaled = [&] {
    std::vector<float> matrix(update);
    for (size_t i = 0; i < matrix.size(); ++i) {
      matrix[i] = row_scale[i / kColumns] * matrix[i] * col_scale[i % kColumns];
    }
    return matrix;
  };

  for (int64_t r = 0; r < kRows; ++r) {
    const auto row = update.begin() + r * kColumns;
    print("update", std::vector<float>(row, row + kColumns), 6);
  }
  ehc::Context context = ehc::Context::cpu(1);
  for (int step = 0; step < kSteps; ++step) {
    ehc::engram::sinkhorn_step(context, {.update = update_view,
                                         .row_scale = rows,
                                         .col_scale = columns,
                                         .row_norm = Tensor(row_norm.data(), DType::f32, {kRows}),
                                         .new_row_scale = rows,
                                         .col_partial = partial,
                                         .eps = kEps});
    float deviation = 0;
    for (const float x : row_norms(scaled())) deviation = std::max(deviation, std::fabs(x - 1));
    ehc::engram::sinkhorn_step_reduce(
        context, {.col_partial = partial,
                  .col_scale = columns,
                  .col_sumsq = Tensor(col_sumsq.data(), DType::f32, {kColumns}),
                  .new_col_scale = columns,
                  .eps = kEps});
    std::array<float, kColumns> col_norm{};
    std::transform(col_sumsq.begin(), col_sumsq.end(), col_norm.begin(),
                   [](float x) { return std::sqrt(x); });
    std::printf("step %d: max |row L2 - 1| = %.3e, ", step, static_cast<double>(deviation));
    print("col L2 before col step", col_norm, 5);
  }
  print("row L2 before finalize", row_norms(scaled()), 5);
  ehc::engram::sinkhorn_finalize(context, {.update = update_view,
                                           .row_scale = rows,
                                           .col_scale = columns,
                                           .out = Tensor(out.data(), DType::f32, {kRows, kColumns}),
                                           .eps = kEps,
                                           .alpha = kAlpha});
  print("row L2 after finalize", row_norms(out), 5);
  for (int64_t r = 0; r < kRows; ++r) {
    print("result",
          std::vector<float>(out.begin() + r * kColumns, out.begin() + (r + 1) * kColumns), 6);
  }
}
