#include "cli/checked_rows.h"

#include <fmt/core.h>

#include <algorithm>

#include "cli/commands.h"

namespace ehc::cli {

using Json = nlohmann::ordered_json;

void CheckedRows::add(const std::string& op, const std::string& output, int64_t rows,
                      const Comparison& result) {
  auto line = std::find_if(lines_.begin(), lines_.end(), [&](const Line& entry) {
    return entry.op == op && entry.output == output;
  });
  if (line == lines_.end()) {
    lines_.push_back({.op = op, .output = output});
    line = std::prev(lines_.end());
  }
  line->rows += rows;
  line->equal = line->equal && result.equal;
  line->max_error = std::max(line->max_error, result.max_error);
  line->max_ulp = std::max(line->max_ulp, result.max_ulp);
  line->calc_diff = std::max(line->calc_diff, result.calc_diff);
}

Json CheckedRows::to_json() const {
  Json json = Json::array();
  for (const Line& line : lines_) {
    json.push_back({{"op", line.op},
                    {"output", line.output},
                    {"rows", line.rows},
                    {"max_error", line.max_error},
                    {"max_ulp", line.max_ulp},
                    {"calc_diff", line.calc_diff},
                    {"equal", line.equal}});
  }
  return json;
}

void require_equal(const Json& checks) {
  for (const Json& check : checks) {
    if (check["equal"].get<bool>()) continue;
    fmt::print(stderr, "ehc: {}: '{}' differs from the reference by up to {:.3g}\n",
               check["op"].get<std::string>(), check["output"].get<std::string>(),
               check["max_error"].get<double>());
    throw Exit{kDifferent};
  }
}

}  // namespace ehc::cli
