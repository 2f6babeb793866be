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

// Their gradients, in the form in which they came.
template <class P>
constexpr auto grad_kv_group() {
  return std::tuple{out<&P::grad_kv>("grad_kv", "A[T,n+1,d]", "kv"),
                    out<&P::grad_key>("grad_key", "A[T,n,d]", "key"),
                    out<&P::grad_value>("grad_value", "A[T,d]", "value")};
}

// A[T,n,d] of A[T,n+1,d], and A[T,d]
inline Tensor keys_of_packed(const Tensor& kv) { return kv.slice(1, 0, kv.shape[1] - 1); }
inline Tensor value_of_packed(const Tensor& kv) { return kv.select(1, kv.shape[1] - 1); }

template <class P>
Tensor key_of(const P& p) {
  return p.kv ? keys_of_packed(p.kv) : p.key;
}
template <class P>
Tensor value_of(const P& p) {
  return p.kv ? value_of_packed(p.kv) : p.value;
}
template <class P>
Tensor grad_key_of(const P& p) {
  return p.kv ? keys_of_packed(p.grad_kv) : p.grad_key;
}
template <class P>
Tensor grad_value_of(const P& p) {
  return p.kv ? value_of_packed(p.grad_kv) : p.grad_value;
}

}  // namespace ehc::engram
