#include "capi/status.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "ehc/error.h"
#include "ehc/version.h"

namespace ehc::capi {

namespace {

// Fixed storage, so that "out of memory" can be told.
thread_local char last_error[1024] = "";

void store(const char* text) noexcept {
  const size_t length = std::min(std::strlen(text), sizeof(last_error) - 1);
  std::memcpy(last_error, text, length);
  last_error[length] = '\0';
}

ehc_status status_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::contract:
      return EHC_CONTRACT;
    case ErrorKind::io:
      return EHC_IO;
    case ErrorKind::unavailable:
      return EHC_UNAVAILABLE;
    case ErrorKind::internal:
      return EHC_INTERNAL;
  }
  return EHC_INTERNAL;
}

}  // namespace

ehc_status status_of_current_exception() noexcept {
  try {
    throw;
  } catch (const Error& e) {
    store(e.what());
    return status_of(e.kind());
  } catch (const std::bad_alloc&) {
    store("out of memory");
  } catch (const std::exception& e) {
    store(e.what());
  } catch (...) {
    store("an exception of unknown type");
  }
  return EHC_INTERNAL;
}

void fail_argument(const char* function, const char* argument, const char* expected,
                   const std::string& got) {
  throw Error(ErrorKind::contract, std::string(function) + ": argument '" + argument +
                                       "': expected " + expected + ", got " + got);
}

}  // namespace ehc::capi

extern "C" {

const char* ehc_last_error(void) { return ehc::capi::last_error; }
const char* ehc_version(void) { return EHC_VERSION_STRING; }
int32_t ehc_version_number(void) { return EHC_VERSION; }

}  // extern "C"
