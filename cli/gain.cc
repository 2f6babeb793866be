#include "cli/gain.h"

#include <algorithm>
#include <cmath>

#include "cli/case_random.h"
#include "core/parallel.h"
#include "ehc/mhc/amax_gain.h"
#include "ehc/mhc/defect.h"
#include "ops/mhc/amax_gain/amax_gain_math.h"

namespace ehc::cli {

namespace {

// The largest of a row of F32[.., tokens]; NaN where there is one.
float worst_of(const Tensor& t, int64_t row, int64_t tokens) {
  float worst = 0;
  for (int64_t i = 0; i < tokens; ++i) {
    const float x = t.as<float>()[row * tokens + i];
    if (std::isnan(x) || x > worst) worst = x;
  }
  return worst;
}

// The products of the first 1, 2, ... maps of each token, as mhc.amax_gain makes them.
HostTensor running_products(Context& context, const Tensor& comb) {
  const int64_t n = comb.shape[2];
  HostTensor products(context, DType::f32, {comb.shape[0], comb.shape[1], n, n});
  parallel_for(context, comb.shape[1], 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      mhc::MixMap<float> product;
      for (int64_t l = 0; l < comb.shape[0]; ++l) {
        const auto map = mhc::read_map<float>(
            comb.as<float>() + l * comb.stride[0] + t * comb.stride[1], comb.stride[2], n);
        product = l == 0 ? map : mhc::product(product, map, n);
        float* to = products.tensor.as<float>() + (l * comb.shape[1] + t) * n * n;
        for (int64_t i = 0; i < n; ++i) std::copy_n(product.value[i], n, to + i * n);
      }
    }
  });
  return products;
}

// F32[L,T] both.
struct Gains {
  HostTensor forward, backward;
};

Gains gains_of_each(Context& context, const Tensor& maps) {
  const int64_t layers = maps.shape[0];
  const int64_t tokens = maps.shape[1];
  Gains gains = {HostTensor(context, DType::f32, {layers, tokens}),
                 HostTensor(context, DType::f32, {layers, tokens})};
  const HostTensor composite(context, DType::f32, {2, tokens});
  mhc::amax_gain(context, {.comb = maps,
                           .forward_gain = gains.forward.tensor,
                           .backward_gain = gains.backward.tensor,
                           .composite_forward_gain = composite.tensor.select(0, 0),
                           .composite_backward_gain = composite.tensor.select(0, 1)});
  return gains;
}

}  // namespace

std::vector<GainRow> gains_of(Context& context, const Tensor& comb) {
  const int64_t layers = comb.shape[0];
  const int64_t tokens = comb.shape[1];
  const Gains alone = gains_of_each(context, comb);
  const Gains composite = gains_of_each(context, running_products(context, comb).tensor);
  const HostTensor row_defect(context, DType::f32, {layers, tokens});
  const HostTensor column_defect(context, DType::f32, {layers, tokens});
  const HostTensor bound(context, DType::f32, {layers, tokens});
  mhc::defect(context, {.comb = comb,
                        .row_defect = row_defect.tensor,
                        .column_defect = column_defect.tensor,
                        .spectral_bound = bound.tensor});
  std::vector<GainRow> rows;
  for (int64_t l = 0; l < layers; ++l) {
    rows.push_back({.forward = worst_of(alone.forward.tensor, l, tokens),
                    .backward = worst_of(alone.backward.tensor, l, tokens),
                    .composite_forward = worst_of(composite.forward.tensor, l, tokens),
                    .composite_backward = worst_of(composite.backward.tensor, l, tokens),
                    .row_defect = worst_of(row_defect.tensor, l, tokens),
                    .column_defect = worst_of(column_defect.tensor, l, tokens),
                    .spectral_bound = worst_of(bound.tensor, l, tokens)});
  }
  return rows;
}

nlohmann::ordered_json gains_json(const std::vector<GainRow>& rows) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const GainRow& r : rows) {
    json.push_back({{"forward_gain", r.forward},
                    {"backward_gain", r.backward},
                    {"composite_forward_gain", r.composite_forward},
                    {"composite_backward_gain", r.composite_backward},
                    {"row_defect", r.row_defect},
                    {"column_defect", r.column_defect},
                    {"spectral_bound", r.spectral_bound}});
  }
  return json;
}

HostTensor random_logits(const Context& context, int64_t layers, int64_t tokens, int64_t streams,
                         double scale, uint64_t seed) {
  HostTensor logits(context, DType::f32, {layers, tokens, streams, streams});
  const uint64_t stream = random_stream(seed, "comb_logits");
  for (int64_t i = 0; i < logits.tensor.numel(); ++i) {
    logits.tensor.as<float>()[i] =
        static_cast<float>(scale) * random_normal(random_bits(stream, i));
  }
  return logits;
}

HostTensor constrained_maps(Context& context, const Tensor& logits, int64_t repeat, double eps,
                            mhc::SinkhornConvention convention) {
  HostTensor maps(context, DType::f32,
                  {logits.shape[0], logits.shape[1], logits.shape[2], logits.shape[3]});
  mhc::sinkhorn_fwd(context, {.comb_logits = logits,
                              .comb = maps.tensor,
                              .repeat = repeat,
                              .eps = eps,
                              .convention = convention});
  return maps;
}

}  // namespace ehc::cli
