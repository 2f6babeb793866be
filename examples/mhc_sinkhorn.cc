// How many rounds make a mixing map doubly stochastic: the worst row and column sum of maps made
// from random logits, for more and more rounds of Sinkhorn's iteration.
//
// Columns come last in a round, so their sums are 1 but for eps at once; rows take their time.
#include <ehc/mhc/sinkhorn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numbers>
#include <random>
#include <vector>

namespace {

constexpr int64_t kTokens = 3;
constexpr int64_t kStreams = 4;
constexpr int64_t kMap = kStreams * kStreams;
constexpr double kEps = 1e-6;

// Normal numbers from 24-bit uniform ones, by Box and Muller on blocks of 16: the first eight give
// the radius, the last eight the angle.
std::vector<float> normals(size_t blocks) {
  std::mt19937 generator(0);
  std::vector<float> out;
  for (size_t block = 0; block < blocks; ++block) {
    std::array<double, 16> uniform{};
    for (double& u : uniform) u = static_cast<double>(generator() & 0xffffffU) * 0x1p-24;
    std::array<float, 16> normal{};
    for (size_t i = 0; i < 8; ++i) {
      const double radius = std::sqrt(-2 * std::log(1 - uniform[i]));
      const double angle = 2 * std::numbers::pi * uniform[i + 8];
      normal[i] = static_cast<float>(radius * std::cos(angle));
      normal[i + 8] = static_cast<float>(radius * std::sin(angle));
    }
    out.insert(out.end(), normal.begin(), normal.end());
  }
  return out;
}

// The largest |sum - 1| over lines of a map; `stride` steps along a line, `next` to the next line.
float deviation(const std::vector<float>& maps, int64_t stride, int64_t next) {
  float worst = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t line = 0; line < kStreams; ++line) {
      const float* at = maps.data() + t * kMap + line * next;
      float sum = 0;
      for (int64_t i = 0; i < kStreams; ++i) sum += at[i * stride];
      worst = std::max(worst, std::fabs(sum - 1));
    }
  }
  return worst;
}

void print_first(const char* label, const std::vector<float>& maps) {
  for (int64_t i = 0; i < kStreams; ++i) {
    const float* row = maps.data() + i * kStreams;
    std::printf("%s [%.7f %.7f %.7f %.7f]\n", label, static_cast<double>(row[0]),
                static_cast<double>(row[1]), static_cast<double>(row[2]),
                static_cast<double>(row[3]));
  }
}

}  // namespace

int main() {
  std::vector<float> logits = normals(kTokens);  // a map has 16 entries, one block
  print_first("normal", logits);
  for (float& x : logits) x *= 2;

  using ehc::DType;
  using ehc::Tensor;
  ehc::Context context = ehc::Context::cpu(1);
  std::vector<float> maps(logits.size());
  for (const int64_t repeat : {1, 2, 3, 5, 10, 20, 30, 50}) {
    ehc::mhc::sinkhorn_fwd(
        context, {.comb_logits = Tensor(logits.data(), DType::f32, {kTokens, kStreams, kStreams}),
                  .comb = Tensor(maps.data(), DType::f32, {kTokens, kStreams, kStreams}),
                  .repeat = repeat,
                  .eps = kEps});
    std::printf("repeat %lld: max |row_sum - 1| = %.3e, max |col_sum - 1| = %.3e\n",
                static_cast<long long>(repeat), static_cast<double>(deviation(maps, 1, kStreams)),
                static_cast<double>(deviation(maps, kStreams, 1)));
    if (repeat == 10) print_first("map", maps);
  }
}
