// What the stages of a run cost, and how that compares with copying memory.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ehc::cli {

// What one stage cost over all its calls.
struct StageTime {
  std::string name;
  std::string op;              // operator that it calls
  std::string implementation;  // chosen by the library
  double bytes_per_token = 0;  // by the formulas of the operators
  double flop_per_token = 0;
  int64_t tokens = 0;
  double seconds = 0;
  double best_tokens_per_second = 0;  // fastest call

  void add(int64_t call_tokens, double call_seconds);
};

// One object for each stage that ran. `ceiling`: bytes per second of a copy.
nlohmann::ordered_json stages_json(const std::vector<StageTime>& times, double ceiling);
// The same as lines of a terminal.
void print_stages(const nlohmann::ordered_json& stages);

}  // namespace ehc::cli
