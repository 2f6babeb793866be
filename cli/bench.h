// Timing of cases.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "cli/case_inputs.h"
#include "ehc/context.h"

namespace ehc::cli {

struct Timing {
  std::string implementation;  // empty: this call was refused
  double best = 0;             // seconds
  double median = 0;
  double rated = 0;  // what rates are made of: the best, on a device the median
  int64_t repeats = 0;
};

// A case in memory on a context, as often as it takes to keep it out of the caches.
class BenchCase {
 public:
  BenchCase(const CaseInputs& inputs, const Context& context);
  [[nodiscard]] double bytes() const { return bytes_; }
  // Operations, of an operator that says how many; else 0.
  [[nodiscard]] double flops() const { return flops_; }
  // `implementation` empty: the library's choice. Repeats for `seconds`, at least once; on a device
  // in replays of a graph of many calls.
  Timing time(const std::string& implementation, double seconds);

 private:
  // Seconds of each run, or per call of each replay.
  std::vector<double> time_runs(double seconds);
  std::vector<double> time_replays(double seconds);

  Context context_;
  double bytes_ = 0;
  double flops_ = 0;
  std::deque<DynamicCall> calls_;
  std::vector<Buffer> memory_;
  Buffer workspace_;
};

// Nanoseconds of the front door's check alone, and of a whole call.
struct CallCost {
  double check = 0;
  double call = 0;
};
CallCost time_call(const CaseInputs& inputs, Context& context);

// Seconds of the first and the second call of an operator in this process, each waited for, and of
// what the device itself needs to start.
struct FirstCall {
  double start = 0;
  double first = 0;
  double second = 0;
};
FirstCall time_first_call(const CaseInputs& inputs, Device device);

}  // namespace ehc::cli
