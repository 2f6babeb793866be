// Two columns of a lane, of rows of any layout, for kernels whose lanes walk over tokens.
#pragma once

#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc {

inline constexpr int kPair = 2;

// Where the pair is that starts at column `at` of a group.
struct PairPlace {
  int64_t column;         // of [T,K]
  int64_t stream[kPair];  // and in a token
  int64_t inner[kPair];
  int count;  // of the two exist

  __device__ __forceinline__ PairPlace(int64_t hidden, int64_t width, int64_t group, int64_t at) {
    column = group * width + at;
    count = static_cast<int>(max(int64_t{0}, min(int64_t{kPair}, width - at)));
#pragma unroll
    for (int c = 0; c < kPair; ++c) {
      const int64_t k = c < count ? column + c : 0;
      stream[c] = k / hidden;
      inner[c] = k - stream[c] * hidden;
    }
  }
};

// A pair as it is stored.
template <class B>
struct TwoColumns {
  uint32_t word[sizeof(B) / 2];

  __device__ __forceinline__ float2 value() const {
    Pack pack{};
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(B)) / 2; ++w) pack.word[w] = word[w];
    return {column<B>(pack, 0), column<B>(pack, 1)};
  }
  __device__ __forceinline__ static TwoColumns of(float2 x) {
    if constexpr (sizeof(B) == 4) {
      return {__float_as_uint(x.x), __float_as_uint(x.y)};
    } else {
      return {cuda::round_two<B>(x.x, x.y)};
    }
  }
};

// kPairs: both columns exist and lie side by side on a border of two elements, or there is none.
template <bool kPairs>
class LanePairs {
  static constexpr int kPlaces = kPairs ? 1 : kPair;

 public:
  // Elements have `size` bytes; stream i of the place is `i * of_stream + more` of the rows.
  __device__ __forceinline__ LanePairs(const StreamRows& rows, const PairPlace& at, size_t size,
                                       int64_t of_stream = 1, int64_t more = 0)
      : stride_(rows.token_stride * static_cast<int64_t>(size)), count_(at.count) {
#pragma unroll
    for (int c = 0; c < kPlaces; ++c) {
      const int64_t stream = at.stream[c] * of_stream + more;
      at_[c] = static_cast<char*>(rows.data) +
               (stream * rows.stream_stride + at.inner[c]) * static_cast<int64_t>(size);
    }
  }

  // The pair of one token, and from there those of the next.
  class Cursor {
   public:
    template <class B>
    __device__ __forceinline__ TwoColumns<B> load() const {
      TwoColumns<B> two{};
      if (count_ == 0) return two;
      if constexpr (kPairs && sizeof(B) == 4) {
        const uint2 v = *reinterpret_cast<const uint2*>(at_[0]);
        two.word[0] = v.x, two.word[1] = v.y;
      } else if constexpr (kPairs) {
        two.word[0] = *reinterpret_cast<const uint32_t*>(at_[0]);
      } else {
#pragma unroll
        for (int c = 0; c < kPair; ++c) {
          if (c >= count_) continue;
          const uint32_t bits = cuda::bits_of(*reinterpret_cast<const B*>(at_[c]));
          two.word[sizeof(B) == 4 ? c : 0] |= bits << (sizeof(B) == 4 ? 0 : c * 16);
        }
      }
      return two;
    }
    template <class B>
    __device__ __forceinline__ void store(float2 x) const {
      const TwoColumns<B> two = TwoColumns<B>::of(x);
      if (count_ == 0) return;
      if constexpr (kPairs && sizeof(B) == 4) {
        *reinterpret_cast<uint2*>(at_[0]) = {two.word[0], two.word[1]};
      } else if constexpr (kPairs) {
        *reinterpret_cast<uint32_t*>(at_[0]) = two.word[0];
      } else {
#pragma unroll
        for (int c = 0; c < kPair; ++c) {
          if (c >= count_) continue;
          if constexpr (sizeof(B) == 4) {
            *reinterpret_cast<uint32_t*>(at_[c]) = two.word[c];
          } else {
            *reinterpret_cast<uint16_t*>(at_[c]) = static_cast<uint16_t>(two.word[0] >> (c * 16));
          }
        }
      }
    }
    __device__ __forceinline__ void step() {
#pragma unroll
      for (int c = 0; c < kPlaces; ++c) at_[c] += stride_;
    }

   private:
    friend class LanePairs;
    __device__ __forceinline__ Cursor(const LanePairs& rows, int64_t token)
        : stride_(rows.stride_), count_(rows.count_) {
#pragma unroll
      for (int c = 0; c < kPlaces; ++c) at_[c] = rows.at_[c] + token * rows.stride_;
    }

    char* at_[kPlaces];
    int64_t stride_;
    int count_;
  };

  __device__ __forceinline__ Cursor cursor(int64_t token) const { return Cursor(*this, token); }
  // Of the tokens from `first` on, of which `tokens` exist.
  template <class B, int kCount>
  __device__ __forceinline__ void load(int64_t first, int tokens,
                                       TwoColumns<B> (&to)[kCount]) const {
    Cursor row = cursor(first);
#pragma unroll
    for (int u = 0; u < kCount; ++u, row.step()) {
      to[u] = u < tokens ? row.template load<B>() : TwoColumns<B>{};
    }
  }

 private:
  char* at_[kPlaces];
  int64_t stride_;
  int count_;
};

// Do all pairs of such rows lie on borders of two elements?
inline bool are_pairs(const StreamRows& rows, size_t size) {
  return reinterpret_cast<uintptr_t>(rows.data) % (kPair * size) == 0 &&
         rows.token_stride % kPair == 0 && rows.stream_stride % kPair == 0;
}

}  // namespace ehc::mhc
