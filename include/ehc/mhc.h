// The operators of the mHC family.
#pragma once

#include "ehc/mhc/amax_gain.h"
#include "ehc/mhc/defect.h"
#include "ehc/mhc/expand.h"
#include "ehc/mhc/head_mix.h"
#include "ehc/mhc/merge.h"
#include "ehc/mhc/multilayer_recompute.h"
#include "ehc/mhc/norm_fn_bwd.h"
#include "ehc/mhc/plan_recompute.h"
#include "ehc/mhc/post.h"
#include "ehc/mhc/pre_apply.h"
#include "ehc/mhc/pre_big_fuse.h"
#include "ehc/mhc/prenorm_gemm.h"
#include "ehc/mhc/presets.h"
#include "ehc/mhc/reduce_partials.h"
#include "ehc/mhc/sinkhorn.h"
#include "ehc/mhc/split.h"
