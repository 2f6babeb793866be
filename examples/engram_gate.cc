// The Engram gate, step by step and fused: same numbers, fewer bytes.
//
// The naive form writes two normalised copies of its inputs and multiplies them; the fused operator
// keeps three running sums per stream instead.
#include <ehc/engram/fused_weight.h>
#include <ehc/engram/gate.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t kTokens = 5;
constexpr int64_t kStreams = 4;
constexpr int64_t kWidth = 256;
constexpr double kEps = 1e-20;
constexpr double kClamp = 1e-6;

float from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }
uint16_t to_bf16(float x) {  // to nearest even; the numbers here are finite
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::vector<uint16_t> normal_bf16(int64_t count, float mean, float spread) {
  static std::mt19937 generator(0);
  std::normal_distribution<float> normal(mean, spread);
  std::vector<uint16_t> out(static_cast<size_t>(count));
  for (uint16_t& x : out) x = to_bf16(normal(generator));
  return out;
}

void print_shape(const char* name, const ehc::Tensor& t) {
  std::printf("%s (", name);
  for (int k = 0; k < t.rank; ++k) {
    std::printf(k == 0 ? "%lld" : ", %lld", static_cast<long long>(t.shape[k]));
  }
  std::printf(") %s\n", t.dtype == ehc::DType::bf16 ? "bf16" : "fp32");
}

long long bytes(const ehc::Tensor& t) {
  return static_cast<long long>(t.numel()) * static_cast<long long>(ehc::size_of(t.dtype));
}

// Adds halves until one term is left: the width is a power of two.
float sum(std::vector<float> terms) {
  for (size_t half = terms.size() / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) terms[i] += terms[i + half];
  }
  return terms[0];
}

float reciprocal_rms(const std::vector<float>& row) {
  std::vector<float> squares;
  squares.reserve(row.size());
  for (const float x : row) squares.push_back(x * x);
  return 1 / std::sqrt(sum(squares) / static_cast<float>(row.size()) + static_cast<float>(kEps));
}

// One row of a bf16 tensor as floats.
std::vector<float> row_of(const uint16_t* data, int64_t row) {
  std::vector<float> out;
  for (int64_t i = 0; i < kWidth; ++i) out.push_back(from_bf16(data[row * kWidth + i]));
  return out;
}

}  // namespace

int main() {
  const auto hidden = normal_bf16(kTokens * kStreams * kWidth, 0, 1);
  const auto kv = normal_bf16(kTokens * (kStreams + 1) * kWidth, 0, 1);
  const auto weight_hidden = normal_bf16(kStreams * kWidth, 1, 0.1F);
  const auto weight_embed = normal_bf16(kStreams * kWidth, 1, 0.1F);
  std::vector<float> weight_fused(kStreams * kWidth);
  std::vector<uint16_t> out(hidden.size());
  std::vector<float> dot(kTokens * kStreams), alpha(dot), rstd_hidden(dot), rstd_key(dot);

  // Tensors are views: a pointer, a dtype and a shape. Key and value are parts of kv.
  using ehc::DType;
  using ehc::Tensor;
  const Tensor x(hidden.data(), DType::bf16, {kTokens, kStreams, kWidth});
  const Tensor packed(kv.data(), DType::bf16, {kTokens, kStreams + 1, kWidth});
  const Tensor wh(weight_hidden.data(), DType::bf16, {kStreams, kWidth});
  const Tensor we(weight_embed.data(), DType::bf16, {kStreams, kWidth});
  const Tensor wf(weight_fused.data(), DType::f32, {kStreams, kWidth});
  const Tensor y(out.data(), DType::bf16, {kTokens, kStreams, kWidth});
  const auto saved = [](const std::vector<float>& data) {
    return Tensor(data.data(), DType::f32, {kTokens, kStreams});
  };

  print_shape("hidden_states", x);
  print_shape("kv", packed);
  print_shape("key", packed.slice(1, 0, kStreams));
  print_shape("value", packed.select(1, kStreams));
  print_shape("weight_hidden", wh);
  print_shape("weight_embed", we);
  print_shape("weight_fused", wf);

  ehc::Context context = ehc::Context::cpu();
  ehc::engram::fused_weight(context, {.weight_hidden = wh, .weight_embed = we, .weight_fused = wf});
  ehc::engram::gate_fwd(context, {.residual = x,
                                  .kv = packed,
                                  .weight_fused = wf,
                                  .out = y,
                                  .dot = saved(dot),
                                  .alpha = saved(alpha),
                                  .rstd_residual = saved(rstd_hidden),
                                  .rstd_key = saved(rstd_key),
                                  .eps = kEps,
                                  .clamp = kClamp});

  // The naive form: normalise both sides, multiply, sum.
  const float scale = 1 / std::sqrt(static_cast<float>(kWidth));
  float gate_difference = 0;
  float dot_difference = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t h = 0; h < kStreams; ++h) {
      const auto stream = static_cast<size_t>(t * kStreams + h);
      std::vector<float> normed_x = row_of(hidden.data(), t * kStreams + h);
      std::vector<float> normed_k = row_of(kv.data(), t * (kStreams + 1) + h);
      const float rx = reciprocal_rms(normed_x);
      const float rk = reciprocal_rms(normed_k);
      std::vector<float> products;
      for (size_t i = 0; i < normed_x.size(); ++i) {
        const size_t at = static_cast<size_t>(h * kWidth) + i;
        normed_x[i] = normed_x[i] * rx * from_bf16(weight_hidden[at]);
        normed_k[i] = normed_k[i] * rk * from_bf16(weight_embed[at]);
        products.push_back(normed_x[i] * normed_k[i]);
      }
      const float naive = sum(products) * scale;
      const float size = std::sqrt(std::max(std::fabs(naive), static_cast<float>(kClamp)));
      const float gate = 1 / (1 + std::exp(-std::copysign(size, naive)));
      const float fused = dot[stream] * rstd_hidden[stream] * rstd_key[stream] * scale;
      gate_difference = std::max(gate_difference, std::fabs(gate - alpha[stream]));
      dot_difference = std::max(dot_difference, std::fabs(naive - fused));
    }
  }
  std::printf("max |gate_naive - gate_fused| = %.3e\n", static_cast<double>(gate_difference));
  std::printf("max |dot_naive - dot_fused| = %.3e\n", static_cast<double>(dot_difference));

  // What the naive form writes and reads again, in fp32, and what the fused one moves.
  const long long normed =
      2 * static_cast<long long>(x.numel() * static_cast<int64_t>(sizeof(float)));
  std::printf("removed intermediates normed_x + normed_k: %lld B, three accumulators remain\n",
              normed);
  std::printf("fused traffic: read x + kv %lld B, write %lld B, weight_fused %lld B\n",
              bytes(x) + bytes(packed), bytes(y), bytes(wf));
  constexpr long long kTrainingTokens = 8192;
  const long long statistics = (bytes(saved(dot)) + bytes(saved(alpha)) +
                                bytes(saved(rstd_hidden)) + bytes(saved(rstd_key))) /
                               kTokens * kTrainingTokens;
  std::printf("saved statistics at T = %lld: %lld KB\n", kTrainingTokens, statistics / 1024);
}
