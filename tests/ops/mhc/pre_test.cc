#include "ehc/mhc/pre.h"

#include "tests/ops/mhc/support.h"
