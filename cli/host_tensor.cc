#include "cli/host_tensor.h"

#include "core/tensor_bytes.h"

namespace ehc::cli {

HostTensor::HostTensor(const Context& context, DType dtype, std::initializer_list<int64_t> shape)
    : memory(context, bytes_of(Tensor(nullptr, dtype, shape))),
      tensor(memory.data(), dtype, shape) {}

}  // namespace ehc::cli
