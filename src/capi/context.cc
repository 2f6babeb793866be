#include "capi/context.h"

#include <string>

#include "capi/status.h"

using ehc::Context;
using ehc::capi::guarded;
using ehc::capi::not_null;

extern "C" {

ehc_status ehc_context_create_cpu(int32_t threads, ehc_context** context) {
  return guarded([&] {
    ehc_context*& out = not_null(context, "ehc_context_create_cpu", "context", "a place for it");
    out = nullptr;
    out = new ehc_context{Context::cpu(threads)};
  });
}

ehc_status ehc_context_create_cuda(int32_t device_index, void* stream, ehc_context** context) {
  return guarded([&] {
    ehc_context*& out = not_null(context, "ehc_context_create_cuda", "context", "a place for it");
    out = nullptr;
    out = new ehc_context{Context::cuda(device_index, stream)};
  });
}

void ehc_context_destroy(ehc_context* context) { delete context; }

ehc_status ehc_context_set_workspace(ehc_context* context, void* data, size_t bytes) {
  return guarded([&] {
    not_null(context, "ehc_context_set_workspace", "context", "a context")
        .context.set_workspace(data, bytes);
  });
}

ehc_status ehc_context_set_implementation(ehc_context* context, const char* name) {
  return guarded([&] {
    not_null(context, "ehc_context_set_implementation", "context", "a context")
        .context.set_implementation(name != nullptr ? name : "");
  });
}

ehc_status ehc_context_set_log(ehc_context* context, ehc_log log, void* user) {
  return guarded([&] {
    Context& out = not_null(context, "ehc_context_set_log", "context", "a context").context;
    if (log == nullptr) {
      out.set_log({});
    } else {
      out.set_log([log, user](std::string_view line) { log(user, std::string(line).c_str()); });
    }
  });
}

}  // extern "C"
