#include "cli/gain.h"

#include <cmath>

#include "cli/case_random.h"
#include "cli/progress.h"
#include "ehc/mhc/amax_gain.h"
#include "ehc/mhc/defect.h"

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

}  // namespace

std::vector<GainRow> gains_of(Context& context, const Tensor& comb) {
  const int64_t layers = comb.shape[0];
  const int64_t tokens = comb.shape[1];
  const HostTensor forward(context, DType::f32, {layers, tokens});
  const HostTensor backward(context, DType::f32, {layers, tokens});
  const HostTensor composite_forward(context, DType::f32, {tokens});
  const HostTensor composite_backward(context, DType::f32, {tokens});
  const HostTensor row_defect(context, DType::f32, {layers, tokens});
  const HostTensor column_defect(context, DType::f32, {layers, tokens});
  const HostTensor bound(context, DType::f32, {layers, tokens});
  mhc::defect(context, {.comb = comb,
                        .row_defect = row_defect.tensor,
                        .column_defect = column_defect.tensor,
                        .spectral_bound = bound.tensor});
  std::vector<GainRow> rows;
  Progress progress("gain", static_cast<size_t>(layers));
  for (int64_t l = 0; l < layers; ++l) {
    progress.show(static_cast<size_t>(l), "depth " + std::to_string(l + 1));
    mhc::amax_gain(context, {.comb = comb.slice(0, 0, l + 1),
                             .forward_gain = forward.rows(l + 1),
                             .backward_gain = backward.rows(l + 1),
                             .composite_forward_gain = composite_forward.tensor,
                             .composite_backward_gain = composite_backward.tensor});
    rows.push_back({.forward = worst_of(forward.tensor, l, tokens),
                    .backward = worst_of(backward.tensor, l, tokens),
                    .composite_forward = worst_of(composite_forward.tensor, 0, tokens),
                    .composite_backward = worst_of(composite_backward.tensor, 0, tokens),
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
