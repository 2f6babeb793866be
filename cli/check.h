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
  std::string implementation{};  // one, or a family such as "cpu"; empty: all
  int intensity = 1;
  int level = 0;     // cases of this level alone, whatever the intensity; 0: all up to that
  size_t most = 0;   // cases of an operator, spread over its list; 0: all
  size_t slice = 0;  // of `slices`: of these cases, each `slices`-th
  size_t slices = 1;
  int repeats = 50;  // of a case on a device
  // Each case runs in the layout that it names alone, with every forced grid: for tools under which
  // a kernel takes a hundred times longer.
  bool once = false;
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

// Whether a case of these options' level and device.
bool takes_part(const CaseLine& line, const CheckOptions& options);

// What docs/cases.md says is required of an implementation in each case. `progress` is told the
// number of cases done.
CheckReport check_operator(const Operator& op, const std::vector<CaseLine>& lines,
                           const CheckOptions& options,
                           const std::function<void(size_t)>& progress = {});

}  // namespace ehc::cli
