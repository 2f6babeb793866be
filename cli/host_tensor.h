// Memory and the tensor that views it, row-major.
#pragma once

#include <initializer_list>

#include "ehc/context.h"
#include "ehc/memory.h"
#include "ehc/tensor.h"

namespace ehc::cli {

struct HostTensor {
  HostTensor() = default;
  HostTensor(const Context& context, DType dtype, std::initializer_list<int64_t> shape);

  [[nodiscard]] Tensor rows(int64_t count) const { return tensor.slice(0, 0, count); }

  Buffer memory;
  Tensor tensor;
};

}  // namespace ehc::cli
