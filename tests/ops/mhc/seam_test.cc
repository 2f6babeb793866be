#include "ehc/mhc/seam.h"

#include "tests/ops/mhc/support.h"
