#include "cli/defect_curve.h"

#include <algorithm>

#include "cli/gain.h"
#include "ehc/mhc/defect.h"

namespace ehc::cli {

namespace {

struct Spread {
  float median;
  float worst;
};

// Reorders the values.
Spread spread_of(const Tensor& defects) {
  auto* begin = defects.as<float>();
  auto* end = begin + defects.numel();
  auto* middle = begin + defects.numel() / 2;
  std::nth_element(begin, middle, end);
  return {*middle, *std::max_element(middle, end)};
}

}  // namespace

std::vector<DefectPoint> defect_curve(Context& context, const Tensor& logits,
                                      std::span<const int64_t> repeats, const mhc::MixPreset& mix) {
  const HostTensor row(context, DType::f32, {logits.shape[0], logits.shape[1]});
  const HostTensor column(context, DType::f32, {logits.shape[0], logits.shape[1]});
  const HostTensor bound(context, DType::f32, {logits.shape[0], logits.shape[1]});
  std::vector<DefectPoint> points;
  for (const int64_t repeat : repeats) {
    const HostTensor maps =
        constrained_maps(context, logits, repeat, mix.sinkhorn_eps, mix.convention);
    mhc::defect(context, {.comb = maps.tensor,
                          .row_defect = row.tensor,
                          .column_defect = column.tensor,
                          .spectral_bound = bound.tensor});
    const Spread rows = spread_of(row.tensor);
    const Spread columns = spread_of(column.tensor);
    points.push_back({.repeat = repeat,
                      .row_worst = rows.worst,
                      .row_median = rows.median,
                      .column_worst = columns.worst,
                      .column_median = columns.median});
  }
  return points;
}

}  // namespace ehc::cli
