// Failures on the way to Python: a status of the C interface and its line of text.
#pragma once

#include <stdexcept>
#include <string>

#include "ehc/c_api.h"

namespace ehc::python {

class Failure : public std::runtime_error {
 public:
  Failure(ehc_status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  [[nodiscard]] ehc_status status() const { return status_; }

 private:
  ehc_status status_;
};

inline void check(ehc_status status) {
  if (status != EHC_OK) throw Failure(status, ehc_last_error());
}

}  // namespace ehc::python
