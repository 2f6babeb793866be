// Keys and value of the gate: packed in one tensor or apart, two views of the same kernel.
#pragma once

#include <tuple>

#include "core/schema_builder.h"

namespace ehc::engram {

// The inputs `kv | key value` of an operator whose struct has the members kv, key and value.
template <class P>
constexpr auto kv_group() {
  return std::tuple{in<&P::kv>("kv", "A[T,n+1,d]").optional(),
                    in<&P::key>("key", "A[T,n,d]").optional(),
                    in<&P::value>("value", "A[T,d]").optional(), one_of("kv | key value")};
}

// A[T,n,d]
template <class P>
Tensor key_of(const P& p) {
  return p.kv ? p.kv.slice(1, 0, p.kv.shape[1] - 1) : p.key;
}

// A[T,d]
template <class P>
Tensor value_of(const P& p) {
  return p.kv ? p.kv.select(1, p.kv.shape[1] - 1) : p.value;
}

}  // namespace ehc::engram
