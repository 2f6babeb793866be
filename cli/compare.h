// Comparison of an output with an expected tensor, for `ehc op --check` and `ehc check`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "ehc/tensor.h"

namespace ehc::cli {

// [ulp, abs, share]: |got - expected| <= ulp * spacing(expected) + abs for every element, and at
// most `share` of the elements (rounded up) differ by more than abs. {0, 0}: the same bits.
struct Tolerance {
  double ulp = 0;
  double abs = 0;
  double share = 1;
};

struct Comparison {
  bool equal = false;
  double max_error = 0;  // NaN where only one side is NaN
  double max_ulp = 0;    // of integers: max_error
  double used = 0;       // largest error as a share of what its element is allowed
  double calc_diff = 0;  // sum (a-b)^2 / sum (a^2+b^2)
  int64_t failing = 0;   // elements beyond the rule
  std::string note;      // why: shapes, dtypes, or which integers differ
};

// Integers: same values. F32 [4, a], BF16 and F16 [1, a, 0.01], a = 2^-22 * largest |expected|.
Tolerance default_tolerance(const Tensor& expected);

// Host tensors of equal dtype and shape (else the note says so). `sum_first_axis`: `got` is a
// partial output that is added up over its first axis before it is compared.
Comparison compare(const Tensor& got, const Tensor& expected, const Tolerance& tolerance,
                   bool sum_first_axis);

}  // namespace ehc::cli
