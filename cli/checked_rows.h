// Samples of a run's outputs, compared with what the reference implementations make of the same
// inputs.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/compare.h"

namespace ehc::cli {

class CheckedRows {
 public:
  // One comparison of `rows` rows; those of the same operator and output become one line.
  void add(const std::string& op, const std::string& output, int64_t rows,
           const Comparison& result);
  // One object for each output: operator, rows, largest errors, whether all were equal.
  [[nodiscard]] nlohmann::ordered_json to_json() const;

 private:
  struct Line {
    std::string op;
    std::string output;
    int64_t rows = 0;
    double max_error = 0;
    double max_ulp = 0;
    double calc_diff = 0;
    bool equal = true;
  };
  std::vector<Line> lines_;
};

// For the end of a command, where a comparison may have failed: names the first that did on stderr
// and throws Exit.
void require_equal(const nlohmann::ordered_json& checks);

}  // namespace ehc::cli
