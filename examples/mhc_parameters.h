// A model of hyper-connections as data: its sizes and constants, its parameters, the layers inside
// its sublayers. mhc_stack.h says how they are wired.
#pragma once

#include <ehc/mhc.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"

namespace example {

namespace mhc = ehc::mhc;
using mhc::SeamForm;

struct EngramConfig {
  std::vector<int64_t> before{};  // sublayers in front of which there is one, ascending, from 1
  int64_t rows = 0;               // of its table
  int64_t row_width = 0;
  int64_t row_count = 0;  // rows that a token reads
  int64_t taps = 4;       // of its convolution
  int64_t dilation = 3;
  double eps = 1e-20;
  double clamp = 1e-6;
  double conv_eps = 1e-5;
};

struct Config {
  int64_t tokens = 0;
  int64_t streams = 4;    // n
  int64_t width = 0;      // d
  int64_t sublayers = 0;  // L
  DType type = DType::bf16;
  SeamForm form = SeamForm::classic;
  mhc::MixRules rules{};
  bool has_norm_weight = false;
  double layer_norm_eps = 0;  // of the norm of F's input; 0: F has none, or one of its own
  EngramConfig engram{};
};

// --- parameters and their gradients --------------------------------------------------------------

// Of a sublayer's entry, or of the head.
struct MixParameters {
  Array fn, scale, base, norm_weight, layer_norm_weight;
};
struct EngramParameters {
  Array table, kv_weight, weight_hidden, weight_embed, conv_weight, conv_norm_weight;
};

struct Parameters {
  std::vector<MixParameters> sublayers;
  std::vector<EngramParameters> engrams;
  MixParameters head;  // classic

