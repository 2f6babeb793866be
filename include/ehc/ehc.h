// The whole C++ interface. Each header also stands alone.
#pragma once

#include "ehc/context.h"
#include "ehc/dtype.h"
#include "ehc/engram.h"
#include "ehc/error.h"
#include "ehc/memory.h"
#include "ehc/mhc.h"
#include "ehc/table.h"
#include "ehc/tensor.h"
#include "ehc/text.h"
#include "ehc/version.h"
