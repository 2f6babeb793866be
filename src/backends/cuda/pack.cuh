// 16 bytes of a row of activations, and the same as floats. A row is cut into packs of kWidth<A>
// columns that start at multiples of kWidth<A>; a thread owns whole packs, whether it moves them in
// one access or element by element, so that no bit depends on strides or alignment.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "ehc/dtype.h"

namespace ehc::cuda {

// Storage types beside float.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class A>
inline constexpr int kWidth = 16 / static_cast<int>(sizeof(A));

inline int64_t packs_of(int64_t columns, int width) { return (columns + width - 1) / width; }

struct alignas(16) Pack {
  uint32_t word[4];
};

// --- memory ---

template <class A>
__device__ __forceinline__ uint32_t bits_of(A x) {
  if constexpr (sizeof(A) == 4) {
    return __float_as_uint(x);
  } else {
    return x.bits;
  }
}

// kVector: `from` is on a border of 16 bytes and all columns exist. Otherwise the first `count`
// do; the others are +0.
template <bool kVector, class A>
__device__ __forceinline__ Pack load_pack(const A* from, int64_t count) {
  if constexpr (kVector) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    return {v.x, v.y, v.z, v.w};
  } else {
    constexpr int kOfWord = 4 / static_cast<int>(sizeof(A));
    Pack pack{};
#pragma unroll
    for (int k = 0; k < kWidth<A>; ++k) {
      if (k < count) pack.word[k / kOfWord] |= bits_of(from[k]) << (k % kOfWord * 16);
    }
    return pack;
  }
}

template <bool kVector, class A>
__device__ __forceinline__ void store_pack(A* to, const Pack& pack, int64_t count) {
  if constexpr (kVector) {
    // The compiler splits an assignment into words.
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack.word[0]),
                 "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
                 : "memory");
  } else {
#pragma unroll
    for (int k = 0; k < kWidth<A>; ++k) {
      if (k >= count) continue;
      if constexpr (sizeof(A) == 4) {
        to[k] = __uint_as_float(pack.word[k]);
      } else {
        to[k].bits = static_cast<uint16_t>(pack.word[k / 2] >> (k % 2 * 16));
      }
    }
  }
}

// The same where nobody reads soon what is written, so that it leaves the caches first.
template <bool kVector, class A>
__device__ __forceinline__ void store_pack_once(A* to, const Pack& pack, int64_t count) {
  if constexpr (kVector) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack.word[0]),
                 "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
                 : "memory");
  } else {
    store_pack<false>(to, pack, count);
  }
}

// --- conversions: to nearest even, subnormals kept, NaN stays NaN ---

// Column k of a pack; k is known to the compiler once its loop is unrolled.
template <class A>
__device__ __forceinline__ float column(const Pack& pack, int k);
template <>
__device__ __forceinline__ float column<float>(const Pack& pack, int k) {
  return __uint_as_float(pack.word[k]);
}
template <>
__device__ __forceinline__ float column<Bf16>(const Pack& pack, int k) {
  const uint32_t word = pack.word[k / 2];
  return __uint_as_float(k % 2 == 0 ? word << 16 : word & 0xffff0000U);
}
template <>
__device__ __forceinline__ float column<F16>(const Pack& pack, int k) {
  const auto half = static_cast<uint16_t>(pack.word[k / 2] >> (k % 2 * 16));
  float x = 0;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
}

template <class A>
__device__ __forceinline__ uint32_t round_two(float low, float high) {
  uint32_t word = 0;
  if constexpr (sizeof(A) == 2) {
    static_assert(std::is_same_v<A, Bf16> || std::is_same_v<A, F16>);
    if constexpr (std::is_same_v<A, Bf16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
  }
  return word;
}

// The pack of value(0), value(1), ...
template <class A, class Value>
__device__ __forceinline__ Pack make_pack(const Value& value) {
  Pack pack;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(A) == 4) {
      pack.word[w] = __float_as_uint(value(w));
    } else {
      pack.word[w] = round_two<A>(value(2 * w), value(2 * w + 1));
    }
  }
  return pack;
}

// Calls body(a) with a value of the storage type.
template <class Body>
void with_activation(DType type, const Body& body) {
  if (type == DType::f32) {
    body(float{});
  } else if (type == DType::f16) {
    body(F16{});
  } else {
    body(Bf16{});
  }
}

}  // namespace ehc::cuda
