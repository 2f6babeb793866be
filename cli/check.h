// Every implementation of an operator against its reference, over cases.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/case_run.h"
#include "cli/compare.h"

namespace ehc::cli {

struct CheckOptions {
  Device device = Device::cpu;
  std::string implementation;  // one, or a family such as "cpu"; empty: all
  int intensity = 1;
};

struct CheckRow {
  std::string implementation;
  int64_t cases = 0;
  int64_t refused = 0;
  double worst_error = 0;  // largest |error| over the largest |expected| of its tensor
  double worst_used = 0;   // largest error as a share of what the rule allows that element
  double worst_diff = 0;   // largest calc_diff
  int64_t failures = 0;
};

struct CheckFailure {
  std::string line;  // can be pasted into a case file
  std::string implementation;
  std::string what;
};

struct CheckReport {
  std::vector<CheckRow> rows;
  std::vector<CheckFailure> failures;
};

// What is required of an implementation in each case:
//  - its outputs equal those of `reference` (double accumulation) by the tolerance rule, bit for
//    bit where the operator is exact: `compare=exact`, or no `reference.f32` in its list;
//  - every element is written and nothing around it, inputs stay as they are;
//  - the same bits for any number of threads and in every layout;
//  - the same bits for a token alone (forward operators whose tokens do not meet).
// `progress` is told the number of cases done.
CheckReport check_operator(const Operator& op, const std::vector<CaseLine>& lines,
                           const CheckOptions& options,
                           const std::function<void(size_t)>& progress = {});

}  // namespace ehc::cli
