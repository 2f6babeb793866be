#pragma once

#include "ehc/c_api.h"
#include "ehc/context.h"

struct ehc_context {
  ehc::Context context;
};
