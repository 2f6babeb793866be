// engram.quantize_rows: e4m3fn weights and one ue8m0 scale for each group of values.
// values [rows, hd], weight [rows, hd], scale [rows, hd/group]
//
// Bytes: hd elements read, hd + hd/group written a row. Two passes over a group, the second from
// the first-level cache: the largest magnitude, then scaled and rounded values. Class E.
#include "ops/engram/quantize_rows/quantize_rows_args.h"
#include "ops/engram/quantize_rows/quantize_rows_math.h"

namespace ehc::engram::EHC_ISA {

namespace {

template <class In>
void encode_range(const QuantizeRowsArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const In* values = static_cast<const In*>(a.values) + r * a.values_stride;
    uint8_t* weight = a.weight + r * a.weight_stride;
    uint8_t* scale = a.scale + r * a.scale_stride;
    if (a.group == 32) {  // known to the compiler
      for (int64_t i = 0; i < a.width; i += 32) *scale++ = encode_group(values + i, 32, weight + i);
    } else {
      for (int64_t i = 0; i < a.width; i += a.group) {
        *scale++ = encode_group(values + i, a.group, weight + i);
      }
    }
  }
}

}  // namespace

void encode_rows(const QuantizeRowsArgs& a, int64_t begin, int64_t end) {
  if (a.type == DType::f32) {
    encode_range<float>(a, begin, end);
  } else {
    encode_range<Bf16Bits>(a, begin, end);
  }
}

}  // namespace ehc::engram::EHC_ISA
