// Errors: the library throws ehc::Error and nothing else (what a caller's own executor throws
// passes through, see context.h); it never aborts and never prints.
#pragma once

#include <stdexcept>
#include <string>

#include "ehc/export.h"

namespace ehc {

// What went wrong. The C ABI and the exit codes of `ehc op` are derived from it.
enum class ErrorKind {
  contract,     // an argument breaks the operator's contract; the text names it
  io,           // a file cannot be read, written or understood; the text names the path
  unavailable,  // the device, or an implementation for it, is not there
  internal,     // a system call or driver failed; not the caller's fault
};

// `what()` is one line: "<operator>: tensor '<name>': expected <what>, got <what>".
class EHC_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace ehc
