#include "cli/compare.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "cli/integers.h"
#include "core/bind.h"
#include "core/float_formats.h"

namespace ehc::cli {

namespace {

bool is_floating(DType type) {
  return type == DType::f32 || type == DType::f16 || type == DType::bf16 ||
         type == DType::f8_e4m3 || type == DType::f8_e8m0;
}

double value(const Tensor& t, int64_t i) { return load_float(t.data, t.dtype, i); }

// Distance to the next larger number of the dtype at |x|.
double spacing(DType type, double x) {
  struct Format {
    int fraction_bits;
    int least_exponent;
  };
  const Format f = type == DType::f32    ? Format{23, -126}
                   : type == DType::bf16 ? Format{7, -126}
                   : type == DType::f16  ? Format{10, -14}
                                         : Format{3, -6};
  int exponent = f.least_exponent;
  if (x != 0 && std::isfinite(x)) {
    int e = 0;
    std::frexp(x, &e);
    exponent = std::max(exponent, e - 1);
  }
  return std::ldexp(1.0, exponent - f.fraction_bits);
}

bool same_shape(const Tensor& a, const Tensor& b, int skip) {
  if (a.rank - skip != b.rank) return false;
  for (int k = 0; k < b.rank; ++k) {
    if (a.shape[k + skip] != b.shape[k]) return false;
  }
  return true;
}

Comparison compare_integers(const Tensor& got, const Tensor& expected) {
  Comparison result;
  int64_t first = -1;
  double difference = 0;
  double size = 0;
  for (int64_t i = 0; i < expected.numel(); ++i) {
    const auto want = static_cast<double>(integer_at(expected, i));
    const auto have = static_cast<double>(integer_at(got, i));
    size += want * want + have * have;
    if (integer_at(expected, i) == integer_at(got, i)) continue;
    if (first < 0) first = i;
    ++result.failing;
    result.max_error = std::max(result.max_error, std::fabs(have - want));
    difference += (have - want) * (have - want);
  }
  result.max_ulp = result.max_error;
  result.calc_diff = size == 0 ? 0 : difference / size;
  result.equal = result.failing == 0;
  if (first >= 0) {
    result.note = std::to_string(result.failing) + " of " + std::to_string(expected.numel()) +
                  " elements, the first at position " + std::to_string(first) + ": expected " +
                  std::to_string(integer_at(expected, first)) + ", got " +
                  std::to_string(integer_at(got, first));
  }
  return result;
}

}  // namespace

Tolerance default_tolerance(const Tensor& expected) {
  if (!is_floating(expected.dtype) || size_of(expected.dtype) == 1) return {0, 0, 1};
  double largest = 0;
  for (int64_t i = 0; i < expected.numel(); ++i) {
    const double x = std::fabs(value(expected, i));
    if (std::isfinite(x)) largest = std::max(largest, x);
  }
  const double a = std::ldexp(largest, -22);
  return expected.dtype == DType::f32 ? Tolerance{4, a, 1} : Tolerance{1, a, 0.01};
}

Comparison compare(const Tensor& got, const Tensor& expected, const Tolerance& tolerance,
                   bool sum_first_axis) {
  Comparison result;
  const int skip = sum_first_axis ? 1 : 0;
  if (got.dtype != expected.dtype || !same_shape(got, expected, skip)) {
    result.note = "expected " + describe(expected) + ", got " + describe(got);
    return result;
  }
  if (!is_floating(expected.dtype)) return compare_integers(got, expected);

  const int64_t count = expected.numel();
  int64_t beyond_abs = 0;
  double difference = 0;
  double size = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double want = value(expected, i);
    double have = 0;
    if (sum_first_axis) {
      for (int64_t p = 0; p < got.shape[0]; ++p) have += value(got, p * count + i);
    } else {
      have = value(got, i);
    }
    if (std::isnan(want) && std::isnan(have)) continue;
    const bool exact = tolerance.ulp == 0 && tolerance.abs == 0;
    if (want == have && (!exact || std::signbit(want) == std::signbit(have))) {
      if (std::isfinite(want)) size += 2 * want * want;
      continue;
    }
    const double error = std::fabs(have - want);
    const double step = spacing(expected.dtype, want);
    // NaN on one side compares false below and so fails.
    const double allowed = tolerance.ulp * step + tolerance.abs;
    if (!(error <= allowed) || exact) ++result.failing;
    if (std::isnan(error) || error / allowed > result.used) result.used = error / allowed;
    if (!(error <= tolerance.abs)) ++beyond_abs;
    if (std::isnan(error) || error > result.max_error) result.max_error = error;
    if (std::isnan(error) || error / step > result.max_ulp) result.max_ulp = error / step;
    difference += error * error;
    size += want * want + have * have;
  }
  const auto most = static_cast<int64_t>(
      std::ceil(std::clamp(tolerance.share, 0.0, 1.0) * static_cast<double>(count)));
  result.calc_diff = size == 0 ? 0 : difference / size;
  result.equal = result.failing == 0 && beyond_abs <= most;
  return result;
}

}  // namespace ehc::cli