  // Those there are, by names such as "3.fn", "engram 0.table", "head.base".
  [[nodiscard]] std::vector<std::pair<std::string, Tensor>> all() const {
    std::vector<std::pair<std::string, Tensor>> list;
    const auto add = [&](const std::string& owner, const char* name, const Array& array) {
      if (array.present()) list.emplace_back(owner + "." + name, array);
    };
    const auto add_mixes = [&](const std::string& owner, const MixParameters& p) {
      add(owner, "fn", p.fn);
      add(owner, "scale", p.scale);
      add(owner, "base", p.base);
      add(owner, "norm_weight", p.norm_weight);
      add(owner, "layer_norm_weight", p.layer_norm_weight);
    };
    for (size_t l = 0; l < sublayers.size(); ++l) add_mixes(std::to_string(l), sublayers[l]);
    for (size_t e = 0; e < engrams.size(); ++e) {
      const std::string owner = "engram " + std::to_string(e);
      add(owner, "table", engrams[e].table);
      add(owner, "kv_weight", engrams[e].kv_weight);
      add(owner, "weight_hidden", engrams[e].weight_hidden);
      add(owner, "weight_embed", engrams[e].weight_embed);
      add(owner, "conv_weight", engrams[e].conv_weight);
      add(owner, "conv_norm_weight", engrams[e].conv_norm_weight);
    }
    add_mixes("head", head);
    return list;
  }
};

// Zeros. Norm weights, tables and projections have type `weights`; a gradient is always F32.
inline Parameters zero_parameters(Runtime& runtime, const Config& c, DType weights) {
  const int64_t n = c.streams, d = c.width;
  const auto mixes = [&](int64_t count, int64_t scales, bool has_layer_norm) {
    MixParameters p;
    p.fn = runtime.zeros(DType::f32, {count, n * d});
    p.scale = runtime.zeros(DType::f32, {scales});
    p.base = runtime.zeros(DType::f32, {count});
    if (c.has_norm_weight) p.norm_weight = runtime.zeros(DType::f32, {n * d});
    if (has_layer_norm) p.layer_norm_weight = runtime.zeros(weights, {d});
    return p;
  };
  Parameters all;
  for (int64_t l = 0; l < c.sublayers; ++l) {
    all.sublayers.push_back(mixes(n * n + 2 * n, 3, c.layer_norm_eps > 0));
  }
  if (c.form == SeamForm::classic) all.head = mixes(n, 1, false);
  for (size_t e = 0; e < c.engram.before.size(); ++e) {
    EngramParameters& p = all.engrams.emplace_back();
    p.table = runtime.zeros(weights, {c.engram.rows, c.engram.row_width});
    p.kv_weight = runtime.zeros(weights, {n + 1, d, c.engram.row_count * c.engram.row_width});
    p.weight_hidden = runtime.zeros(weights, {n, d});
    p.weight_embed = runtime.zeros(weights, {n, d});
    p.conv_weight = runtime.zeros(weights, {n, d, c.engram.taps});
    p.conv_norm_weight = runtime.zeros(weights, {n, d});
  }
  return all;
}
inline Parameters zero_gradients(Runtime& runtime, const Config& c) {
  return zero_parameters(runtime, c, DType::f32);
}

// Random numbers around their usual places.
inline void initialise(const Parameters& p, const Config& c, std::mt19937& generator) {
  const auto fill = [&](const Array& array, float mean, float spread) {
    if (array.present()) fill_normal(array, generator, mean, spread);
  };
  const auto fan = [](int64_t terms) { return 1 / std::sqrt(static_cast<float>(terms)); };
  const auto fill_mixes = [&](const MixParameters& w) {
    fill(w.fn, 0, fan(c.streams * c.width));
    fill(w.scale, 1, 0.2F);
    fill(w.base, 0, 0.5F);
    fill(w.norm_weight, 1, 0.2F);
    fill(w.layer_norm_weight, 1, 0.2F);
  };
  for (const MixParameters& w : p.sublayers) fill_mixes(w);
  fill_mixes(p.head);
  for (const EngramParameters& w : p.engrams) {
    fill(w.table, 0, 1);
    fill(w.kv_weight, 0, fan(c.engram.row_count * c.engram.row_width));
    fill(w.weight_hidden, 1, 0.2F);
    fill(w.weight_embed, 1, 0.2F);
    fill(w.conv_weight, 0, 0.3F);
    fill(w.conv_norm_weight, 1, 0.2F);
  }
}

// --- layers --------------------------------------------------------------------------------------

// F of a sublayer: anything from A[T,d] to A[T,d] with its backward.
struct Layer {
  std::function<void(const Tensor& input, const Tensor& output)> forward;
  std::function<void(const Tensor& input, const Tensor& output, const Tensor& grad_output,
                     const Tensor& grad_input)>
      backward;
};

// output = input * matrix, of d rows of d.
inline Layer linear_layer(std::vector<float> matrix) {
  const auto multiply = [matrix = std::move(matrix)](const Tensor& in, const Tensor& out,
                                                     bool is_transposed) {
    const int64_t d = in.shape[1];
    const int64_t row = is_transposed ? 1 : d;
    const int64_t column = is_transposed ? d : 1;
    for (int64_t t = 0; t < in.shape[0]; ++t) {
      std::vector<float> sum(static_cast<size_t>(d));
      for (int64_t k = 0; k < d; ++k) {
        const float x = get(in, t * d + k);
        const float* m = matrix.data() + k * row;
        for (int64_t i = 0; i < d; ++i) sum[static_cast<size_t>(i)] += x * m[i * column];
      }
      for (int64_t i = 0; i < d; ++i) set(out, t * d + i, sum[static_cast<size_t>(i)]);
    }
  };
  return {[multiply](const Tensor& in, const Tensor& out) { multiply(in, out, false); },
          [multiply](const Tensor&, const Tensor&, const Tensor& grad_out, const Tensor& grad_in) {
            multiply(grad_out, grad_in, true);
          }};
}
inline Layer tanh_layer() {
  return {[](const Tensor& in, const Tensor& out) {
            for (int64_t i = 0; i < in.numel(); ++i) set(out, i, std::tanh(get(in, i)));
          },
          [](const Tensor&, const Tensor& out, const Tensor& grad_out, const Tensor& grad_in) {
            for (int64_t i = 0; i < out.numel(); ++i) {
              set(grad_in, i, get(grad_out, i) * (1 - get(out, i) * get(out, i)));
            }
          }};
}

// A linear layer, a tanh, a linear layer, ...
inline std::vector<Layer> alternating_layers(const Config& c, std::mt19937& generator) {
  std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(c.width)));
  std::vector<Layer> layers;
  for (int64_t l = 0; l < c.sublayers; ++l) {
    if (l % 2 == 1) {
      layers.push_back(tanh_layer());
      continue;
    }
    std::vector<float> matrix(static_cast<size_t>(c.width * c.width));
    for (float& x : matrix) x = normal(generator);
    layers.push_back(linear_layer(std::move(matrix)));
  }
  return layers;
}

// --- input ---------------------------------------------------------------------------------------

struct Batch {
  Array hidden;                // A[T,d], the embeddings of the tokens
  std::vector<Array> indices;  // of each Engram layer, I32[T,C]: the rows that engram.hash names
};

inline Batch random_batch(Runtime& runtime, const Config& c, std::mt19937& generator) {
  Batch batch;
  batch.hidden = runtime.zeros(c.type, {c.tokens, c.width});
  fill_normal(batch.hidden, generator, 0, 1);
  for (size_t e = 0; e < c.engram.before.size(); ++e) {
    const Tensor rows =
        batch.indices.emplace_back(runtime.zeros(DType::i32, {c.tokens, c.engram.row_count}));
    for (int64_t i = 0; i < rows.numel(); ++i) {
      rows.as<int32_t>()[i] =
          static_cast<int32_t>(generator() % static_cast<uint32_t>(c.engram.rows));
    }
  }
  return batch;
}

}  // namespace example
