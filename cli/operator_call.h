// Calls of operators by name, with workspace lent as it is needed.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/registry.h"
#include "ehc/context.h"

namespace ehc::cli {

class OperatorCall {
 public:
  template <class Params>
  void operator()(Context& context, std::string_view op, const Params& params) {
    const Operator& found = *find_operator(op);
    const Plan prepared = plan(found, context, params);
    implementation_ = prepared.implementation;
    if (workspace_.size() < prepared.workspace_bytes) workspace_.resize(prepared.workspace_bytes);
    context.set_workspace(workspace_.data(), workspace_.size());
    invoke(found, context, params);
  }
  // What ran the last call.
  [[nodiscard]] const std::string& implementation() const { return implementation_; }

 private:
  std::string implementation_;
  std::vector<std::byte> workspace_;
};

}  // namespace ehc::cli
