// Symbol visibility: everything is hidden unless a declaration carries EHC_API.
#pragma once

#define EHC_API __attribute__((visibility("default")))
