// The operators' tables for Python.
#pragma once

#include <cstdint>
#include <string>

namespace ehc::python {

// A JSON list of the operators by position: name, section, summary, tensors, attributes,
// implementations, with the members of c_api.h.
[[nodiscard]] std::string tables_json();

// Whether some implementation of the operator at this position may need a workspace.
[[nodiscard]] bool uses_workspace(int64_t op);

}  // namespace ehc::python
