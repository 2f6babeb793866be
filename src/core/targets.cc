#include "core/targets.h"

#include <algorithm>
#include <cstring>

#include "core/cuda_support.h"

namespace ehc {

namespace {

bool sums_nothing(const Schema& schema, const Bound& bound) {
  const auto has = [&](Symbol s) { return (schema.symbols >> s & 1U) != 0; };
  if (has(symbol("T"))) return bound["T"] == 0;
  return has(symbol("P")) && bound["P"] == 0;
}

// The elements of `from`, or zeros without one; both F32 of one shape.
void copy_on_host(const Tensor& to, const Tensor* from) {
  if (to.rank > 1) {
    for (int64_t i = 0; i < to.shape[0]; ++i) {
      const Tensor part = from != nullptr ? from->select(0, i) : Tensor();
      copy_on_host(to.select(0, i), from != nullptr ? &part : nullptr);
    }
    return;
  }
  const size_t bytes = static_cast<size_t>(to.numel()) * sizeof(float);
  if (bytes == 0) return;
  if (from != nullptr) {
    std::memmove(to.data, from->data, bytes);
  } else {
    std::memset(to.data, 0, bytes);
  }
}

}  // namespace

bool write_targets_of_nothing(const Schema& schema, const Call& call) {
  if (!sums_nothing(schema, call.bound)) return false;
  void* params = const_cast<void*>(call.params);  // tables have one access for reading and writing
  const auto target_of = [&](const TensorSpec& output) -> const Tensor* {
    if (output.alias_index < 0) return nullptr;
    const TensorSpec& input = schema.tensors[static_cast<size_t>(output.alias_index)];
    if (!input.is_target()) return nullptr;
    const Tensor& target = input.access(params);
    return target.present() ? &target : nullptr;
  };
  const auto has_elements = [&](const TensorSpec& s) {
    return s.is_output && !s.is_list && s.access(params).present() && s.access(params).numel() > 0;
  };
  if (std::none_of(schema.tensors.begin(), schema.tensors.end(), [&](const TensorSpec& s) {
        return has_elements(s) && target_of(s) != nullptr;
      })) {
    return false;
  }
  for (const TensorSpec& s : schema.tensors) {
    if (!has_elements(s)) continue;
    const Tensor& output = s.access(params);
    const Tensor* target = target_of(s);
    if (target != nullptr && target->data == output.data) continue;
    if (call.context.device() == Device::cpu) {
      copy_on_host(output, target);
    } else {
      cuda_support::copy_floats(call.context.device_index(), call.context.stream(), output, target);
    }
  }
  return true;
}

}  // namespace ehc
