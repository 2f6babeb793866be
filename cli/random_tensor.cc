#include "cli/random_tensor.h"

#include <cmath>

#include "cli/case_random.h"
#include "core/float_formats.h"
#include "core/parallel.h"

namespace ehc::cli {

void fill_random(Context& context, const Tensor& tensor, uint64_t seed, std::string_view name,
                 float mean, float deviation) {
  const uint64_t stream = random_stream(seed, name);
  parallel_for(context, tensor.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float value = std::fma(deviation, random_normal(random_bits(stream, i)), mean);
      store_float(tensor.data, tensor.dtype, i, value);
    }
  });
}

}  // namespace ehc::cli
