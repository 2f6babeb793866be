// engram.quantize_rows on CUDA (sm_80+): e4m3fn weights and one ue8m0 scale for each group of
// values. values [rows, hd], weight [rows, hd], scale [rows, hd/group]
//
// Bytes: hd elements read, hd + hd/group written a row.
// Algorithm: eight values a thread; the threads of a group find its largest magnitude by shuffles,
// then scale and round what they hold. Groups that are not a power of two times eight, and rows
// that are not aligned, have a thread per group with two passes. Class E.
#include "backends/cuda/sums.cuh"
#include "ops/engram/quantize_rows/quantize_rows_args.h"
#include "ops/engram/quantize_rows/quantize_rows_math.h"
#include "ops/engram/shared/table_rows.cuh"

namespace ehc::engram {

namespace {

constexpr int kRows = 2;

// Two codes, the first in the low byte; not for NaN.
__device__ __forceinline__ uint32_t encode_two(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t codes = 0;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
#else
  return encode_e4m3(first) | uint32_t{encode_e4m3(second)} << 8;
#endif
}

// `lanes` neighbours of eight values each are a group; they are of one warp.
template <class In>
__global__ void encode_eights(const __grid_constant__ QuantizeRowsArgs a, int64_t rows, int lanes,
                              int64_t column_blocks) {
  const RowPlace at(column_blocks, kEight, kRows);
  if (at.column >= a.width) return;
  EightOf<In> x[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = at.row + i * blockDim.y;
    if (row >= rows) break;
    x[i].template load<true>(static_cast<const In*>(a.values) + row * a.values_stride + at.column,
                             kEight);
  }
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  const unsigned first = thread % cuda::kWarp & ~(static_cast<unsigned>(lanes) - 1);
  const unsigned group = cuda::kAllLanes >> (cuda::kWarp - lanes) << first;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = at.row + i * blockDim.y;
    if (row >= rows) break;
    uint32_t amax = 0;  // magnitudes are ordered as their bits are, NaN last
#pragma unroll
    for (int k = 0; k < kEight; ++k) amax = max(amax, float_bits(x[i][k]) & 0x7fffffffU);
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      amax = max(amax, __shfl_xor_sync(group, amax, distance));
    }
    uint2 weights = {0x7f7f7f7fU, 0x7f7f7f7fU};
    uint8_t scale = 255;
    if (amax <= 0x7f800000U) {
      const int exponent = group_exponent(amax);
      const float factor = group_factor(exponent);
      const auto codes = [&](int k) { return encode_two(x[i][k] * factor, x[i][k + 1] * factor); };
      weights = {codes(0) | codes(2) << 16, codes(4) | codes(6) << 16};
      scale = static_cast<uint8_t>(exponent + 127);
    }
    *reinterpret_cast<uint2*>(a.weight + row * a.weight_stride + at.column) = weights;
    if ((threadIdx.x & (lanes - 1)) == 0) {
      a.scale[row * a.scale_stride + static_cast<unsigned>(at.column / kEight) / lanes] = scale;
    }
  }
}

template <class In>
struct EncodeGroups {
  QuantizeRowsArgs a;

  __device__ void operator()(int64_t i) const {
    const int64_t groups = a.width / a.group;
    const int64_t row = i / groups;
    const int64_t g = i % groups;
    a.scale[row * a.scale_stride + g] =
        encode_group(static_cast<const In*>(a.values) + row * a.values_stride + g * a.group,
                     a.group, a.weight + row * a.weight_stride + g * a.group);
  }
};

bool is_power_of_two(int64_t x) { return x > 0 && (x & (x - 1)) == 0; }

}  // namespace

void quantize_rows_cuda(const QuantizeRowsArgs& a, int64_t rows, int device, void* stream) {
  if (rows == 0) return;
  const char* name = "engram.quantize_rows";
  with_weight(a.type, [&](auto type) {
    using In = decltype(type);
    const int64_t lanes = a.group / kEight;
    if (a.group % kEight != 0 || !is_power_of_two(lanes) || lanes > cuda::kWarp ||
        !are_aligned(a.values, a.values_stride, sizeof(In)) ||
        !are_aligned(a.weight, a.weight_stride, 1, kEight)) {
      return cuda::launch_each(name, device, stream, rows * (a.width / a.group),
                               EncodeGroups<In>{a});
    }
    launch_rows(name, device, stream, cut_rows(rows, a.width, kEight, kRows), &encode_eights<In>, a,
                rows, static_cast<int>(lanes));
  });
}

}  // namespace ehc::engram
