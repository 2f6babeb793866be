// engram.gather_fwd on CUDA (sm_80+): e[t, c*hd:(c+1)*hd] = table[indices[t,c]], zeros for -1.
// table [rows,hd], indices [T,C], e [T,C*hd]
//
// Bytes: C*hd*(table element + out element) + C*(index) a token.
// A thread has the same columns of kRows rows, 16 bytes of each: it reads their indices, then all
// rows, then writes, so that several reads from far apart are on the way. Class E: a copy of bits,
// or one conversion to nearest even.
#include "ops/engram/gather/gather_args.h"
#include "ops/engram/shared/row_items.cuh"

namespace ehc::engram {

namespace {

constexpr int kRows = 2;

// The columns of a thread: 16 bytes of the same type, else four.
template <class In, class Out>
struct Columns {
  static constexpr int kCount = kFour;
  Four four;

  template <bool kVector>
  __device__ __forceinline__ void load(const In* from, int64_t count) {
    four = load_four<kVector>(from, count);
  }
  template <bool kVector>
  __device__ __forceinline__ void store(Out* to, int64_t count) const {
    store_four<kVector>(to, four, count);
  }
};
template <class A>
struct Columns<A, A> {
  static constexpr int kCount = kWidth<A>;
  Pack pack = {};

  template <bool kVector>
  __device__ __forceinline__ void load(const A* from, int64_t count) {
    pack = cuda::load_pack<kVector>(from, count);
  }
  template <bool kVector>
  __device__ __forceinline__ void store(A* to, int64_t count) const {
    cuda::store_pack<kVector>(to, pack, count);
  }
};

template <bool kVector, class In, class Out>
__global__ void gather_kernel(const __grid_constant__ RowItems items, const In* table,
                              int64_t table_row_stride, Out* out, int64_t column_blocks) {
  using Part = Columns<In, Out>;
  const RowPlace at(column_blocks, Part::kCount, kRows);
  const int64_t count = items.width - at.column;
  if (count <= 0) return;
  int64_t row[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t item = at.row + k * blockDim.y;
    row[k] = item < items.count() ? items.index(item) : -1;
  }
  Part part[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (row[k] < 0) continue;
    part[k].template load<kVector>(table + row[k] * table_row_stride + at.column, count);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t item = at.row + k * blockDim.y;
    if (item >= items.count()) break;
    part[k].template store<kVector>(out + items.out(item) + at.column, count);
  }
}

// Bytes of a thread's columns of type A.
template <class A, class Other>
constexpr size_t kBorder = Columns<A, Other>::kCount * sizeof(A);

template <class In, class Out>
void gather(const GatherForwardArgs& a, int device, void* stream) {
  const RowItems items = row_items(a.indices, a.tokens, a.columns, a.width, a.out_token_stride);
  const bool vector = a.width % Columns<In, Out>::kCount == 0 &&
                      are_aligned(a.table, a.table_row_stride, sizeof(In), kBorder<In, Out>) &&
                      are_aligned(items, a.out, a.out_type, kBorder<Out, In>);
  with_flag(vector, [&](auto is_vector) {
    launch_rows("engram.gather_fwd", device, stream,
                cut_rows(items.count(), a.width, Columns<In, Out>::kCount, kRows),
                &gather_kernel<is_vector(), In, Out>, items, static_cast<const In*>(a.table),
                a.table_row_stride, static_cast<Out*>(a.out));
  });
}

}  // namespace

void gather_fwd_cuda(const GatherForwardArgs& a, int device, void* stream) {
  if (a.tokens == 0 || a.columns == 0) return;
  cuda::with_activation(a.table_type, [&](auto in) {
    cuda::with_activation(a.out_type, [&](auto out) {
      // Two bytes are copied alike, whatever they stand for.
      using In = decltype(in);
      using Out = decltype(out);
      if constexpr (std::is_same_v<In, Out> && sizeof(In) == 2) {
        gather<cuda::Bf16, cuda::Bf16>(a, device, stream);
      } else {
        gather<In, Out>(a, device, stream);
      }
    });
  });
}

}  // namespace ehc::engram
