// The tables of the operators in C types, built once when a caller first asks.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "core/operator.h"
#include "ehc/c_api.h"

struct ehc_operator {
  const ehc::Operator* op = nullptr;
  ehc_op_info info{};
  std::vector<ehc_tensor_info> tensors;
  std::vector<ehc_attribute_info> attributes;
  std::vector<ehc_implementation_info> implementations;
  std::deque<std::string> texts;              // what the `const char*` point to
  std::deque<std::vector<ehc_dtype>> dtypes;  // what the type lists point to
};
