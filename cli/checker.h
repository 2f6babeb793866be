// What `check_operator` is made of; the files check*.cc have a group of requirements each.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/case_run.h"
#include "cli/check.h"
#include "core/cuda_graph.h"

namespace ehc::cli {

bool is_floating(DType type);
// The axis of T, or -1.
int token_axis(const Shape& shape);
// Empty when all outputs have the same bits; any NaN for NaN.
std::string differing_bits(const CaseInputs& inputs, const RunResult& a, const RunResult& b);
std::string first_difference(const Tensor& a, const Tensor& b);

struct Scale {
  double largest = 0;    // |expected|
  double f32_error = 0;  // of the plain loops in fp32
};

// What a case must give.
struct Expected {
  RunResult reference;
  RunResult plain;  // of `reference.f32`, where the operator has it and takes the case
  std::vector<Scale> scales;
};

// Checks one operator; methods share the report and the contexts.
class Checker {
 public:
  Checker(const Operator& op, const CheckOptions& options);
  void check_case(const CaseLine& line);
  CheckReport take() { return std::move(report_); }

 private:
  // check.cc
  Context& host(int threads);
  // On a device the context of a stream that can be captured; else so many threads.
  Context& context(int threads = 1);
  Expected expect(const CaseInputs& inputs);
  void check_implementation(const CaseInputs& inputs, const Expected& expected, CheckRow& row);
  void check_values(const CaseInputs& inputs, const Expected& expected, const RunResult& got,
                    CheckRow& row);
  [[nodiscard]] Tolerance tolerance_of(const CaseLine& line, const Expected& expected,
                                       size_t output) const;
  void check_threads(const CaseInputs& inputs, const RunResult& base, CheckRow& row);
  void check_layouts(const CaseInputs& inputs, const RunResult& base, CheckRow& row);
  void check_layout(const CaseInputs& inputs, const RunResult& base, Layout layout, CheckRow& row);
  bool sound(const CaseInputs& inputs, const RunResult& result, CheckRow& row);
  void fail_row(const CaseLine& line, CheckRow& row, const std::string& what);

  // check_tokens.cc
  void check_tokens(const CaseInputs& inputs, const RunResult& base, CheckRow& row);
  void check_token_alone(const CaseInputs& inputs, const RunResult& base, int64_t token,
                         std::vector<int>& axes, CheckRow& row);
  void check_other_places(const CaseInputs& inputs, const RunResult& base,
                          const std::vector<int>& axes, CheckRow& row);

  // check_device.cc
  void check_grids(const CaseInputs& inputs, const RunResult& base, Layout layout, CheckRow& row);
  void check_device(const CaseInputs& inputs, const RunResult& base, CheckRow& row);
  void check_many_tokens(const CaseInputs& inputs, const Expected& expected, const RunResult& base,
                         CheckRow& row);

  const Operator& op_;
  CheckOptions options_;
  CheckReport report_;
  bool has_f32_ = false;
  std::map<int, Context> hosts_;  // by threads
  std::optional<cuda_graph::Stream> stream_;
  std::optional<Context> on_stream_;
};

// On what the bits of a token's outputs may depend beside the token itself.
enum class TokenBits {
  token,      // nothing else: class B
  count,      // the number of tokens, but not their order (BatchDependent; outputs with an axis S)
  neighbours  // sequences, state, sums over tokens; or a backward operator, which promises less
};
TokenBits token_bits(const Schema& schema);

}  // namespace ehc::cli
