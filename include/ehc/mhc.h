// The operators of the mHC family.
#pragma once

#include "ehc/mhc/post.h"
#include "ehc/mhc/pre_apply.h"
