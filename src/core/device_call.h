// Runs an operator's CUDA kernel on the device and stream of a call's context.
#pragma once

#include "core/operator.h"

namespace ehc {

// `MakeArgs(call)` are the arguments of `Launch(args, device, stream)`, which enqueues and returns.
template <auto MakeArgs, auto Launch>
void run_on_device(const Call& call) {
  Launch(MakeArgs(call), call.context.device_index(), call.context.stream());
}

// The same of `Launch(args, count, device, stream)`, where count is that of a dimension.
template <auto MakeArgs, auto Launch, Symbol kDimension = symbol("T")>
void run_range_on_device(const Call& call) {
  const int64_t count = call.bound.symbols.value[kDimension];
  Launch(MakeArgs(call), count, call.context.device_index(), call.context.stream());
}

}  // namespace ehc
