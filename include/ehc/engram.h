// The operators of the Engram family.
#pragma once

#include "ehc/engram/compress_ids.h"
#include "ehc/engram/conv.h"
#include "ehc/engram/fused_weight.h"
#include "ehc/engram/gate.h"
#include "ehc/engram/gather.h"
#include "ehc/engram/hash.h"
#include "ehc/engram/kv_projection.h"
#include "ehc/engram/layer.h"
#include "ehc/engram/layout.h"
#include "ehc/engram/token_map.h"
#include "ehc/engram/window.h"
