#include "tests/backends/cpu/simd_probe.h"

#include "backends/cpu/simd.h"

namespace ehc::probe::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::kPair;
using simd::Pair;

}  // namespace

void evaluate(Function function, const float* in, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kPair) {
    const Pair x = simd::load_some(in + i, count - i);
    Pair y;
    switch (function) {
      case Function::exp:
        y = {simd::exp_nonpositive(x.a), simd::exp_nonpositive(x.b)};
        break;
      case Function::sigmoid:
        y = {simd::sigmoid(x.a), simd::sigmoid(x.b)};
        break;
      case Function::silu:
        y = simd::zero_pair();
        simd::add_silu<1>(&x, &y);
        break;
      default: {
        const Pair one = {simd::splat(1.0f), simd::splat(1.0f)};
        simd::silu_gradient<1>(&x, &one, &y);
      }
    }
    simd::store_some(out + i, y, count - i, false);
  }
}

void multiply_add(const float* a, const float* b, const float* c, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kPair) {
    const int64_t rest = count - i;
    simd::store_some(out + i,
                     fma(simd::load_some(a + i, rest), simd::load_some(b + i, rest),
                         simd::load_some(c + i, rest)),
                     rest, false);
  }
}

void widen(DType type, const void* in, float* out, int64_t count) {
  simd::with_activation(type, [&](auto a) {
    using A = decltype(a);
    for (int64_t i = 0; i < count; i += kPair) {
      const Pair x = simd::load_some(static_cast<const A*>(in) + i, count - i);
      simd::store_some(out + i, simd::natural_order<A>(x), count - i, false);
    }
  });
}

void narrow(DType type, const float* in, void* out, int64_t count, bool streaming) {
  simd::with_activation(type, [&](auto a) {
    using A = decltype(a);
    for (int64_t i = 0; i < count; i += kPair) {
      const Pair x = simd::load_f32_some<A>(in + i, count - i);
      simd::store_some(static_cast<A*>(out) + i, x, count - i, streaming);
    }
  });
  if (streaming) simd::stream_fence();
}

void weighted(DType type, const void* in, const float* weight, float* out, int64_t count) {
  simd::with_activation(type, [&](auto a) {
    using A = decltype(a);
    for (int64_t i = 0; i < count; i += kPair) {
      const int64_t rest = count - i;
      const Pair x = mul(simd::load_some(static_cast<const A*>(in) + i, rest),
                         simd::load_f32_some<A>(weight + i, rest));
      simd::store_some(out + i, simd::natural_order<A>(x), rest, false);
    }
  });
}

float sum(DType type, const void* in, int64_t count) {
  float result = 0;
  simd::with_activation(type, [&](auto a) {
    using A = decltype(a);
    Pair total = simd::zero_pair();
    for (int64_t i = 0; i < count; i += kPair) {
      total = add(total, simd::load_some(static_cast<const A*>(in) + i, count - i));
    }
    result = reduce_add(total);
  });
  return result;
}

}  // namespace ehc::probe::EHC_ISA
