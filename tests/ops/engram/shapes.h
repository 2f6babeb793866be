// Shapes that the tests of gate, convolution and layer run on, forward and backward: every edge of
// each size in some combination, every type.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "ehc/dtype.h"

namespace ehc::test {

inline constexpr DType kActivations[] = {DType::f32, DType::bf16, DType::f16};

struct GateShape {
  int64_t T, n, d;
  DType type;
};

inline std::ostream& operator<<(std::ostream& out, const GateShape& s) {
  return out << "T=" << s.T << " n=" << s.n << " d=" << s.d << " " << name_of(s.type);
}

inline std::vector<GateShape> gate_shapes() {
  std::vector<GateShape> list;
  const int64_t tokens[] = {1, 2, 31, 33};
  int at = 0;
  for (const int64_t d : {1, 7, 64, 96, 257, 576, 1000}) {
    for (const DType type : kActivations) {
      const int64_t n = d > 200 ? 1 + at % 3 : 1 + at * 5 % 8;
      list.push_back({tokens[at % 4], n, d, type});
      ++at;
    }
  }
  return list;
}

struct ConvShape {
  int64_t T, n, d, w, dilation;
  DType type, weight_type, norm_type;
};

inline std::ostream& operator<<(std::ostream& out, const ConvShape& s) {
  return out << "T=" << s.T << " n=" << s.n << " d=" << s.d << " w=" << s.w
             << " dilation=" << s.dilation << " " << name_of(s.type) << " "
             << name_of(s.weight_type) << " " << name_of(s.norm_type);
}

inline std::vector<ConvShape> conv_shapes() {
  std::vector<ConvShape> list;
  const int64_t tokens[] = {1, 2, 31, 33, 70};
  const int64_t taps[] = {4, 1, 2, 5};
  const int64_t dilations[] = {3, 1, 2, 20, 100};
  int at = 0;
  for (const int64_t d : {1, 7, 64, 96, 257, 576, 1000}) {
    for (const DType type : kActivations) {
      const int64_t n = d > 100 ? 1 + at % 4 : 1 + at * 5 % 8;
      list.push_back({tokens[at % 5], n, d, taps[at % 4], dilations[at % 5 * 2 % 5], type,
                      at % 2 == 0 ? DType::f32 : DType::bf16,
                      at % 3 == 0 ? DType::f32 : DType::bf16});
      ++at;
    }
  }
  list.push_back({70, 4, 96, 4, 3, DType::f32, DType::f32, DType::f32});
  list.push_back({150, 4, 64, 4, 3, DType::bf16, DType::bf16, DType::bf16});
  list.push_back({150, 2, 40, 4, 45, DType::f32, DType::f32, DType::f32});
  return list;
}

struct LayerShape {
  int64_t T, n, d, w, dilation;
  DType type;
};

inline std::ostream& operator<<(std::ostream& out, const LayerShape& s) {
  return out << "T=" << s.T << " n=" << s.n << " d=" << s.d << " w=" << s.w
             << " dilation=" << s.dilation << " " << name_of(s.type);
}

// Without d = 1, where the gate's gradients cancel.
inline std::vector<LayerShape> layer_shapes() {
  std::vector<LayerShape> list;
  const int64_t tokens[] = {1, 2, 31, 33, 70};
  const int64_t taps[] = {4, 1, 2, 5};
  const int64_t dilations[] = {3, 1, 40};
  int at = 0;
  for (const int64_t d : {7, 64, 96, 257, 576}) {
    for (const DType type : kActivations) {
      const int64_t n = d > 200 ? 1 + at % 4 : 1 + at * 5 % 8;
      list.push_back({tokens[at % 5], n, d, taps[at % 4], dilations[at / 2 % 3], type});
      ++at;
    }
  }
  list.push_back({70, 4, 96, 4, 3, DType::f32});
  list.push_back({150, 4, 64, 4, 3, DType::bf16});
  list.push_back({150, 2, 40, 4, 45, DType::f32});
  return list;
}

}  // namespace ehc::test
