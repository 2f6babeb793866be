// The border of the C interface: exceptions become a status and this thread's text.
#pragma once

#include <string>

#include "ehc/c_api.h"

namespace ehc::capi {

// Stores the text of the exception in flight and returns its status. Never throws or allocates
// memory that it would miss.
ehc_status status_of_current_exception() noexcept;

// Error{contract}: "<function>: argument '<argument>': expected <expected>, got <got>".
[[noreturn]] void fail_argument(const char* function, const char* argument, const char* expected,
                                const std::string& got);

template <class T>
T& not_null(T* pointer, const char* function, const char* argument, const char* expected) {
  if (pointer == nullptr) fail_argument(function, argument, expected, "null");
  return *pointer;
}

template <class Body>
ehc_status guarded(const Body& body) noexcept {
  try {
    body();
    return EHC_OK;
  } catch (...) {
    return status_of_current_exception();
  }
}

// For functions that return a value; `otherwise` on failure.
template <class T, class Body>
T guarded_value(T otherwise, const Body& body) noexcept {
  try {
    return body();
  } catch (...) {
    status_of_current_exception();
    return otherwise;
  }
}

}  // namespace ehc::capi
