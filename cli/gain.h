// How much a stack of mixing maps enlarges a signal, layer by layer.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/host_tensor.h"
#include "ehc/mhc/sinkhorn.h"

namespace ehc::cli {

// A layer and the product of all layers up to it; of each the worst over all tokens.
struct GainRow {
  float forward = 0;  // gains of the layer alone
  float backward = 0;
  float composite_forward = 0;  // gains of the product
  float composite_backward = 0;
  float row_defect = 0;  // of the layer alone
  float column_defect = 0;
  float spectral_bound = 0;
};

// One row for each layer of comb F32[L, T, n, n]. NaN in a map makes its figures NaN.
std::vector<GainRow> gains_of(Context& context, const Tensor& comb);

// One object for each row.
nlohmann::ordered_json gains_json(const std::vector<GainRow>& rows);

// F32[layers, tokens, streams, streams] of normal numbers times `scale`.
HostTensor random_logits(const Context& context, int64_t layers, int64_t tokens, int64_t streams,
                         double scale, uint64_t seed);

// The maps that Sinkhorn's iteration makes of them.
HostTensor constrained_maps(Context& context, const Tensor& logits, int64_t repeat, double eps,
                            mhc::SinkhornConvention convention);

}  // namespace ehc::cli
