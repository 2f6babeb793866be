// What a call costs, which side of a device's ridge it is on, and what would run it here.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/cost.h"
#include "ehc/context.h"

namespace ehc::cli {

// The device of the figures in docs: an H200, by its vendor.
struct ModelDevice {
  double bandwidth = 4.8e12;                                       // bytes per second
  double peak = 67e12;                                             // fp32 operations per second
  [[nodiscard]] double ridge() const { return peak / bandwidth; }  // operations per byte
};

struct Advice {
  std::string call;                  // the case, in the form of docs/cases.md
  std::vector<std::string> assumed;  // what of it nobody said: "n=4"
  std::string batch_axis;            // "T"; empty: the operator has none
  int64_t batch = 1;                 // its length
  Traffic traffic;
  int64_t flops = 0;
  bool crosses_blocks = false;
  std::string implementation;
  std::vector<std::pair<std::string, std::string>> refused;  // those before it, and why
  size_t workspace_bytes = 0;

  // What a larger batch would make larger; without a batch all there is.
  [[nodiscard]] double bytes() const { return traffic.batch > 0 ? traffic.batch : traffic.total(); }
  [[nodiscard]] double intensity() const {
    return bytes() > 0 ? static_cast<double>(flops) / bytes() : 0;
  }
  [[nodiscard]] double seconds_of_bytes(const ModelDevice& device) const {
    return bytes() / device.bandwidth;
  }
  [[nodiscard]] double seconds_of_flops(const ModelDevice& device) const {
    return static_cast<double>(flops) / device.peak;
  }
};

// Completes `line` by the usual sizes and attributes. Throws UsageError that names --shape where a
// size is missing, and Error for what the operator does not accept.
Advice advise(const Operator& op, CaseLine line, const Context& context);

}  // namespace ehc::cli
