// engram.quantize_rows on CUDA (sm_80+): e4m3fn weights and one ue8m0 scale for each group of values.
// values [rows, hd], weight [rows, hd], scale [rows, hd/group]
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

constexpr int kThreads = 256;

// `lanes` threads of eight values are a group; `groups` of them in a row.
template <class In>
__global__ void encode_eights(const __grid_constant__ QuantizeRowsArgs a, int64_t eights,
                              int64_t eights_of_row, int lanes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool is_there = i < eights;
  const int64_t row = is_there ? i / eights_of_row : 0;
  const int64_t at = is_there ? i % eights_of_row : 0;
  EightOf<In> x;
  if (is_there) {
    x.template load<true>(static_cast<const In*>(a.values) + row * a.values_stride + at * kEight,
                          kEight);
  }
  uint32_t amax = 0;  // magnitudes are ordered as their bits are, NaN last
#pragma unroll
  for (int k = 0; k < kEight; ++k) amax = max(amax, float_bits(x[k]) & 0x7fffffffU);
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    amax = max(amax, __shfl_xor_sync(cuda::kAllLanes, amax, distance));
  }
  if (!is_there) return;
  uint2 weights = {0x7f7f7f7fU, 0x7f7f7f7fU};
  uint8_t scale = 255;
  if (amax <= 0x7f800000U) {
    const int exponent = group_exponent(amax);
    const float factor = group_factor(exponent);
    weights = {0, 0};
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      const uint32_t code = encode_e4m3(x[k] * factor);
      (k < 4 ? weights.x : weights.y) |= code << (k % 4 * 8);
    }
    scale = static_cast<uint8_t>(exponent + 127);
  }
  *reinterpret_cast<uint2*>(a.weight + row * a.weight_stride + at * kEight) = weights;
  if (at % lanes == 0) a.scale[row * a.scale_stride + at / lanes] = scale;
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
    const int64_t eights_of_row = a.width / kEight;
    const int64_t eights = rows * eights_of_row;
    cuda::launch(name, device, stream, &encode_eights<In>,
                 dim3(cuda::blocks((eights + kThreads - 1) / kThreads)), dim3(kThreads), 0, a,
                 eights, eights_of_row, static_cast<int>(lanes));
  });
}

}  // namespace ehc::engram
