// Tensors of random numbers: weights, tables and incoming streams of the commands that show a path.
#pragma once

#include <cstdint>
#include <string_view>

#include "ehc/context.h"
#include "ehc/tensor.h"

namespace ehc::cli {

// Element i is normal-like with the given mean and deviation, a function of seed, name and i only.
// `tensor` is contiguous BF16, F16 or F32.
void fill_random(Context& context, const Tensor& tensor, uint64_t seed, std::string_view name,
                 float mean, float deviation);

}  // namespace ehc::cli
