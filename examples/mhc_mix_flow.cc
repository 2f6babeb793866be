// One sublayer of a model with several residual streams: from the token's mixes to the
// coefficients, from the streams to the layer's input, and from the layer's output to the new
// streams.
#include <ehc/mhc/post.h>
#include <ehc/mhc/pre_apply.h>
#include <ehc/mhc/presets.h>
#include <ehc/mhc/sinkhorn.h>
#include <ehc/mhc/split.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t kTokens = 3;
constexpr int64_t kStreams = 4;
constexpr int64_t kWidth = 64;
constexpr int64_t kMixes = kStreams * kStreams + 2 * kStreams;
constexpr ehc::mhc::MixPreset kMix = ehc::mhc::kTrainMix;

float from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }
uint16_t to_bf16(float x) {  // to nearest even; the numbers here are finite
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::vector<float> normals(int64_t count) {
  static std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = normal(generator);
  return out;
}

size_t index(int64_t i) { return static_cast<size_t>(i); }

void print_shape(const char* name, const ehc::Tensor& t) {
  std::printf("%s (", name);
  for (int k = 0; k < t.rank; ++k) {
    std::printf(k == 0 ? "%lld" : ", %lld", static_cast<long long>(t.shape[k]));
  }
  std::printf(") %s\n", t.dtype == ehc::DType::bf16 ? "bf16" : "fp32");
}

void print_sums(const char* label, const std::vector<float>& comb, int64_t stride, int64_t next) {
  std::printf("%s [", label);
  for (int64_t line = 0; line < kTokens * kStreams; ++line) {
    const float* at = comb.data() + line / kStreams * kStreams * kStreams + line % kStreams * next;
    double sum = 0;
    for (int64_t i = 0; i < kStreams; ++i) sum += static_cast<double>(at[i * stride]);
    std::printf(line == 0 ? "%.6f" : " %.6f", sum);
  }
  std::printf("]\n");
}

}  // namespace

int main() {
  // What a projection of the streams would give, and learned parameters at their usual start: small
  // scales, and a base by which a stream mostly stays where it is.
  const std::vector<float> mixes = normals(kTokens * kMixes);
  const std::array<float, 3> scale = {0.01F, 0.01F, 0.01F};
  std::array<float, kMixes> base{};
  for (int64_t i = 0; i < kStreams; ++i) {
    base[index(2 * kStreams + i * kStreams + i)] = 1;
  }
  std::vector<uint16_t> residual;
  for (const float x : normals(kTokens * kStreams * kWidth)) residual.push_back(to_bf16(x));
  std::vector<float> pre(kTokens * kStreams), post(pre), comb_logits(pre.size() * kStreams);
  std::vector<float> comb(comb_logits);
  std::vector<uint16_t> layer_input(kTokens * kWidth), layer_output(layer_input);
  std::vector<uint16_t> new_residual(residual.size());

  using ehc::DType;
  using ehc::Tensor;
  const auto coefficients = [](const std::vector<float>& data) {
    return Tensor(data.data(), DType::f32, {kTokens, kStreams});
  };
  const auto maps = [](const std::vector<float>& data) {
    return Tensor(data.data(), DType::f32, {kTokens, kStreams, kStreams});
  };
  const Tensor streams(residual.data(), DType::bf16, {kTokens, kStreams, kWidth});
  const Tensor new_streams(new_residual.data(), DType::bf16, {kTokens, kStreams, kWidth});
  const Tensor input(layer_input.data(), DType::bf16, {kTokens, kWidth});
  const Tensor output(layer_output.data(), DType::bf16, {kTokens, kWidth});

  ehc::Context context = ehc::Context::cpu();
  ehc::mhc::split_fwd(context, {.mixes = Tensor(mixes.data(), DType::f32, {kTokens, kMixes}),
                                .scale = Tensor(scale.data(), DType::f32, {3}),
                                .base = Tensor(base.data(), DType::f32, {kMixes}),
                                .pre = coefficients(pre),
                                .post = coefficients(post),
                                .comb_logits = maps(comb_logits),
                                .pre_eps = kMix.pre_eps,
                                .post_mult = kMix.post_mult});
  ehc::mhc::sinkhorn_fwd(context, {.comb_logits = maps(comb_logits),
                                   .comb = maps(comb),
                                   .repeat = kMix.repeat,
                                   .eps = kMix.sinkhorn_eps,
                                   .convention = kMix.convention});
  ehc::mhc::pre_apply_fwd(context,
                          {.residual = streams, .pre = coefficients(pre), .layer_input = input});
  // The layer: anything from width to width.
  std::transform(layer_input.begin(), layer_input.end(), layer_output.begin(),
                 [](uint16_t x) { return to_bf16(std::tanh(from_bf16(x))); });
  ehc::mhc::post_fwd(context, {.layer_output = output,
                               .residual = streams,
                               .post = coefficients(post),
                               .comb = maps(comb),
                               .new_residual = new_streams});

  print_shape("pre", Tensor(pre.data(), DType::f32, {kTokens, kStreams, 1}));
  print_shape("post", Tensor(post.data(), DType::f32, {kTokens, kStreams, 1}));
  print_shape("comb", maps(comb));
  print_sums("comb row sums", comb, 1, kStreams);
  print_sums("comb column sums", comb, kStreams, 1);
  print_shape("layer_input", input);
  print_shape("new residual", new_streams);

  // x'[o] = post[o] * y + sum over i of comb[i][o] * x[i], in this order, rounded once.
  bool is_same = true;
  for (int64_t at = 0; at < new_streams.numel(); ++at) {
    const int64_t h = at % kWidth;
    const int64_t o = at / kWidth % kStreams;
    const int64_t t = at / kWidth / kStreams;
    float sum = post[index(t * kStreams + o)] * from_bf16(layer_output[index(t * kWidth + h)]);
    for (int64_t i = 0; i < kStreams; ++i) {
      const int64_t stream = t * kStreams + i;
      sum = std::fma(comb[index(stream * kStreams + o)],
                     from_bf16(residual[index(stream * kWidth + h)]), sum);
    }
    is_same = is_same && new_residual[index(at)] == to_bf16(sum);
  }
  std::printf("new residual is the formula, bit for bit: %s\n", is_same ? "yes" : "no");
}
