#include "cli/stage_time.h"

#include <fmt/core.h>

#include <algorithm>

namespace ehc::cli {

using Json = nlohmann::ordered_json;

void StageTime::add(int64_t call_tokens, double call_seconds) {
  tokens += call_tokens;
  seconds += call_seconds;
  best_tokens_per_second =
      std::max(best_tokens_per_second, static_cast<double>(call_tokens) / call_seconds);
}

Json stages_json(const std::vector<StageTime>& times, double ceiling) {
  Json json = Json::array();
  for (const StageTime& time : times) {
    if (time.tokens == 0) continue;
    const double best_bytes = time.best_tokens_per_second * time.bytes_per_token;
    json.push_back(
        {{"stage", time.name},
         {"op", time.op},
         {"implementation", time.implementation},
         {"tokens", time.tokens},
         {"seconds", time.seconds},
         {"tokens_per_second", static_cast<double>(time.tokens) / time.seconds},
         {"best_tokens_per_second", time.best_tokens_per_second},
         {"bytes_per_token", time.bytes_per_token},
         {"best_gb_per_second", best_bytes * 1e-9},
         {"share_of_copy", best_bytes / ceiling},
         {"best_gflop_per_second", time.best_tokens_per_second * time.flop_per_token * 1e-9}});
  }
  return json;
}

void print_stages(const Json& stages) {
  fmt::print("{:<14} {:<16} {:>10} {:>10} {:>12} {:>9} {:>8}\n", "stage", "implementation",
             "tokens", "seconds", "tokens/s", "GB/s", "of copy");
  for (const Json& stage : stages) {
    fmt::print("{:<14} {:<16} {:>10} {:>10.4f} {:>12.4g} {:>9.2f} {:>8.2f}\n",
               stage["stage"].get<std::string>(), stage["implementation"].get<std::string>(),
               stage["tokens"].get<int64_t>(), stage["seconds"].get<double>(),
               stage["best_tokens_per_second"].get<double>(),
               stage["best_gb_per_second"].get<double>(), stage["share_of_copy"].get<double>());
  }
}

}  // namespace ehc::cli
