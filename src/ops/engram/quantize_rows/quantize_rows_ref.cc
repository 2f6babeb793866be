// The definition, by search: the smallest exponent that fits, and the nearest of all weights.
#include <algorithm>
#include <cmath>

#include "core/float_formats.h"
#include "ops/engram/quantize_rows/quantize_rows_args.h"

namespace ehc::engram {

namespace {

double size_of_code(int code) {
  return static_cast<double>(e4m3_to_float(static_cast<uint8_t>(code)));
}

// The code of [0x00, 0x7e] nearest to |x|, of two the even one; with the sign of x.
uint8_t nearest_e4m3(double x) {
  const double size = std::fabs(x);
  int code = 0;  // the largest one that is not above
  for (int step = 64; step > 0; step /= 2) {
    if (code + step <= 0x7e && size_of_code(code + step) <= size) code += step;
  }
  if (code < 0x7e) {
    const double below = size - size_of_code(code);
    const double above = size_of_code(code + 1) - size;
    if (above < below || (above == below && code % 2 == 1)) ++code;
  }
  return static_cast<uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

int smallest_exponent(double amax) {
  if (amax == 0) return 0;
  if (std::isinf(amax)) return 127;
  int exponent = std::max(-127, std::ilogb(amax) - 10);  // too small, or the least
  while (std::ldexp(amax, -exponent) > 448) ++exponent;
  return exponent;
}

}  // namespace

void quantize_rows_reference(const QuantizeRowsArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t first = 0; first < a.width; first += a.group) {
      uint8_t* weight = a.weight + r * a.weight_stride + first;
      const auto value = [&](int64_t i) {
        return static_cast<double>(load_float(a.values, a.type, r * a.values_stride + first + i));
      };
      double amax = 0;
      bool has_nan = false;
      for (int64_t i = 0; i < a.group; ++i) {
        has_nan = has_nan || std::isnan(value(i));
        amax = std::fmax(amax, std::fabs(value(i)));
      }
      const int exponent = smallest_exponent(amax);
      for (int64_t i = 0; i < a.group; ++i) {
        weight[i] = has_nan ? 0x7f : nearest_e4m3(std::ldexp(value(i), -exponent));
      }
      a.scale[r * a.scale_stride + first / a.group] =
          has_nan ? 255 : static_cast<uint8_t>(exponent + 127);
    }
  }
}

}  // namespace ehc::engram
